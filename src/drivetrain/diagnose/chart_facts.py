"""What the charts need beside the account: logged steps, the kernels of one trace, ceilings to hold rates against."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain.archive.reader import Run
from drivetrain.trace.ranked_kernels import RankedKernels

__all__ = ["Ceiling", "ChartFacts", "LoggedStep", "logged_steps"]

_GROUP = re.compile(r"comm/(?P<group>\w+)_(?P<part>exposed|hidden)_s$")


@dataclass(frozen=True)
class Ceiling:
    """What a device sustains, or what its data sheet says."""

    per_second: float
    """FLOP/s, or bytes per second."""
    source: str


@dataclass(frozen=True)
class LoggedStep:
    """One line of ``metrics.jsonl``; times in seconds.

    Attributes:
        step_s, data_wait_s, exposed_s: of the step; None: not logged.
        group_exposed_s: by group of ranks; groups run at the same time, so that they may add up to more.
        group_hidden_s: by group, what nobody waited for; None: not known of every group.
    """

    step: int
    step_s: float
    data_wait_s: float | None
    exposed_s: float | None
    group_exposed_s: Mapping[str, float]
    group_hidden_s: Mapping[str, float] | None
    tags: tuple[str, ...]


@dataclass(frozen=True)
class ChartFacts:
    """Attributes:
    logged: the logged steps of a run's last segment.
    kernels: of the first trace; None: not looked at.
    loader_recorded: whether that trace has any record of waiting for a batch; None: not looked at.
    products: dtype → ceiling of matrix products.
    memory: ceiling of memory traffic, read and written; None unknown.
    """

    logged: tuple[LoggedStep, ...] = ()
    kernels: RankedKernels | None = None
    loader_recorded: bool | None = None
    products: Mapping[str, Ceiling] = field(default_factory=dict)
    memory: Ceiling | None = None


def logged_steps(run: Run) -> tuple[LoggedStep, ...]:
    """The logged steps of the last segment, those without a finite time left out.

    Raises:
        RunError: a file of the run is damaged.
    """
    segment = run.last_segment()
    start = next((one.start_step for one in run.segments() if one.index == segment), None)
    if start is None:
        return ()
    return tuple(
        _logged(line)
        for line in run.metrics()
        if line["step"] >= start and (_number(line.get("time/step_s")) or 0.0) > 0
    )


def _logged(line: Mapping[str, Any]) -> LoggedStep:
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    for key, value in line.items():
        match = _GROUP.match(key)
        seconds = _number(value)
        if match is not None and seconds is not None:
            (exposed if match["part"] == "exposed" else hidden)[match["group"]] = seconds
    return LoggedStep(
        step=int(line["step"]),
        step_s=_number(line["time/step_s"]) or 0.0,
        data_wait_s=_number(line.get("time/data_wait_s")),
        exposed_s=_number(line.get("time/comm_exposed_s")),
        group_exposed_s=exposed,
        group_hidden_s=hidden if hidden and hidden.keys() == exposed.keys() else None,
        tags=tuple(map(str, line.get("tags") or ())),
    )


def _number(value: object) -> float | None:
    """A finite figure; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
