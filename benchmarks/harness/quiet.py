"""Is the machine ours? What everybody else's processes take, from ``/proc``.

A neighbour on one of two cores makes a step of an OpenMP program several times longer, not a little longer.
Blocks therefore wait for a quiet machine, and each says how much of the machine others took.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["Usage", "foreign_share", "wait_until_quiet"]

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """CPU time up to a moment, in ticks: of the whole machine, and of the process under test and ourselves."""

    time: float
    busy_ticks: int
    own_ticks: int

    @classmethod
    def now(cls, pid: int) -> Self:
        """Of the process ``pid`` and this one."""
        return cls(time.monotonic(), _busy_ticks(), _ticks_of(pid) + _ticks_of(os.getpid()))


def foreign_share(before: Usage, after: Usage, cpus: int | None = None) -> float:
    """What others took between two moments, over what the CPUs had to give; never below 0."""
    capacity = (after.time - before.time) * TICKS_PER_S * (cpus or os.cpu_count() or 1)
    foreign = (after.busy_ticks - before.busy_ticks) - (after.own_ticks - before.own_ticks)
    return max(0.0, foreign / capacity)


def wait_until_quiet(*, busy_share: float = 0.05, window_s: float = 0.5, patience_s: float = 180.0) -> float:
    """Wait until less than ``busy_share`` of all CPUs is in use; returns the last share seen."""
    deadline = time.monotonic() + patience_s
    while True:
        before = Usage(time.monotonic(), _busy_ticks(), 0)
        time.sleep(window_s)
        share = foreign_share(before, Usage(time.monotonic(), _busy_ticks(), 0))
        if share < busy_share or time.monotonic() > deadline:
            return share


def _busy_ticks() -> int:
    """Ticks all CPUs spent on anything: user, nice, system, interrupts, and stolen by the host."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return user + nice + system + irq + softirq + steal


def _ticks_of(pid: int) -> int:
    """Ticks of all threads of a process; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(int(field) for field in fields[11:13])
