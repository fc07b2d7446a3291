"""Everything the rules may look at, and the mean step their costs are of."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from drivetrain.archive.collective_waits import RunCollectives
from drivetrain.catalogue.time_models import TimeFacts
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.diagnose.chart_facts import ChartFacts
from drivetrain.diagnose.run_figures import LEAST_STEPS, RunFigures
from drivetrain.diagnose.trace_figures import TraceFigures
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import OptimisationRecord
from drivetrain.trace.synchronisation import Synchronisations

__all__ = ["NEEDS", "Facts", "MeanWindow", "Need"]

Need = Literal[
    "configuration",
    "run",
    "logged steps",
    "trace",
    "device",
    "shapes",
    "Python functions",
    "steps",
    "several ranks",
    "collectives of ranks",
]
"""A kind of fact that a rule may need."""

NEEDS: Mapping[Need, str] = {
    "configuration": "a run of ours: the settings of other traces are unknown",
    "run": "a run directory: traces alone hold no events",
    "logged steps": f"a run directory with at least {LEAST_STEPS} logged steady steps",
    "trace": "records of single operators or kernels",
    "device": "records of a device: where there are none, the work is the host's own",
    "shapes": "shapes of operands (record_shapes=True)",
    "Python functions": "Python functions (with_stack=True; in our runs profiler.with_stack=true)",
    "steps": "steps (ProfilerStep marks, or work that repeats)",
    "several ranks": "traces of several ranks",
    "collectives of ranks": "a run of several ranks that each wrote their collectives (monitor.log_rank_times=true)",
}
"""Need → what it takes."""


@dataclass(frozen=True)
class MeanWindow:
    """The mean over ranks of their mean steady step (of their whole traces where a rank has no steps)."""

    window_ns: float
    classes: Mapping[str, float]
    """Class → ns; ``unexplained`` among them."""
    is_step: bool


@dataclass(frozen=True)
class Facts:
    """The input of a diagnosis.

    Attributes:
        account: of the run's newest window, or of the traces.
        subject: what it is of, in words.
        config: of a run of ours; None for foreign traces, whose settings are unknown.
        launch: how the run was started; None with `config`.
        records: the run's optimisation records.
        in_use: names of catalogue entries that the records of a foreign trace show in use.
        ruled_out: names of entries that cannot help a foreign trace's job → why.
        waits: synchronisation points of one rank; None where they were not looked for.
        waits_source: whose they are, in words.
        communication: what the run's summary says of its collectives; None where it says nothing.
        collectives: what the run's ranks wrote of theirs; None where they did not.
        data_operations: operation of building batches → seconds a micro-batch, by the newest word of the run; empty
            where it says nothing.
        figures: what the run's files say beside; None for foreign traces.
        trace: figures of one rank's trace; None where they were not looked for.
        device: the peaks' name of the device that work ran on; None where unknown.
        achievable_flops: sustained matrix products of a device in FLOP/s; None where unknown.
        achievable_dtype: that they were in.
        charted: what the charts show beside.
        run_path: of the run's directory, as a command names it; None for foreign traces.
        time: what models of time may look at; None: account, configuration and summary alone.
    """

    account: Account
    subject: str
    config: RunConfig | None = None
    launch: LaunchFacts | None = None
    records: tuple[OptimisationRecord, ...] = ()
    in_use: frozenset[str] = frozenset()
    ruled_out: Mapping[str, str] = field(default_factory=dict)
    waits: Synchronisations | None = None
    waits_source: str = ""
    communication: Mapping[str, Any] | None = None
    collectives: RunCollectives | None = None
    data_operations: Mapping[str, float] = field(default_factory=dict)
    figures: RunFigures | None = None
    trace: TraceFigures | None = None
    device: str | None = None
    achievable_flops: float | None = None
    achievable_dtype: str = "bf16"
    charted: ChartFacts = field(default_factory=ChartFacts)
    run_path: str | None = None
    time: TimeFacts | None = None

    def missing(self, need: Need) -> str | None:
        """Why a kind of fact is not there; None: it is."""
        there = {
            "configuration": self.config is not None,
            "run": self.figures is not None,
            "logged steps": self.figures is not None and self.figures.steady_steps >= LEAST_STEPS,
            "trace": self.trace is not None,
            "device": all(rank.view == "device" for rank in self.account.ranks),
            "shapes": self.trace is not None and self.trace.has_shapes,
            "Python functions": self.trace is not None and self.trace.has_python,
            "steps": self.mean.is_step,
            "several ranks": len(self.account.ranks) > 1,
            "collectives of ranks": self.collectives is not None and self.collectives.steps > 0,
        }
        return None if there[need] else f"it needs {NEEDS[need]}"

    def group_ns(self, group: str) -> float:
        """Time of a class, or of all classes of a group, in the mean step."""
        return sum(
            ns for name, ns in self.mean.classes.items() if name == group or name.startswith(f"{group}.")
        )

    @cached_property
    def mean(self) -> MeanWindow:
        """What costs are a part of. The same windows as the waterfall's."""
        ranks = self.account.ranks
        is_step = all(rank.steps for rank in ranks)
        times, sums = [], []
        for rank in ranks:
            windows = [step.window for step in rank.steady_steps] if is_step else [rank.whole]
            times.append(statistics.fmean(window.window_ns for window in windows))
            columns = [{**window.classes, "unexplained": window.unexplained_ns} for window in windows]
            names = dict.fromkeys(name for column in columns for name in column)
            sums.append({name: statistics.fmean(column.get(name, 0) for column in columns) for name in names})
        names = dict.fromkeys(name for column in sums for name in column)
        classes = {name: statistics.fmean(column.get(name, 0.0) for column in sums) for name in names}
        return MeanWindow(statistics.fmean(times), {name: ns for name, ns in classes.items() if ns}, is_step)

    @property
    def has_points(self) -> bool:
        """Whether losses can be given in MFU points."""
        drawn = self.account.waterfall
        return drawn is not None and drawn.unit == "mfu_points"

    @property
    def no_points(self) -> Mapping[str, str]:
        """Why there are no MFU points, as ``Finding.unknown`` holds it; empty where there are."""
        drawn = self.account.waterfall
        if self.has_points:
            return {}
        reason = None if drawn is None else drawn.reason
        return {"points": reason or "the window has no length"}

    def points_of(self, cost_ns: float) -> float | None:
        """MFU points of time in which no model FLOPs are done; None without a peak or FLOPs."""
        return 100 * cost_ns / self.mean.window_ns if self.has_points else None

    def share_of(self, cost_ns: float) -> float:
        """Of the mean step."""
        return cost_ns / self.mean.window_ns if self.mean.window_ns else 0.0
