"""The process whose children are runs that a tuner starts: the command line with its imports done.

Started as ``python -m drivetrain.cli.nursery``. Its first line is ``{"refused"}``: null, or why it makes no children.
An order is ``{"arguments", "stdout", "stderr"}``: the words after ``drivetrain``, and files that are there; see
:mod:`drivetrain.engine.nursery`. No verb: nobody would call it.
"""

import gc
import importlib
import json
import os
import signal
import sys

from drivetrain.cli.application import main as command_line
from drivetrain.engine.nursery import next_order, no_forks
from drivetrain.engine.parent import end_with_parent

__all__ = ["main"]

_IMPORTED = (
    "torch._dynamo",
    "torch.distributed",
    "torch.profiler",
    "drivetrain.cli.profile_command",
    "drivetrain.cli.train_command",
    "drivetrain.engine.creation",
    "drivetrain.engine.preflight",
    "drivetrain.engine.worker",
)
"""What every run imports, most of it only once it has begun."""
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def main() -> None:
    """The process; it ends when its stdin does, and with who started it."""
    end_with_parent(os.getppid(), signal.SIGKILL)
    _import_all()
    refused = no_forks()
    sys.stdout.buffer.write(json.dumps({"refused": refused}).encode() + b"\n")
    sys.stdout.buffer.flush()
    if refused is not None:
        return
    # What is there now is never collected: a collection would write to, and so copy, memory that children share.
    gc.collect()
    gc.freeze()
    order = next_order()
    files = (
        os.open(os.devnull, os.O_RDONLY),
        os.open(order["stdout"], os.O_WRONLY),
        os.open(order["stderr"], os.O_WRONLY | os.O_APPEND),
    )
    for number, descriptor in enumerate(files):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = ["drivetrain", *order["arguments"]]
    command_line()


def _import_all() -> None:
    """Import what runs need, without the threads that NumPy's OpenBLAS starts when it is loaded. The variable is gone
    again before there is a child; no run multiplies by NumPy."""
    before = os.environ.get(_BLAS_THREADS)
    os.environ[_BLAS_THREADS] = "1"
    try:
        for name in _IMPORTED:
            importlib.import_module(name)
    finally:
        if before is None:
            del os.environ[_BLAS_THREADS]
        else:
            os.environ[_BLAS_THREADS] = before


if __name__ == "__main__":
    main()
