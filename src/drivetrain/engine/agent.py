"""The process that starts the ranks of this machine and watches them: torchrun's agent, with two changes.

It ends when its launcher does, however that ended, and the ranks end with it: nothing trains on that nobody
waits for. And it tells what became of a rank in a sentence; torchrun's own way is two pages of traceback.

Run as ``python -m drivetrain.engine.agent <pid of the launcher> <torchrun's arguments>``.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from drivetrain.engine.parent import end_with_parent

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the agent to its end; returns the exit code of the first rank that failed, 0 for none."""
    launcher, *rest = arguments
    end_with_parent(int(launcher), signal.SIGTERM)
    logging.disable(logging.CRITICAL)
    try:
        torchrun.run(torchrun.parse_args(rest))
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(describe(rank, failure), file=sys.stderr, flush=True)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


def describe(rank: int, failure: ProcessFailure) -> str:
    """What became of a rank that a signal ended. (One that exited by itself has said so.)"""
    name = signal.Signals(-failure.exitcode).name
    hint = "; the system does that when memory runs out" if name == "SIGKILL" else ""
    return f"rank {rank} (process {failure.pid}) was ended by {name}{hint}"


if __name__ == "__main__":
    # torchrun's own names for processes and variables are kept: ranks see what they would under torchrun.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.exit(main(sys.argv[1:]))
