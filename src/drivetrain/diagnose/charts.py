"""The three charts by which an expert looks for trouble: data gap, kernels, share of communication (SOURCES E11).

The figures are those of the account, of a run's logged steps and of the trace's kernels; here they are put side by
side, and what they do not tell is withheld with the reason. ``report`` draws them.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from drivetrain.diagnose.chart_facts import Ceiling, LoggedStep
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.run_figures import LEAST_STEPS
from drivetrain.measure.account import PARALLEL_GROUPS, Window
from drivetrain.trace.ranked_kernels import RankedKernel, Work

__all__ = [
    "BAD",
    "GOOD",
    "ChartedKernel",
    "Charts",
    "KernelChart",
    "StepChart",
    "StepRow",
    "charts_of",
    "communication_verdict",
]

GOOD, BAD = 0.10, 0.25
"""Shares of a step in exposed communication below which it is good, and above which it is bad (SOURCES A18)."""
MOST_ROWS = 240
"""Rows of a chart over the steps: of more steps, neighbours are one row, with their mean and the worst of them."""


def communication_verdict(share: float) -> str:
    """What a share of exposed communication is worth, in a word."""
    return "good" if share < GOOD else "bad" if share > BAD else "fair"


@dataclass(frozen=True)
class StepRow:
    """One step, or the mean of several that follow each other. Times in ns.

    Attributes:
        first, last: numbers of its steps.
        count: how many steps it is the mean of.
        step_ns: length.
        lost_ns: time of the step that was lost to what the chart shows.
        by_group: the same by parallel group; empty where it is not split.
        hidden_ns: by parallel group, what cost no time; None: unknown.
        worst_share: largest `lost_ns` over `step_ns` of one step, and `worst_step`, its number.
        tags: of the steps; a step with tags is no part of the mean of the chart.
    """

    first: int
    last: int
    count: int
    step_ns: float
    lost_ns: float
    by_group: Mapping[str, float]
    hidden_ns: Mapping[str, float] | None
    worst_share: float
    worst_step: int
    tags: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """`lost_ns` over `step_ns`."""
        return self.lost_ns / self.step_ns if self.step_ns else 0.0

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "first": self.first,
            "last": self.last,
            "steps": self.count,
            "step_ms": self.step_ns / 1e6,
            "lost_ms": self.lost_ns / 1e6,
            "share": self.share,
            "by_group_ms": {name: ns / 1e6 for name, ns in self.by_group.items()},
            "hidden_ms": None
            if self.hidden_ns is None
            else {name: ns / 1e6 for name, ns in self.hidden_ns.items()},
            "worst_share": self.worst_share,
            "worst_step": self.worst_step,
            "tags": list(self.tags),
        }


@dataclass(frozen=True)
class StepChart:
    """Something that is lost, step by step.

    Attributes:
        rows: in order of the steps; empty where the chart is withheld.
        source: what the figures are of.
        share: mean lost time over mean step, of the steps without tags (of all where all have some); None: withheld.
        withheld: why there are no rows; None where there are some.
        note: what else is to be known; None: nothing.
        is_step: whether a row is of steps; else the one row is the whole trace.
    """

    rows: tuple[StepRow, ...]
    source: str
    share: float | None
    withheld: str | None = None
    note: str | None = None
    is_step: bool = True

    @property
    def groups(self) -> tuple[str, ...]:
        """Parallel groups of the rows, in their order."""
        return tuple(
            dict.fromkeys(name for row in self.rows for name in (*row.by_group, *(row.hidden_ns or ())))
        )

    def merged(self, most: int) -> tuple[StepRow, ...]:
        """At most so many rows: neighbours are joined by equal numbers."""
        return _merged(self.rows, most)

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "source": self.source,
            "share": self.share,
            "withheld": self.withheld,
            "note": self.note,
            "is_step": self.is_step,
            "rows": [row.to_document() for row in self.rows],
        }


@dataclass(frozen=True)
class ChartedKernel:
    """One of the kernels (or operators) with the most time, of one step where there are steps."""

    kernel: RankedKernel
    calls: float
    ns: float
    ceiling: Ceiling | None
    """What its rate is held against; None: unknown, or its rate is."""

    @property
    def of_ceiling(self) -> float | None:
        """Rate over ceiling."""
        work = self.kernel.work
        return None if work is None or self.ceiling is None else work.per_second / self.ceiling.per_second

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        work, one = self.kernel.work, self.kernel
        return {
            "name": one.name,
            "class": one.kind,
            "calls": self.calls,
            "ms": self.ns / 1e6,
            "share": one.share,
            "per_second": None if work is None else work.per_second,
            "unit": None if work is None else f"{work.unit}/s",
            "covered_share": None if work is None else work.time_ns / one.total_ns,
            "per_second_reason": one.unknown,
            "ceiling_per_second": None if self.ceiling is None else self.ceiling.per_second,
            "ceiling_source": None if self.ceiling is None else self.ceiling.source,
            "of_ceiling": self.of_ceiling,
            "fallback": one.fallback,
        }


@dataclass(frozen=True)
class KernelChart:
    """The kernels with the most time.

    Attributes:
        kernels: the first ones.
        names: how many there are in all.
        shown_share: of all their time, what the first ones take.
        source: whose trace.
        on_device: kernels of a device; else operators of the host.
        is_step: whether calls and times are of a step; else of the whole trace.
        withheld: why there are none; None where there are some.
    """

    kernels: tuple[ChartedKernel, ...]
    names: int
    shown_share: float
    source: str
    on_device: bool
    is_step: bool
    withheld: str | None = None

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "source": self.source,
            "on_device": self.on_device,
            "is_step": self.is_step,
            "names": self.names,
            "shown_share": self.shown_share,
            "withheld": self.withheld,
            "kernels": [one.to_document() for one in self.kernels],
        }


@dataclass(frozen=True)
class Charts:
    """All three."""

    data_gap: StepChart
    kernels: KernelChart
    communication: StepChart

    def to_document(self) -> dict[str, Any]:
        """The value of ``charts`` in ``drivetrain diagnose --json``."""
        return {
            "data_gap": self.data_gap.to_document(),
            "kernels": self.kernels.to_document(),
            "communication": {
                **self.communication.to_document(),
                "good_below": GOOD,
                "bad_above": BAD,
                "verdict": None
                if self.communication.share is None
                else communication_verdict(self.communication.share),
            },
        }


def charts_of(facts: Facts) -> Charts:
    """The charts, as far as the facts go."""
    return Charts(_data_gap(facts), _kernels(facts), _communication(facts))


# ---- over the steps ---------------------------------------------------------------------------------------------


def _chart(
    rows: Sequence[StepRow], source: str, *, note: str | None = None, is_step: bool = True
) -> StepChart:
    steady = [row for row in rows if not row.tags] or rows
    whole = sum(row.step_ns for row in steady)
    share = sum(row.lost_ns for row in steady) / whole if whole else 0.0
    return StepChart(_merged(rows, MOST_ROWS), source, share, note=note, is_step=is_step)


def _withheld(why: str) -> StepChart:
    return StepChart((), "", None, withheld=why)


def _merged(rows: Sequence[StepRow], most: int) -> tuple[StepRow, ...]:
    """Neighbours by equal numbers; a row with tags is joined with such rows alone, so that it spoils no mean."""
    size = -(-len(rows) // most) if most else 1
    if size <= 1:
        return tuple(rows)
    found, part = [], list[StepRow]()
    for row in rows:
        if part and (len(part) == size or bool(part[-1].tags) != bool(row.tags)):
            found.append(_joined(part))
            part = []
        part.append(row)
    return (*found, _joined(part))


def _joined(rows: Sequence[StepRow]) -> StepRow:
    if len(rows) == 1:
        return rows[0]
    count = sum(row.count for row in rows)
    worst = max(rows, key=lambda row: row.worst_share)

    def mean(values: Sequence[float]) -> float:
        return sum(value * row.count for value, row in zip(values, rows, strict=True)) / count

    def by_name(maps: Sequence[Mapping[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for one in maps for name in one)
        return {name: mean([one.get(name, 0.0) for one in maps]) for name in names}

    hidden = [row.hidden_ns for row in rows if row.hidden_ns is not None]
    return StepRow(
        first=rows[0].first,
        last=rows[-1].last,
        count=count,
        step_ns=mean([row.step_ns for row in rows]),
        lost_ns=mean([row.lost_ns for row in rows]),
        by_group=by_name([row.by_group for row in rows]),
        hidden_ns=by_name(hidden) if len(hidden) == len(rows) else None,
        worst_share=worst.worst_share,
        worst_step=worst.worst_step,
        tags=tuple(dict.fromkeys(tag for row in rows for tag in row.tags)),
    )


def _row(
    step: int,
    step_ns: float,
    lost_ns: float,
    by_group: Mapping[str, float],
    hidden_ns: Mapping[str, float] | None,
    tags: Sequence[str],
) -> StepRow:
    share = lost_ns / step_ns if step_ns else 0.0
    return StepRow(step, step, 1, step_ns, lost_ns, by_group, hidden_ns, share, step, tuple(tags))


def _windows(facts: Facts) -> list[tuple[int, tuple[str, ...], list[Window]]]:
    """Number, tags and the windows of all ranks of each step that every rank has; the whole traces where there are no
    steps."""
    ranks = facts.account.ranks
    if not facts.mean.is_step:
        return [(0, (), [rank.whole for rank in ranks])]
    by_rank = [{step.step: step for step in rank.steps} for rank in ranks]
    common = [number for number in by_rank[0] if all(number in steps for steps in by_rank)]
    found: list[tuple[int, tuple[str, ...], list[Window]]] = []
    for number in common:
        steps = [of_rank[number] for of_rank in by_rank]
        first = any(step.first for step in steps) and len(common) > 1
        found.append((number, ("first recorded",) if first else (), [step.window for step in steps]))
    return found


def _source(facts: Facts) -> str:
    ranks = facts.account.ranks
    of = f"rank {ranks[0].rank}" if len(ranks) == 1 else f"mean over {len(ranks)} ranks"
    steps = "profiled steps" if facts.mean.is_step else "the whole trace, in which no steps were found"
    return f"{steps}, {of}"


_NO_COMMON_STEP = "no step was recorded on all ranks"


def _steady_logged(steps: Sequence[LoggedStep]) -> bool:
    return sum(not step.tags for step in steps) >= LEAST_STEPS


def _data_gap(facts: Facts) -> StepChart:
    logged = [step for step in facts.charted.logged if step.data_wait_s is not None]
    if _steady_logged(logged):
        rows = [
            _row(one.step, one.step_s * 1e9, (one.data_wait_s or 0.0) * 1e9, {}, None, one.tags)
            for one in logged
        ]
        return _chart(rows, "logged steps of rank 0", note=_interval(logged))
    if facts.charted.loader_recorded is False:
        return _withheld(
            "the trace holds no record of a data loader: waiting for data is not told apart from other pauses"
        )
    found = _windows(facts)
    if not found:
        return _withheld(_NO_COMMON_STEP)
    if any(window.idle_ns is None for _, _, windows in found for window in windows):
        return _withheld(_why(facts, "idle_ns"))
    rows = [
        _row(
            number,
            statistics.fmean(window.window_ns for window in windows),
            statistics.fmean(window.group_ns("data") for window in windows),
            {},
            None,
            tags,
        )
        for number, tags, windows in found
    ]
    return _chart(rows, _source(facts), is_step=facts.mean.is_step)


def _communication(facts: Facts) -> StepChart:
    logged = [step for step in facts.charted.logged if step.exposed_s is not None]
    if _steady_logged(logged):
        rows = [
            _row(
                one.step,
                one.step_s * 1e9,
                (one.exposed_s or 0.0) * 1e9,
                {name: seconds * 1e9 for name, seconds in one.group_exposed_s.items()},
                None
                if one.group_hidden_s is None
                else {name: seconds * 1e9 for name, seconds in one.group_hidden_s.items()},
                one.tags,
            )
            for one in logged
        ]
        return _chart(rows, "logged steps of rank 0", note=_interval(logged))
    found = _windows(facts)
    if not found:
        return _withheld(_NO_COMMON_STEP)
    everything = [window for _, _, windows in found for window in windows]
    if any(window.exposed_communication_ns is None for window in everything):
        return _withheld(_why(facts, "exposed_communication_ns"))
    if not any(window.communication_ns for window in everything):
        size = facts.account.world_size if facts.launch is None else facts.launch.world_size
        if size == 1:
            return _withheld("one process: there is nothing to communicate")
        return _withheld("no collective was recorded: the job has one device, or the records lack them")
    rows = []
    for number, tags, windows in found:
        groups = {
            group: statistics.fmean(window.group_ns(f"communication.{group}") for window in windows)
            for group in PARALLEL_GROUPS
        }
        hidden: dict[str, float] | None = None
        if all(window.hidden_communication_ns is not None for window in windows):
            hidden = {
                group: statistics.fmean(
                    (window.hidden_communication_ns or {}).get(group, 0) for window in windows
                )
                for group in PARALLEL_GROUPS
            }
            hidden = {group: ns for group, ns in hidden.items() if ns}
        groups = {group: ns for group, ns in groups.items() if ns}
        length = statistics.fmean(window.window_ns for window in windows)
        rows.append(_row(number, length, sum(groups.values()), groups, hidden, tags))
    return _chart(rows, _source(facts), is_step=facts.mean.is_step)


def _interval(logged: Sequence[LoggedStep]) -> str | None:
    """How far apart the logged steps are, where they are not all there."""
    apart = [after.step - before.step for before, after in pairwise(logged)]
    if not apart or max(apart) <= 1:
        return None
    return f"logged every {round(statistics.median(apart))} steps, times are the mean of the steps between"


def _why(facts: Facts, figure: str) -> str:
    """The finding that makes a figure of the account untrustworthy."""
    found = next((one.message for one in facts.account.health if figure in one.affects), None)
    return found or "the account withholds it"


# ---- kernels ----------------------------------------------------------------------------------------------------


def _kernels(facts: Facts) -> KernelChart:
    ranked = facts.charted.kernels
    source = "trace" if facts.trace is None else facts.trace.source
    if ranked is None or not ranked.kernels:
        why = (
            "no trace was looked at"
            if ranked is None
            else "the trace holds no kernel and no operator that computes"
        )
        return KernelChart((), 0, 0.0, source, False, False, why)
    steps = max(ranked.num_steps, 1)
    shown = tuple(
        ChartedKernel(one, one.calls / steps, one.total_ns / steps, _ceiling(facts, one.work))
        for one in ranked.kernels
    )
    share = sum(one.share for one in ranked.kernels)
    return KernelChart(shown, ranked.names, share, source, ranked.on_device, ranked.num_steps > 0)


def _ceiling(facts: Facts, work: Work | None) -> Ceiling | None:
    if work is None:
        return None
    if work.unit == "B":
        return facts.charted.memory
    return None if work.dtype is None else facts.charted.products.get(work.dtype)
