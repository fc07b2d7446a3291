"""The process that starts the ranks of this machine and watches them: torchrun's agent, with two changes.

It ends when its launcher does, however that ended, and the ranks end with it: nothing trains on that nobody
waits for. And it tells what became of a rank in a sentence; torchrun's own way is two pages of traceback.

Run as ``python -m drivetrain.engine.agent <pid of the launcher> <descriptor> <torchrun's arguments>``. To the
descriptor it writes how the first rank that failed ended, as JSON: ``{"rank", "exit_code", "text"}``.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from drivetrain.collector import collect_seldom
from drivetrain.engine.parent import end_with_parent

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the agent to its end; returns the exit code of the first rank that failed, 0 for none."""
    launcher, descriptor, *rest = arguments
    end_with_parent(int(launcher), signal.SIGTERM)
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.CRITICAL)
    try:
        torchrun.run(torchrun.parse_args(rest))
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        rank, failure = cause_of(error.failures)
        text = describe(rank, failure)
        if failure.exitcode < 0:
            print(text, file=sys.stderr, flush=True)
        code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        with os.fdopen(int(descriptor), "w") as told:
            json.dump({"rank": rank, "exit_code": code, "text": text}, told)
        return code
    return 0


def cause_of(failures: "Mapping[int, ProcessFailure]") -> "tuple[int, ProcessFailure]":
    """The rank that brought the others down: they end because it has gone, within the same look at all of them.

    One that a signal ended comes first (SIGTERM is the agent's own way to end the others), then one that ended without
    a word of its own, an exception (exit code 1); a rank that met what it could explain has exit code 2.
    """

    def order(rank: int) -> tuple[int, int, int]:
        code = failures[rank].exitcode
        kind = 3 if code == -signal.SIGTERM else 0 if code < 0 else 2 if code == 2 else 1
        return kind, failures[rank].timestamp, rank

    first = min(failures, key=order)
    return first, failures[first]


def describe(rank: int, failure: "ProcessFailure") -> str:
    """What became of a rank. (One that exited by itself has said so.)"""
    if failure.exitcode >= 0:
        return f"rank {rank} (process {failure.pid}) ended with exit code {failure.exitcode}"
    name = signal.Signals(-failure.exitcode).name
    hint = "; the system does that when memory runs out" if name == "SIGKILL" else ""
    return f"rank {rank} (process {failure.pid}) was ended by {name}{hint}"


if __name__ == "__main__":
    # torchrun's own names for processes and variables are kept: ranks see what they would under torchrun.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    collect_seldom()
    sys.exit(main(sys.argv[1:]))
