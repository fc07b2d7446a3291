"""A process that has imported what others need and computed nothing, and makes a child of itself for each order.

Starting Python with torch takes seconds; a child that is forked takes milliseconds and shares no memory that it writes.
Orders are lines of JSON on stdin. For each the nursery writes two lines: ``{"pid"}`` when the child leads a session of
its own, and ``{"status"}`` when it has ended: its exit code, or less a signal's number. One child at a time.

A nursery must have no threads, which a fork would lose while they hold locks, and must not have touched a GPU, which a
forked process cannot use.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from drivetrain.engine.parent import end_with_parent

__all__ = ["next_order", "no_forks"]


def no_forks() -> str | None:
    """Why children of this process would not be like processes of their own; None where they are."""
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return "this torch is built for GPUs, which a forked process may be unable to use"
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return "this system does not tell how many threads a process has"
    threads = len(list(tasks.iterdir()))
    return None if threads == 1 else f"importing has started {threads - 1} threads, which a fork would lose"


def next_order() -> dict[str, Any]:
    """Make a child for each order on stdin. Returns in the children, with the order; in the nursery never: it exits
    when its stdin ends.

    A child leads a session of its own, ends with the nursery, and still has the nursery's stdin, stdout and stderr.
    """
    for line in sys.stdin.buffer:
        order: dict[str, Any] = json.loads(line)
        begun, begins = os.pipe()
        nursery, pid = os.getpid(), os.fork()
        if pid == 0:
            os.close(begun)
            # Whoever a child starts is in a session that can be ended as one.
            os.setsid()
            os.close(begins)
            end_with_parent(nursery, signal.SIGKILL)
            return order
        os.close(begins)
        # Until it leads a session of its own it cannot be ended as one: what is read here is the end of the pipe.
        os.read(begun, 1)
        os.close(begun)
        _say({"pid": pid})
        _say({"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})
    sys.exit(0)


def _say(what: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(what).encode() + b"\n")
    sys.stdout.buffer.flush()
