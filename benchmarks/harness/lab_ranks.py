"""A part of a benchmark on the ranks of a network lab: started there, timed there, told back as JSON.

The driver makes a lab and starts the benchmark's own script on every rank (:func:`run_part`); a rank joins the group
and calls the part (:func:`as_rank`). All sides of a part live in the same processes and take turns in an order that
reads the same backwards (:class:`Turns`), so that drift of the machine hits them alike.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from drivetrain.lab import Lab
from harness.quiet import TICKS_PER_S, wait_until_quiet

__all__ = ["Pace", "Turns", "as_rank", "hidden_share", "others_share", "run_part", "wire_bytes"]

QUIET_SHARE = 0.05
_LIMIT_S = 3600.0

Step = Callable[[], object]


@dataclass(frozen=True)
class Pace:
    """How much is measured.

    Attributes:
        steps: of a turn; the first is not timed.
        rounds: times the order of turns is run, forwards and back.
        patience_s: longest wait for a quiet machine before a turn.
        attempts: times a disturbed turn is tried.
    """

    steps: int
    rounds: int
    patience_s: float
    attempts: int


def run_part(
    script: Path,
    part: str,
    settings: Mapping[str, Any],
    *,
    hosts: int,
    ranks: int,
    rate: str,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Make a lab, run ``part`` of ``script`` on its ranks, take it down; what rank 0 found.

    Raises:
        DrivetrainError: a rank failed, or this machine cannot have a lab.
    """
    with tempfile.TemporaryDirectory(prefix="overlap-") as place, Lab(hosts, ranks, rate) as lab:
        folder = Path(place)
        (folder / "settings.json").write_text(json.dumps({"part": part, **settings}), encoding="utf-8")
        lab.run(
            [sys.executable, str(script), "--rank-of", str(folder)],
            environment={"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", **(environment or {})},
            time_limit_s=_LIMIT_S,
            on_line=lambda rank, _stream, line: print(
                f"  [{part} {rank}] {line}", file=sys.stderr, flush=True
            ),
        ).check()
        found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return found


def as_rank(folder: Path, parts: Mapping[str, Callable[[Any, dict[str, Any]], dict[str, Any]]]) -> None:
    """Be a rank of :func:`run_part`: call the part with the group and its settings; rank 0 writes what it returns."""
    import torch

    from drivetrain.engine.parallel.process_group import Ranks, join

    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    with join(Ranks.from_environment(), "cpu", 10.0) as group:
        found = parts[settings["part"]](group, settings)
        if group.is_main:
            found["torch"] = torch.__version__
            (folder / "result.json").write_text(json.dumps(found), encoding="utf-8")
        group.barrier()


@dataclass
class Turns:
    """Sides that take turns on all ranks at once.

    Attributes:
        times: by side, the median step of each turn in seconds, that of the slowest rank.
        others: by side, what other processes took of the machine during each of its turns.
    """

    group: Any
    pace: Pace
    sides: Mapping[str, Step]
    times: dict[str, list[float]] = field(default_factory=dict)
    others: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._processes = [int(one) for one in self.group.gather_texts(str(os.getpid()))]
        for name in self.sides:
            self.times.setdefault(name, [])
            self.others.setdefault(name, [])

    def run(self, names: Sequence[str] | None = None, rounds: int | None = None) -> None:
        """All of ``names`` in turn and back, several times."""
        order = list(self.sides) if names is None else list(names)
        for name in (order + order[::-1]) * (self.pace.rounds if rounds is None else rounds):
            seconds, share = self.turn(name)
            self.times[name].append(seconds)
            self.others[name].append(share)
            if self.group.is_main:
                print(f"{name}: {seconds * 1e3:.1f} ms, others {share:.1%}", file=sys.stderr, flush=True)

    def turn(self, name: str) -> tuple[float, float]:
        """One turn of a side; a disturbed one is repeated, whatever its time, and rank 0 decides for all."""
        step = self.sides[name]
        for attempt in range(self.pace.attempts):
            if self.group.is_main and self.pace.patience_s > 0:
                wait_until_quiet(patience_s=self.pace.patience_s)
            self.group.barrier()
            step()
            before = _taken(self._processes)
            times = []
            for _ in range(max(1, self.pace.steps - 1)):
                self.group.barrier()
                start = time.perf_counter()
                step()
                times.append(time.perf_counter() - start)
            seconds = self.group.maximum(median(times))
            share = others_share(before, _taken(self._processes)) if self.group.is_main else 0.0
            last = attempt == self.pace.attempts - 1
            if self.group.start_sum([int(self.group.is_main and (share <= QUIET_SHARE or last))]).wait()[0]:
                return seconds, share
        raise AssertionError("the last attempt counts")

    def median(self, name: str) -> float:
        """Of a side's turns, seconds."""
        return median(self.times[name])


def hidden_share(compute: Sequence[float], wire: Sequence[float], step: Sequence[float]) -> list[float]:
    """Share of communication that is under computation, turn by turn: (compute + wire - step) / wire.

    ``compute`` is the step without communication, ``wire`` the communication alone, seconds each. Below 0 and above 1
    as it comes: overlap may cost more than it hides.
    """
    return [(one + alone - both) / alone for one, alone, both in zip(compute, wire, step, strict=True)]


def wire_bytes(device: str = "eth0") -> int:
    """Bytes that this host has sent to its link so far, headers included (/proc/net/dev, of this namespace)."""
    for line in Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == device:
            return int(numbers.split()[8])
    raise ValueError(f"this host has no {device}")


def _taken(processes: Sequence[int]) -> tuple[float, int, int]:
    """Now, ticks that all CPUs spent in programs (interrupts, which our own packets cause, left out), ticks of ours."""
    fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _iowait, _irq, _softirq, steal = fields
    own = 0
    for process in processes:
        stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        own += sum(int(value) for value in stat[11:13])
    return time.monotonic(), user + nice + system + steal, own


def others_share(before: tuple[float, int, int], after: tuple[float, int, int]) -> float:
    """What processes other than the ranks took of the machine between two moments."""
    capacity = (after[0] - before[0]) * TICKS_PER_S * (os.cpu_count() or 1)
    return max(0.0, (after[1] - before[1] - (after[2] - before[2])) / capacity)
