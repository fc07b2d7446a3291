"""Starting runs: the command line in a process of its own, watched until it ends, whatever way it ends.

A run that fails is a result here, never an exception: out of memory, a crash, a hang and a divergence say something
about the configuration that was tried.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import orjson

from drivetrain.archive.atomic import write_fault
from drivetrain.archive.encoding import restore_non_finite
from drivetrain.tune.launcher import LaunchedRanks, Launcher
from drivetrain.tune.memory_kills import kernel_memory_kills
from drivetrain.tune.nursery import Child, Nursery

__all__ = ["Attempt", "CommandLineTrainer", "Outcome", "Runner", "Trainer"]

Outcome = Literal["finished", "diverged", "out_of_memory", "crash", "hang", "refused", "interrupted"]
"""How an attempt to run ended. ``refused``: exit code 2, bad input; ``interrupted``: somebody else stopped it."""


@dataclass(frozen=True)
class Attempt:
    """One run that was tried.

    Attributes:
        outcome: how it ended.
        run: its directory; None where it ended before it had one.
        message: why, in one or a few lines; empty for ``finished``.
        elapsed_s: wall time of the process, from its start to its end.
        summary: the document it printed; None where it printed none.
    """

    outcome: Outcome
    run: Path | None
    message: str
    elapsed_s: float
    summary: dict[str, Any] | None


class Trainer(Protocol):
    """Whoever can train a configuration."""

    def train(
        self,
        config: Path,
        overrides: Sequence[str],
        *,
        options: Sequence[str] = (),
        world_size: int = 1,
        timeout_s: float | None = None,
    ) -> Attempt:
        """Train the configuration in the file ``config`` with ``section.field=value`` overrides, to its end.

        Args:
            options: further options of ``drivetrain train``, such as ``--probe``.
            world_size: processes.
            timeout_s: longest time it may take; None: as long as it makes progress.
        """
        ...


class Runner(Trainer, Protocol):
    """A trainer that can also profile."""

    def profile(
        self,
        config: Path,
        overrides: Sequence[str],
        *,
        steps: int,
        start: int | None = None,
        options: Sequence[str] = (),
        world_size: int = 1,
        timeout_s: float | None = None,
    ) -> Attempt:
        """Profile ``steps`` steps of the configuration; ``summary`` is the document of ``drivetrain profile``.

        A run that has finished without a window has finished.

        Args:
            start: first profiled step; None: as early as can be calibrated.
            options: further options of ``drivetrain profile``.
            world_size, timeout_s: see :meth:`Trainer.train`.
        """
        ...


_RUN_LINE = re.compile(r"^run: (?P<path>.+)$", re.MULTILINE)
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.1
_KEPT_CHARACTERS = 2000
_LAUNCHER_GRACE_S = 15.0
"""On top of a run's own: a launcher waits for its processes before it ends."""


class CommandLineTrainer:
    """Runs ``drivetrain …`` in a process and a session of its own, its stderr in a log file.

    The process is the child of one that has its imports done, where there can be one (:mod:`drivetrain.tune.nursery`),
    else ``python -m drivetrain …``. It ends with this one, also when this one is killed with SIGKILL (Linux). Where
    heartbeat and log stand still for ``stall_s`` seconds, or ``timeout_s`` is over, it gets SIGTERM, after ``grace_s``
    seconds SIGKILL, and the attempt is a hang. One run at a time; :meth:`close` it, or use it in ``with``.

    Args:
        logs: folder of the log files, ``attempt-0000.log`` and on; made when missing.
        directory: working directory of the processes; None: this one's.
        environment: variables on top of this process's.
        stall_s: without any progress for this long a run hangs. Compiling a large model makes none.
        grace_s: time a run has to save after SIGTERM.
        prepared: False: every run imports everything for itself.
        launcher: starts the processes of each run in place of this class; None: they are of this machine.
    """

    def __init__(
        self,
        logs: Path,
        *,
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stall_s: float = 600.0,
        grace_s: float = 30.0,
        prepared: bool = True,
        launcher: Launcher | None = None,
    ) -> None:
        self.logs = logs
        self.directory = directory
        self.environment = dict(environment or {})
        self.stall_s = stall_s
        self.grace_s = grace_s
        self.launcher = launcher
        prepares = prepared and launcher is None
        self._nursery = Nursery(logs, directory, self.environment) if prepares else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process that starts runs. Safe to call twice; a later run starts it again."""
        if self._nursery is not None:
            self._nursery.close()

    def train(
        self,
        config: Path,
        overrides: Sequence[str],
        *,
        options: Sequence[str] = (),
        world_size: int = 1,
        timeout_s: float | None = None,
    ) -> Attempt:
        """``drivetrain train config overrides… --json options…``; see :class:`Trainer`."""
        return self._run("train", config, overrides, options, world_size, timeout_s)

    def profile(
        self,
        config: Path,
        overrides: Sequence[str],
        *,
        steps: int,
        start: int | None = None,
        options: Sequence[str] = (),
        world_size: int = 1,
        timeout_s: float | None = None,
    ) -> Attempt:
        """``drivetrain profile config overrides… --steps N --start K --json options…``; see :class:`Runner`."""
        window = ["--steps", str(steps), *([] if start is None else ["--start", str(start)])]
        return self._run("profile", config, overrides, [*window, *options], world_size, timeout_s)

    def _run(
        self,
        verb: str,
        config: Path,
        overrides: Sequence[str],
        options: Sequence[str],
        world_size: int,
        timeout_s: float | None,
    ) -> Attempt:
        arguments = [verb, str(config), *overrides, "--json", *options]
        if self.launcher is not None:
            return self._run_launched(self.launcher, arguments, world_size, timeout_s)
        if world_size > 1:
            arguments += ["--nproc", str(world_size)]
        log = self._new_log()
        output = log.with_suffix(".json")
        output.touch()
        if self._nursery is not None:
            self._nursery.prepare()
        kills_before = kernel_memory_kills()
        began = time.monotonic()
        process = self._start(arguments, output, log)
        try:
            hang = self._watch(process, log, timeout_s, self.grace_s)
        except BaseException:
            _end(process, self.grace_s)
            raise
        elapsed_s = time.monotonic() - began
        text = _text(log)
        summary = _document(output)
        output.unlink(missing_ok=True)
        run = self._run_in(text)
        if hang is not None:
            return Attempt("hang", run, hang, elapsed_s, summary)
        memory_kill = process.returncode == -signal.SIGKILL and kernel_memory_kills() > kills_before
        outcome, message = _judge(process.wait(), text, summary, memory_kill=memory_kill)
        return Attempt(outcome, run, message, elapsed_s, summary)

    def _run_launched(
        self, launcher: Launcher, arguments: Sequence[str], world_size: int, timeout_s: float | None
    ) -> Attempt:
        log = self._new_log()
        ranks = LaunchedRanks(log.with_suffix(""), world_size)
        directory = (self.directory or Path()).resolve()
        inside = ranks.command([sys.executable, "-m", "drivetrain", *arguments], directory)
        grace_s = self.grace_s + _LAUNCHER_GRACE_S
        began = time.monotonic()
        process = self._popen(launcher.command(inside, world_size), log, log)
        try:
            hang = self._watch(process, ranks.log, timeout_s, grace_s, ranks.ask_to_stop)
        except BaseException:
            ranks.ask_to_stop()
            _end(process, grace_s)
            raise
        elapsed_s = time.monotonic() - began
        summary, run = _document(ranks.output), self._run_in(_text(ranks.log))
        if hang is not None:
            ranks.require_begun(process.wait(), lambda: _text(log))
            return Attempt("hang", run, hang, elapsed_s, summary)
        ended = ranks.ended(process.wait(), lambda: _text(log))
        outcome, message = _judge(ended.code, ended.text, summary, memory_kill=ended.memory_kill)
        return Attempt(outcome, run, message, elapsed_s, summary)

    def _run_in(self, text: str) -> Path | None:
        """The run directory that a run has named in what it said."""
        found = _RUN_LINE.search(text)
        return (self.directory or Path()) / found["path"] if found is not None else None

    def _start(self, arguments: Sequence[str], output: Path, log: Path) -> "Child | subprocess.Popen[bytes]":
        child = self._nursery.start(arguments, output, log) if self._nursery is not None else None
        if child is not None:
            return child
        return self._popen([sys.executable, "-m", "drivetrain", *arguments], output, log)

    def _popen(self, command: Sequence[str], output: Path, log: Path) -> "subprocess.Popen[bytes]":
        with log.open("ab") as errors, output.open("ab") as document:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=document,
                stderr=errors,
                cwd=self.directory,
                env={**os.environ, **self.environment},
                start_new_session=True,
                preexec_fn=_ends_with_parent(),  # noqa: PLW1509  one library call, loaded before the fork
            )

    def _new_log(self) -> Path:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            number = 0
            while True:
                path = self.logs / f"attempt-{number:04d}.log"
                with contextlib.suppress(FileExistsError):
                    path.touch(exist_ok=False)
                    return path
                number += 1
        except OSError as error:
            raise write_fault(self.logs / "attempt.log", error, "nothing was started") from error

    def _watch(
        self,
        process: "Child | subprocess.Popen[bytes]",
        log: Path,
        timeout_s: float | None,
        grace_s: float,
        before_the_end: Callable[[], None] = lambda: None,
    ) -> str | None:
        """Wait for the end; None, or why the process had to be ended."""
        began = moved = time.monotonic()
        state: object = None
        heartbeat: Path | None = None
        while True:
            try:
                process.wait(_LOOK_S if time.monotonic() - began < 30 else 1.0)
                return None
            except subprocess.TimeoutExpired:
                now = time.monotonic()
            if heartbeat is None:
                run = self._run_in(_text(log))
                heartbeat = run / "heartbeat.json" if run is not None else None
            current = (_size(log), _beat(heartbeat))
            if current != state:
                state, moved = current, now
            why = None
            if timeout_s is not None and now - began > timeout_s:
                why = f"it had not ended after {timeout_s:.0f} s"
            elif now - moved > self.stall_s:
                why = f"no step, phase or message for {self.stall_s:.0f} s"
            if why is not None:
                before_the_end()
                _end(process, grace_s)
                return f"{why}; ended by force, log: {log}"


def _ends_with_parent() -> Callable[[], None] | None:
    """What makes the child end with this process; it runs in the child before the command does."""
    if sys.platform != "linux":
        return None
    library, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        library.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _end(process: "Child | subprocess.Popen[bytes]", grace_s: float) -> None:
    """SIGTERM, and SIGKILL where that does not help; returns when the process has ended."""
    if process.poll() is None:
        # The process alone: it asks its own ranks to stop and save.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    # Whatever is left of its group: worker processes that did not end with it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _judge(
    code: int, text: str, summary: Mapping[str, Any] | None, *, memory_kill: bool
) -> tuple[Outcome, str]:
    training = summary.get("training", summary) if summary is not None else {}
    status = training.get("status")
    message = _last_words(text)
    if memory_kill:
        return "out_of_memory", "the kernel killed a process because memory ran out"
    if code == 0 or (code == 1 and status == "finished"):
        # 1: a profile of a run that finished without a window.
        return "finished", ""
    if status == "diverged":
        return "diverged", message or "the run diverged"
    if code in (1, 2) and "out of memory" in message.lower():
        return "out_of_memory", message
    if code == 2 and "before the run did" not in message and "another process of the run" not in message:
        return "refused", message
    if code == 130:
        return "interrupted", message or "it was interrupted"
    if code < 0:
        return "crash", f"ended by {signal.Signals(-code).name}" + (f": {message}" if message else "")
    return "crash", message or f"exit code {code}"


def _last_words(text: str) -> str:
    """What the process said of its end: from its last ``error:`` on, else its last line that says something."""
    lines = [line.rstrip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith("error: "):
            return "\n".join(lines[index:])[len("error: ") :][:_KEPT_CHARACTERS]
    return lines[-1][:_KEPT_CHARACTERS] if lines else ""


def _document(path: Path) -> dict[str, Any] | None:
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return restore_non_finite(value) if isinstance(value, dict) else None


def _text(log: Path) -> str:
    """What was said so far; nothing where the file is not there yet."""
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _beat(path: Path | None) -> tuple[Any, Any] | None:
    """Step and phase; the heartbeat's time moves also where the loop does not."""
    try:
        beat = orjson.loads(path.read_bytes()) if path is not None else {}
    except (OSError, ValueError):
        return None
    return (beat.get("step"), beat.get("phase")) if isinstance(beat, dict) else None
