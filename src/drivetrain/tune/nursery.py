"""Children of one process that has its imports done: a run starts in a fraction of a second instead of seconds.

The other side is ``drivetrain.cli.nursery``. A child is a process of its own, in a session of its own, as one that was
started anew would be; what all of them share is what importing has left in memory, and Python's hash seed.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

import drivetrain
from drivetrain.errors import EnvironmentFault

__all__ = ["Child", "Nursery"]

_MODULE = "drivetrain.cli.nursery"
_START_S = 300.0
"""Within which a nursery has to have imported everything."""


class Child:
    """A process that a nursery has made, with the methods of ``subprocess.Popen`` that a watcher needs.

    Attributes:
        pid: of the process, which leads its session.
        returncode: as Popen's; None while it runs. That of a child whose nursery has gone is that of SIGKILL, by which
            it goes as well.
    """

    def __init__(self, pid: int, status: Callable[[float | None], dict[str, Any] | None]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """``returncode``, looked up."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or less a signal's number.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        if self.returncode is None:
            line = self._status(timeout)
            if line is None:
                raise subprocess.TimeoutExpired(_MODULE, timeout or 0.0)
            self.returncode = int(line.get("status", -signal.SIGKILL))
        return self.returncode

    def terminate(self) -> None:
        """Send it SIGTERM."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


class Nursery:
    """Starts ``drivetrain …`` in children of one process, one at a time.

    The process is replaced where its children would not be what a process started now would be: after a change of an
    environment variable, or of the package's own files.

    Args:
        folder: where its stderr is kept, in the file ``nursery``.
        directory: working directory of the children; None: this process's.
        environment: variables on top of this process's.

    Attributes:
        refused: why there are no children, and ``start`` returns None; None as long as there are.
    """

    def __init__(self, folder: Path, directory: Path | None, environment: Mapping[str, str]) -> None:
        self.refused: str | None = (
            None if sys.platform == "linux" else "processes are forked safely on Linux alone"
        )
        self._errors = folder / "nursery"
        self._directory = directory
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._made_for: object = None
        self._child: Child | None = None

    def prepare(self) -> None:
        """Have a nursery that is up to date, if there can be one.

        Raises:
            EnvironmentFault: it does not start.
        """
        assert self._child is None or self._child.poll() is not None, "one child at a time"
        if self.refused is not None:
            return
        state = self._state()
        if self._process is not None and (self._process.poll() is not None or self._made_for != state):
            self.close()
        if self._process is None:
            self._start()
            self._made_for = state

    def start(self, arguments: Sequence[str], stdout: Path, stderr: Path) -> Child | None:
        """``drivetrain ARGUMENTS`` with its output in files that are there; None where ``refused`` says why.

        Raises:
            EnvironmentFault: no child could be made.
        """
        self.prepare()
        if self._process is None:
            return None
        order = {
            "arguments": list(arguments),
            "stdout": str(stdout.resolve()),
            "stderr": str(stderr.resolve()),
        }
        assert self._process.stdin is not None
        # Where it has gone, its silence is what is reported.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(orjson.dumps(order) + b"\n")
            self._process.stdin.flush()
        begun = self._line(_START_S)
        if begun is None or "pid" not in begun:
            raise self._lost()
        self._child = Child(int(begun["pid"]), self._line)
        return self._child

    def close(self) -> None:
        """End it, and its child with it. Safe to call twice; ``start`` makes a new one."""
        process, self._process, self._child = self._process, None, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> None:
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=self._directory,
                env={**os.environ, **self._environment},
                # A terminal's Ctrl-C reaches the tuner alone, which ends its child itself.
                start_new_session=True,
                bufsize=0,
            )
        answer = self._line(_START_S)
        if answer is None or "refused" not in answer:
            raise self._lost()
        self.refused = answer["refused"]
        if self.refused is not None:
            self.close()

    def _line(self, timeout: float | None) -> dict[str, Any] | None:
        """The next line of the nursery; {} where it has gone, None where none came in time."""
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        if not ready:
            return None
        # A line is written at once and is shorter than what a pipe takes in one piece.
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            # It has closed its end, and may for a moment not count as ended: the next child has another all the same.
            self._made_for = None
            return {}
        found: dict[str, Any] = orjson.loads(line)
        return found

    def _state(self) -> object:
        """What its children take over: the environment, and the state of the package's files."""
        files = sorted(Path(drivetrain.__file__).parent.rglob("*.py"))
        return {**os.environ}, [(str(path), _changed(path)) for path in files]

    def _lost(self) -> EnvironmentFault:
        self.close()
        said = self._errors.read_text("utf-8", "replace").strip().splitlines()
        return EnvironmentFault(
            "the process that starts runs could not be started, or has gone: "
            f"{(said or ['it said nothing'])[-1][:300]} ({self._errors})"
        )


def _changed(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        # It has vanished since it was listed: another state either way.
        return time.monotonic_ns()
