"""The process whose children try backends, a child for each request: see :mod:`drivetrain.engine.nursery`.

Started as ``python -m drivetrain.engine.ops_tuning.nursery``. An order is ``{"request", "result", "stderr"}``.
"""

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from drivetrain.archive.atomic import write_json
from drivetrain.engine.nursery import next_order
from drivetrain.engine.ops_tuning.child import answer
from drivetrain.engine.parent import end_with_parent

__all__ = ["main"]


def main() -> None:
    """The process; it ends when its stdin does, and with who started it."""
    # Its stdin is not looked at while a child computes, which one that hangs does for ever.
    end_with_parent(os.getppid(), signal.SIGKILL)
    # Imported by whoever compiles, and no thread is started by it.
    import torch._inductor.compile_fx  # noqa: F401

    _child(next_order())


def _child(order: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        errors = os.open(order["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDWR)
        # What a library prints is no part of any answer.
        for descriptor, number in ((nothing, 0), (nothing, 1), (errors, 2)):
            os.dup2(descriptor, number)
        write_json(Path(order["result"]), answer(order["request"]), fsync=False)
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it was: the tuner reads it from the file, and nobody else would
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # Without the interpreter's end: what the nursery holds is not the child's to close.
        os._exit(code)


if __name__ == "__main__":
    main()
