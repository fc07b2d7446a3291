"""One rank of a run that a launcher starts: ``python -m drivetrain.tune.launched FOLDER RANKS DIRECTORY -- COMMAND…``.

It stands between the launcher and ``drivetrain``, on whatever machine the launcher has put it, and writes down what a
launcher need not tell: that the rank began, what it said, and how it ended. All of it in ``FOLDER``, which must be the
same for all ranks and for who waits:

* ``rank-R.began.json``: ``host``, ``world_size`` as the environment has it;
* ``rank-R.log`` and, of rank 0, ``rank-0.out``: what the command wrote on stderr and stdout;
* ``rank-R.ended.json``: ``exit_code`` (less the number of a signal), ``memory_kill``, ``time``, and ``fault``: why the
  command was not started at all.

A file ``stop`` there asks it to end as SIGTERM does.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from drivetrain.archive.atomic import write_json
from drivetrain.tune.memory_kills import kernel_memory_kills

__all__ = ["STOP", "began_file", "ended_file", "log_file", "main", "output_file"]

STOP = "stop"
TOLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables without which processes would each train by themselves, or not find each other."""
_LOOK_S = 0.2
_SAVE_WITHIN_S = 60.0
"""After which a command that was asked to end is killed: nobody else may be able to, from where the launcher was."""
_PR_SET_PDEATHSIG = 1


def began_file(folder: Path, rank: int) -> Path:
    """Where a rank says that it has begun."""
    return folder / f"rank-{rank}.began.json"


def ended_file(folder: Path, rank: int) -> Path:
    """Where it says how it ended."""
    return folder / f"rank-{rank}.ended.json"


def log_file(folder: Path, rank: int) -> Path:
    """What it said on stderr."""
    return folder / f"rank-{rank}.log"


def output_file(folder: Path) -> Path:
    """What rank 0 said on stdout."""
    return folder / "rank-0.out"


def main(arguments: Sequence[str]) -> int:
    """Run the command to its end; returns its exit code, 128 and the number of the signal that ended it."""
    folder, expected, directory, dashes, *command = arguments
    assert dashes == "--"
    return _Rank(Path(folder)).run(int(expected), Path(directory), command)


class _Rank:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = int(os.environ.get("RANK", "0"))
        self._process: subprocess.Popen[bytes] | None = None
        self._asked_at: float | None = None

    def run(self, expected: int, directory: Path, command: Sequence[str]) -> int:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        write_json(
            began_file(self.folder, self.rank), {"host": os.uname().nodename, "world_size": world_size}
        )
        fault = None
        lacking = [name for name in TOLD if name not in os.environ]
        if expected > 1 and lacking:
            fault = f"the launcher does not set {', '.join(lacking)} for the processes it starts, as torchrun would"
        elif world_size != expected:
            fault = f"the launcher starts {_ranks(world_size)}, and the tune is of {_ranks(expected)}"
        elif not directory.is_dir():
            fault = f"the directory {directory} of the tune is not there on {os.uname().nodename}"
        if fault is not None:
            return self._ended(2, fault=fault)
        kills = kernel_memory_kills()
        code = self._command(directory, command)
        return self._ended(code, memory_kill=code == -signal.SIGKILL and kernel_memory_kills() > kills)

    def _command(self, directory: Path, command: Sequence[str]) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        parent, library = os.getpid(), ctypes.CDLL(None)

        def end_with_parent() -> None:
            if sys.platform == "linux":
                library.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
                if os.getppid() != parent:
                    os._exit(1)

        stdout = output_file(self.folder) if self.rank == 0 else Path(os.devnull)
        with log_file(self.folder, self.rank).open("wb") as log, stdout.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                cwd=directory,
                # A signal to the launcher's whole group would reach it twice, and twice means: without saving.
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509  one library call, loaded before the fork
            )
        if self._asked_at is not None:
            # Between the handlers and the start.
            self._process.terminate()
        while True:
            try:
                return self._process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                if (self.folder / STOP).exists():
                    self._pass_on(signal.SIGTERM, None)
                if self._asked_at is not None and time.monotonic() - self._asked_at > _SAVE_WITHIN_S:
                    self._process.kill()

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if self._asked_at is not None:
            return
        self._asked_at = time.monotonic()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def _ended(self, code: int, *, memory_kill: bool = False, fault: str | None = None) -> int:
        ended: dict[str, Any] = {
            "exit_code": code,
            "memory_kill": memory_kill,
            "time": time.time(),
            "fault": fault,
        }
        write_json(ended_file(self.folder, self.rank), ended)
        if fault is not None:
            print(f"error: {fault}", file=sys.stderr, flush=True)
        return code if code >= 0 else 128 - code


def _ranks(number: int) -> str:
    return f"{number} process" if number == 1 else f"{number} processes"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
