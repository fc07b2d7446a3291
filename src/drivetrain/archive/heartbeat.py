"""The sign of life of a run: ``heartbeat.json``, replaced by a thread at most once a second.

It is what tells a running run from a lost one. The training loop only assigns two attributes; a slow or
full disk is felt by the thread alone.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from drivetrain.archive.atomic import write_json
from drivetrain.archive.encoding import SCHEMA
from drivetrain.errors import EnvironmentFault

__all__ = ["FRESH_SECONDS", "Heartbeat", "is_alive", "process_identity", "write_heartbeat"]

FRESH_SECONDS = 30.0
"""A heartbeat younger than this means running, where the process itself cannot be looked at."""


def _read_words(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _start_of(pid: int) -> int | None:
    """Start of process ``pid`` in clock ticks since boot; None: no such process, a dead one, or no /proc.

    Source: proc_pid_stat(5), fields 3 (state) and 22 (starttime).
    """
    stat = _read_words(f"/proc/{pid}/stat")
    if stat is None:
        return None
    # The command's name, field 2, may hold spaces and brackets; it ends at the last one.
    fields = stat[stat.rfind(")") + 1 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _place() -> str | None:
    """Identifies this boot and process-id namespace: within it, a pid means the same process to everybody."""
    boot = _read_words("/proc/sys/kernel/random/boot_id")
    try:
        return None if boot is None else f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def process_identity(pid: int | None = None) -> dict[str, Any]:
    """What tells a process (this one) from every other: pid, host, start, boot and pid namespace."""
    pid = os.getpid() if pid is None else pid
    return {
        "pid": pid,
        "host": socket.gethostname(),
        "process_start": _start_of(pid),
        "process_place": _place(),
    }


def is_alive(beat: Mapping[str, Any]) -> bool | None:
    """Whether the process that wrote ``beat`` still exists; None: it cannot be told from here.

    It can be told on the same host, boot and pid namespace. A pid that was given to a new process does not
    count: its start differs.
    """
    start, place = beat.get("process_start"), beat.get("process_place")
    if start is None or place is None or beat.get("host") != socket.gethostname() or place != _place():
        return None
    return bool(_start_of(int(beat["pid"])) == start)


def write_heartbeat(path: Path, step: int, phase: str, identity: Mapping[str, Any] | None = None) -> None:
    """Replace ``heartbeat.json`` of the run at ``path``; ``identity`` is this process's unless given.

    Raises:
        EnvironmentFault: it could not be written.
    """
    identity = process_identity() if identity is None else identity
    document = {"schema": SCHEMA, "step": step, "phase": phase, "time": time.time(), **identity}
    write_json(path / "heartbeat.json", document, fsync=False)


class Heartbeat:
    """Writes ``{schema, step, phase, time, pid, host, process_start, process_place}`` until stopped.

    A context manager. The first heartbeat is written before the constructor returns, so that a run never
    looks lost between its first segment and the first tick.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        step: int = 0,
        phase: str = "start",
        interval: float = 1.0,
        on_fault: Callable[[str], None] | None = None,
    ) -> None:
        """Start the thread.

        Args:
            path: the run directory.
            step: the last finished step.
            phase: what the loop is doing, one word.
            interval: seconds between heartbeats.
            on_fault: told once, from the thread, when a heartbeat cannot be written. Training goes on and
                later heartbeats are tried: a run must not die of its own monitoring.
        """
        self.step = step
        self.phase = phase
        self._path = Path(path)
        self._identity = process_identity()
        self._interval = interval
        self._on_fault = on_fault
        self._reported = False
        self._stopping = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def update(self, *, step: int | None = None, phase: str | None = None) -> None:
        """Say where the loop is. Two attribute assignments; waits for nothing."""
        if step is not None:
            self.step = step
        if phase is not None:
            self.phase = phase

    def stop(self) -> None:
        """Write a last heartbeat and end the thread. Calling it twice is harmless."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(timeout=10.0)
        if not self._thread.is_alive():  # Otherwise it hangs in a write; a second writer would hang too.
            self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _beat(self) -> None:
        while not self._stopping.wait(self._interval):
            self._write()

    def _write(self) -> None:
        try:
            write_heartbeat(self._path, self.step, self.phase, self._identity)
        except EnvironmentFault as fault:
            if self._on_fault is not None and not self._reported:
                self._on_fault(f"no heartbeat, the run will look lost to others: {fault}")
            self._reported = True
