"""Is the machine ours? What everybody else's processes took while a block ran, from ``/proc``.

A neighbour on one of two cores makes a step of an OpenMP program several times longer, not a little longer.
Blocks therefore wait for a quiet machine, and each says how much of the machine others took.
"""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["Watch", "foreign_share", "wait_until_quiet"]

INTERVAL_S = 0.1
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Sample:
    time: float
    busy_ticks: int
    own_ticks: int


def _busy_ticks() -> int:
    """Ticks all CPUs spent on anything: user, nice, system, interrupts, and stolen by the host."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return user + nice + system + irq + softirq + steal


def _own_ticks(pid: int) -> int:
    """Ticks of a process and of the children it has waited for; -1 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return sum(int(field) for field in fields[11:15])


def wait_until_quiet(*, busy_share: float = 0.05, window_s: float = 1.0, patience_s: float = 180.0) -> float:
    """Wait until less than ``busy_share`` of all CPUs is in use; returns the last share seen."""
    deadline = time.monotonic() + patience_s
    while True:
        before, start = _busy_ticks(), time.monotonic()
        time.sleep(window_s)
        ticks = (_busy_ticks() - before) / TICKS_PER_S
        share = ticks / (time.monotonic() - start) / (os.cpu_count() or 1)
        if share < busy_share or time.monotonic() > deadline:
            return share


class Watch:
    """Samples the machine and one process ten times a second while it is entered."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._samples: list[_Sample] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(INTERVAL_S):
            own = _own_ticks(self._pid)
            if own >= 0:
                self._samples.append(_Sample(time.time(), _busy_ticks(), own))

    def foreign_share(self, start: float, end: float) -> float | None:
        """Share of all CPUs that others took between two moments of ``time.time``; None if not sampled."""
        inside = [sample for sample in self._samples if start <= sample.time <= end]
        if len(inside) < 2:
            return None
        first, last = inside[0], inside[-1]
        return foreign_share(
            last.time - first.time, last.busy_ticks - first.busy_ticks, last.own_ticks - first.own_ticks
        )


def foreign_share(seconds: float, busy_ticks: int, own_ticks: int, cpus: int | None = None) -> float:
    """Ticks that were not our own, over what the CPUs had to give; never below 0."""
    capacity = seconds * TICKS_PER_S * (cpus or os.cpu_count() or 1)
    return max(0.0, (busy_ticks - own_ticks) / capacity)
