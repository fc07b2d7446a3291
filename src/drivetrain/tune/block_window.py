"""The profiled window of a trial's block: its account beside the steps of the same process without the profiler.

The steps of such a block, in the order of the run::

    measured steps | calibration | one step on trial | recorded steps | fed steps | calibration

The measured steps are the trial's, as in a block without a window, and the window knows nothing of them: what the
profiler cost is told by the steps of the calibration alone. While a trace is written the loader works ahead, so that as
many steps as it can have ready count neither as calibration nor, at the window's beginning, as recorded ones.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.archive.account_file import UNEXPLAINED, mean_step_of
from drivetrain.archive.reader import open_run
from drivetrain.config import RunConfig
from drivetrain.errors import RunError
from drivetrain.tune.short_run import prefetched_steps, steps_to_run

__all__ = ["WINDOW_STEPS", "BlockPlan", "BlockWindow", "window_of"]

WINDOW_STEPS = 5
"""Recorded steps of a block's window in the mean of its account."""
_CALIBRATION = 6
"""Steps without the profiler on either side of a window."""
_TRIAL = 1
_FIRST = 1
"""The first recorded step is in no mean: the profiler was starting."""


@dataclass(frozen=True)
class BlockPlan:
    """Steps of a block, counted from 1.

    Attributes:
        measured_to: the last that the trial measures.
        start: first recorded step; None: the block has no window.
        steps: recorded steps.
        ahead: steps that the loader can have ready.
        last: of the run.
    """

    measured_to: int
    start: int | None
    steps: int
    ahead: int
    last: int

    @classmethod
    def of(cls, config: RunConfig, world_size: int, measured: int, window: int) -> "BlockPlan":
        """A block of ``measured`` measured steps.

        Args:
            window: recorded steps in the mean of its account; 0: it has no window.
        """
        measured_to = steps_to_run(config, world_size, measured)
        ahead = prefetched_steps(config, world_size)
        if window == 0:
            return cls(measured_to, None, 0, ahead, measured_to)
        steps = max(_FIRST, ahead) + window
        start = measured_to + _CALIBRATION + _TRIAL + 1
        return cls(measured_to, start, steps, ahead, start + steps - 1 + ahead + _CALIBRATION)


@dataclass(frozen=True)
class BlockWindow:
    """What a block's window says.

    Attributes:
        steps: recorded steps in the means: no tag but the profiler's, and not among those left out at the beginning.
        profiled_step_s: their mean by the run's own clock, in seconds.
        plain_step_s: mean step of the calibration, in seconds.
        plain_steps: how many those were; none of them is a measured step of the block.
        classes: ns of the mean of the recorded steps by class of the account, ``unexplained`` among them; mean over
            ranks.
    """

    steps: int
    profiled_step_s: float
    plain_step_s: float
    plain_steps: int
    classes: Mapping[str, float]

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "BlockWindow":
        """What ``dataclasses.asdict`` made."""
        return cls(**document)

    @property
    def overhead(self) -> float:
        """A recorded step over one of the calibration."""
        return self.profiled_step_s / self.plain_step_s

    @property
    def explained_s(self) -> dict[str, float]:
        """Seconds of each class in a recorded step; what is unexplained is in no class."""
        return {name: ns / 1e9 for name, ns in self.classes.items() if name != UNEXPLAINED}

    @property
    def plain_s(self) -> dict[str, float]:
        """Seconds of each class, each less the share that the profiler has of a recorded step."""
        return {name: seconds / self.overhead for name, seconds in self.explained_s.items()}


def window_of(run: Path, plan: BlockPlan) -> BlockWindow | str:
    """The window of a block that has run, or why there is none, in words."""
    assert plan.start is not None
    lines = {int(line["step"]): line for line in open_run(run).metrics()}
    recorded = [step for step, line in lines.items() if line["tags"] == ["profile"] and step >= plan.start]
    try:
        whole = mean_step_of(run)
        if whole is None:
            return f"there is no account of profiled steps in {run}"
        left_out = whole.first + max(_FIRST, plan.ahead)
        counted = [step for step in recorded if left_out <= step <= whole.last]
        mean = mean_step_of(run, frozenset(counted))
    except RunError as error:
        return str(error)
    resumed = whole.last + plan.ahead
    plain = [
        float(line["time/step_s"])
        for step, line in lines.items()
        if not line["tags"] and (plan.measured_to < step < whole.first - _TRIAL or step > resumed)
    ]
    if mean is None:
        behind = max(_FIRST, plan.ahead)
        return f"no step of the window in {run} is free of other tags and behind its first {behind}"
    if not plain:
        return f"no step beside the window in {run} is free of tags"
    profiled = statistics.fmean(float(lines[step]["time/step_s"]) for step in counted)
    return BlockWindow(len(counted), profiled, statistics.fmean(plain), len(plain), dict(mean.classes))
