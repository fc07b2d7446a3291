"""From traces to an account: what each class took, by rank, step and window.

Time is split by class once (:mod:`drivetrain.trace.timeline`) and windows are cut out of that. Traces are taken one
at a time and let go, so that memory does not grow with their number: of each stay its sums and what
:mod:`drivetrain.trace.ranks` compares.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from drivetrain.errors import DataError, DrivetrainError
from drivetrain.measure.account import (
    CLASS_GROUPS,
    CLASSES,
    COPY_CLASSES,
    Account,
    RankAccount,
    StepAccount,
    View,
    Window,
)
from drivetrain.measure.flops import FlopCount, model_flops
from drivetrain.measure.intervals import (
    EMPTY,
    Intervals,
    intersect,
    subtract,
    total_within,
)
from drivetrain.measure.peaks import Peak
from drivetrain.measure.waterfall import RankTime, Waterfall, WaterfallFlops, waterfall
from drivetrain.trace.classify import Classification, classify
from drivetrain.trace.communication import communication_records
from drivetrain.trace.groups import process_groups
from drivetrain.trace.health import Finding, withheld
from drivetrain.trace.links import compute_before
from drivetrain.trace.lookup import distinct
from drivetrain.trace.name_table import NameTable
from drivetrain.trace.pipeline import pipeline_of
from drivetrain.trace.ranks import (
    Comparison,
    RankFacts,
    absent_ranks,
    check_one_job,
    compare_ranks,
    distinct_ranks,
)
from drivetrain.trace.slices import RankSplit, communication_parts, group_intervals
from drivetrain.trace.steps import UNKNOWN_TIME, cpu_windows, device_windows
from drivetrain.trace.table import Category, Trace
from drivetrain.trace.timeline import RankTimeline, StepWindow, timeline_of

if TYPE_CHECKING:
    from drivetrain.config.model import ModelConfig

__all__ = ["RankTimeline", "StepWindow", "account_of", "as_accounted", "timeline_of"]

_NOT_BUSY = ("data", "maintenance", "host", "bubble", "idle")
"""Groups of classes that an untrustworthy ``idle_ns`` makes untrustworthy."""

_WITHHOLDS: Mapping[str, tuple[str, ...]] = {
    "busy_ns": _NOT_BUSY,
    "idle_ns": _NOT_BUSY,
    "compute_ns": ("compute", "recompute"),
    "communication_ns": ("communication", "bubble"),
    "exposed_communication_ns": ("communication", "bubble"),
    "overlapped_communication_ns": (),
    "copy_ns": ("copy",),
    "exposed_copy_ns": ("copy",),
    "classes": CLASS_GROUPS,
}
"""Withheld figure → groups of classes whose time is unexplained with it."""


_NO_DEVICE = ("no_device_events", "no_kernels")
"""Findings of traces whose device records are missing although the host launched work."""

_LAUNCH = re.compile(r"(cuda|hip|cu|musa)(Module|Ext\w*)?Launch(Cooperative)?Kernel\w*$")


@dataclass(frozen=True, eq=False)
class _Draft:
    """One rank before the ranks are compared: sums over windows, whole trace first."""

    facts: RankFacts
    view: View
    windows: NDArray[np.int64]
    numbers: tuple[int, ...]
    figures: Mapping[str, NDArray[np.int64]]
    hidden: Mapping[str, NDArray[np.int64]]
    """Parallel group → its communication under compute."""
    classes: Mapping[str, NDArray[np.int64]]
    explained: bool
    withheld: Mapping[str, str]
    health: tuple[Finding, ...]
    first_is_partial: bool
    """Recording began within the first step; a pattern's first repetition is whole."""
    parts: Mapping[str, Intervals]
    """Class but communication → when it took the time; only where somebody asked for the split itself."""


def account_of(
    traces: Iterable[Trace],
    *,
    step_window: StepWindow = "device",
    model: "ModelConfig | None" = None,
    tokens_per_step: int | None = None,
    peak: Peak | None = None,
    achievable: Peak | None = None,
    effective_share: float | None = None,
    flops_per_step: FlopCount | None = None,
    rules: NameTable | None = None,
    on_split: Callable[[RankSplit], None] | None = None,
) -> Account:
    """Account for the time of one job.

    Args:
        traces: one a rank, all of one job. Taken one by one: a generator that reads them keeps memory flat.
        step_window: what a step's window is.
        model: with `tokens_per_step`, gives model FLOPs; both or neither.
        tokens_per_step: of all ranks together, padding included; in full sequences of ``model.seq_length``.
        peak: of one device; needed for MFU points.
        achievable: sustained matrix product of one device.
        effective_share: tokens that carry loss over all tokens.
        flops_per_step: model FLOPs of a step over all ranks, where the run has counted them by document; instead of
            those of full sequences.
        rules: name tables; the built-in ones where None.
        on_split: given the split of each rank, in their order, as instants instead of sums. The intervals of all
            ranks are then kept until the last trace is read.

    Raises:
        DataError: no trace, two of one rank, or traces of different jobs.
        DrivetrainError: `model` without `tokens_per_step` or the reverse.
    """
    if (model is None) != (tokens_per_step is None):
        raise DrivetrainError("model FLOPs need both the model and the tokens per step of all ranks together")
    table = NameTable.load() if rules is None else rules
    drafts = [_draft(trace, step_window, table, on_split is not None) for trace in traces]
    if not drafts:
        raise DataError("no trace was given: name at least one profiler file")
    check_one_job([draft.facts for draft in drafts])
    ranks, unnamed = distinct_ranks([draft.facts for draft in drafts])
    by_rank = dict(sorted(zip(ranks, drafts, strict=True), key=lambda item: item[0]))
    comparison = compare_ranks({r: d.facts for r, d in by_rank.items()}) if len(by_rank) > 1 else None
    accounts = tuple(_rank_account(rank, draft, comparison) for rank, draft in by_rank.items())
    if on_split is not None:
        for rank, draft in by_rank.items():
            on_split(_split_of(rank, draft, comparison))
    world_size = next((d.facts.world_size for d in drafts if d.facts.world_size is not None), None)
    absent = absent_ranks(ranks, world_size)
    count = flops_per_step
    if count is None and model is not None and tokens_per_step is not None:
        squares = tokens_per_step * model.seq_length
        count = model_flops(model, tokens=tokens_per_step, sum_squared_lengths=squares)
    drawn = _waterfall(accounts, world_size, count, tokens_per_step, peak, achievable, effective_share)
    health = [*_rank_health(by_rank), *unnamed, *_absence(absent, world_size)]
    health += [] if comparison is None else comparison.health
    health += [Finding("waterfall", "error", text, 1) for text in (drawn.problems if drawn else ())]
    return Account(
        health=tuple(health),
        ranks=accounts,
        collectives=comparison.collectives if comparison else (),
        clock_residual_ns=comparison.residual_ns if comparison else None,
        waterfall=drawn,
        stragglers=comparison.stragglers if comparison else (),
        verdicts=comparison.verdicts if comparison else (),
        clock_offsets_ns=comparison.offsets_ns if comparison else {},
        absent_ranks=absent,
        world_size=world_size,
        name_table=table.identity,
    )


def _rank_health(drafts: Mapping[int, _Draft]) -> list[Finding]:
    """Findings of the traces; several ranks' say whose they are, the same one of all ranks is said once."""
    everyone = [set(draft.health) for draft in drafts.values()]
    common = set.intersection(*everyone) if everyone else set()
    said = [finding for finding in next(iter(drafts.values())).health if finding in common]
    for rank, draft in drafts.items():
        own = [finding for finding in draft.health if finding not in common]
        said += [replace(finding, message=f"rank {rank}: {finding.message}") for finding in own]
    return said


def _absence(absent: Sequence[int], world_size: int | None) -> list[Finding]:
    if not absent:
        return []
    shown = ", ".join(map(str, absent[:20])) + (", …" if len(absent) > 20 else "")
    message = f"{len(absent)} of {world_size} ranks are absent: {shown}; who waits for them cannot be told"
    return [Finding("absent_ranks", "note", message, len(absent))]


# ---- one rank ---------------------------------------------------------------------------------------------------


def _layout_of(trace: Trace) -> dict[str, int] | None:
    """Sizes of the parallel dimensions where the trace says them (ours do): dimension to size, fastest first."""
    about = trace.metadata.get("drivetrain")
    layout = about.get("layout") if isinstance(about, dict) else None
    if not isinstance(layout, dict) or not all(isinstance(size, int) for size in layout.values()):
        return None
    return {str(name): size for name, size in layout.items()}


def _draft(trace: Trace, step_window: StepWindow, table: NameTable, keep_parts: bool) -> _Draft:
    if len(trace.events) == 0:
        raise DataError(
            f"{trace.path}: it holds no event with a duration, so there is no time to account for"
        )
    trace = as_accounted(trace)
    classes = classify(trace, table, layout=_layout_of(trace))
    line = timeline_of(trace, classes, step_window=step_window, rules=table)
    health = (*trace.health, *classes.health, *line.steps.health, *_view_health(trace, line))
    reasons = withheld(health)
    use_device = step_window == "device" and line.view == "device"
    windows = device_windows(trace.events, line.steps) if use_device else cpu_windows(line.steps)
    numbers = tuple(mark.number for mark in line.steps.marks)
    if "steps" in reasons:
        windows, numbers = windows[:0], ()
    cut = np.concatenate((np.array([line.whole], np.int64), windows))
    exposed = line.parts.get("communication", EMPTY)
    parts = {name: part for name, part in line.parts.items() if name != "communication"}
    figures = {
        "busy": total_within(line.busy, cut),
        "compute": total_within(line.compute, cut),
        "communication": total_within(line.communication, cut),
        "exposed_communication": total_within(exposed, cut),
        "copy": total_within(line.copies, cut),
    }
    facts = _facts(trace, classes, line, exposed, table)
    covered = subtract(line.communication, exposed)
    return _Draft(
        facts=facts,
        view=line.view,
        windows=cut,
        numbers=numbers,
        figures=figures,
        hidden={
            group: total_within(intersect(part, covered), cut)
            for group, part in group_intervals(facts.communication).items()
        },
        classes={name: total_within(part, cut) for name, part in parts.items()},
        explained=line.explained,
        withheld=reasons,
        health=health,
        first_is_partial=line.steps.origin != "pattern",
        parts=parts if keep_parts else {},
    )


def as_accounted(trace: Trace) -> Trace:
    """The trace as its account takes it: without its device records where kernels are missing among them.

    What is left of the device is then worth nothing; the host's own records are sound, so no figure is withheld.
    """
    if not any(finding.id in _NO_DEVICE for finding in trace.health):
        return trace
    health = [replace(one, affects=()) if one.id in _NO_DEVICE else one for one in trace.health]
    events = trace.events.select(~trace.events.is_device_work())
    return replace(trace, events=events, health=tuple(health))


def _view_health(trace: Trace, line: RankTimeline) -> tuple[Finding, ...]:
    """Findings about what the account is of."""
    if line.view == "host":
        launches = any(finding.id in _NO_DEVICE for finding in trace.health)
        message = "no device records: the account is of operators on the host" + (
            ", which only launch work: it says nothing about the device, which the profiler could not trace"
            if launches
            else ""
        )
        return (Finding("host_view", "warning" if launches else "note", message, 1),)
    found: list[Finding] = []
    if not line.explained:
        message = "no host records: nothing tells why the device was idle, so idle time is unexplained"
        found.append(Finding("no_host_records", "note", message, 1))
    if trace.partial:
        found += _lost_to_the_break(trace)
    device = trace.events.device[trace.events.is_device_work()]
    devices = distinct(device[device >= 0])
    if len(devices) > 1:
        message = f"work of {len(devices)} devices in one trace: busy means that any of them was"
        found.append(Finding("several_devices", "warning", message, len(devices)))
    return tuple(found)


def _lost_to_the_break(trace: Trace) -> list[Finding]:
    """Kernels that were launched before a file broke off, but are written behind the break."""
    events = trace.events
    names = [i for i, name in enumerate(events.names) if _LAUNCH.match(name)]
    launches = (events.category == np.uint8(Category.RUNTIME)) & np.isin(events.name, names)
    correlations = np.unique(events.correlation[launches & (events.correlation >= 0)])
    missing = int((~np.isin(correlations, events.correlation[events.is_device_work()])).sum())
    if missing * 100 <= len(correlations):
        return []
    message = (
        f"{missing:,} of {len(correlations):,} kernels that were launched are missing behind the break of the file: "
        "the device was busy in time that shows no record"
    )
    return [Finding("kernels_lost", "warning", message, missing, ("idle_ns", "busy_ns"))]


def _facts(
    trace: Trace, classes: Classification, line: RankTimeline, exposed: Intervals, table: NameTable
) -> RankFacts:
    info = trace.metadata.get("distributedInfo")
    backend = info.get("backend") if isinstance(info, Mapping) else None
    is_profiled = line.steps.origin == "profiler_step"
    records = communication_records(trace, classes, line.steps, table, _layout_of(trace))
    records, pipeline = pipeline_of(trace, classes, line, records, table)
    return RankFacts(
        path=trace.path,
        rank=trace.rank,
        world_size=trace.world_size,
        backend=backend if isinstance(backend, str) else None,
        groups=frozenset(group.ranks for group in process_groups(trace.metadata) if group.ranks),
        step_numbers=tuple(mark.number for mark in line.steps.marks) if is_profiled else (),
        start_ns=line.whole[0],
        end_ns=line.whole[1],
        communication=records,
        exposed=exposed,
        steps=len(line.steps.marks),
        on_device=line.view == "device",
        pipeline=pipeline,
        compute_before_ns=compute_before(line.compute, records.start_ns),
    )


# ---- from sums to records ---------------------------------------------------------------------------------------


def _rank_account(rank: int, draft: _Draft, comparison: Comparison | None) -> RankAccount:
    exposed = _communication_parts(rank, draft, comparison)
    classes = {
        **draft.classes,
        **{name: total_within(part, draft.windows) for name, part in exposed.items()},
    }
    windows = [_window(draft, classes, i) for i in range(len(draft.windows))]
    steps = tuple(
        StepAccount(number, window, int(start), int(end), first=i == 0 and draft.first_is_partial)
        for i, (number, window, (start, end)) in enumerate(
            zip(draft.numbers, windows[1:], draft.windows[1:], strict=True)
        )
    )
    return RankAccount(rank, draft.view, windows[0], steps, str(draft.facts.path))


def _split_of(rank: int, draft: _Draft, comparison: Comparison | None) -> RankSplit:
    records = draft.facts.communication
    unknown = np.full(len(records), UNKNOWN_TIME, np.int64)
    return RankSplit(
        rank=rank,
        view=draft.view,
        source=draft.facts.path,
        parts={**draft.parts, **_communication_parts(rank, draft, comparison)},
        windows=draft.windows,
        numbers=draft.numbers,
        explained=draft.explained,
        hidden=_hidden_groups(draft),
        offset_ns=0 if comparison is None else comparison.offsets_ns.get(rank),
        communication=records,
        arrived_ns=unknown if comparison is None else comparison.splits[rank],
    )


def _hidden_groups(draft: _Draft) -> frozenset[str]:
    """Groups of classes whose time is shown as unexplained, because a figure of them is withheld."""
    return frozenset(group for key in draft.withheld for group in _WITHHOLDS.get(key, ()))


def _communication_parts(rank: int, draft: _Draft, comparison: Comparison | None) -> dict[str, Intervals]:
    facts = draft.facts
    unknown = np.full(len(facts.communication), UNKNOWN_TIME, np.int64)
    arrived = unknown if comparison is None else comparison.splits[rank]
    return communication_parts(facts.communication, arrived, facts.exposed, facts.pipeline)


def _window(draft: _Draft, classes: Mapping[str, NDArray[np.int64]], index: int) -> Window:
    """Sums of one window as a record, without the figures that must be withheld."""
    start, end = draft.windows[index].tolist()
    length = end - start
    taken = {name: int(sums[index]) for name, sums in classes.items() if sums[index]}
    rest = length - sum(taken.values())
    assert rest >= 0, "classes exceed the window"
    unexplained = 0 if draft.explained else rest
    if draft.explained and rest:
        taken["idle"] = rest
    hidden = _hidden_groups(draft)
    for name in [name for name in taken if name.split(".")[0] in hidden]:
        unexplained += taken.pop(name)
    sums = {name: int(values[index]) for name, values in draft.figures.items()}
    exposed = sums["exposed_communication"]
    figures = {
        "busy_ns": sums["busy"],
        "idle_ns": length - sums["busy"],
        "compute_ns": sums["compute"],
        "communication_ns": sums["communication"],
        "overlapped_communication_ns": sums["communication"] - exposed,
        "exposed_communication_ns": exposed,
        "copy_ns": sums["copy"],
        "exposed_copy_ns": sum(int(classes[name][index]) for name in COPY_CLASSES if name in classes),
    }
    shown = {key: None if _is_withheld(key, draft.withheld) else value for key, value in figures.items()}
    ordered = {name: taken[name] for name in CLASSES if name in taken}
    covered = {group: int(values[index]) for group, values in draft.hidden.items() if values[index]}
    return Window(
        window_ns=length,
        classes=ordered,
        unexplained_ns=unexplained,
        hidden_communication_ns=None if shown["overlapped_communication_ns"] is None else covered,
        **shown,
    )


_IMPLIES: Mapping[str, tuple[str, ...]] = {
    "busy_ns": ("idle_ns",),
    "idle_ns": ("busy_ns",),
    "overlapped_communication_ns": ("communication_ns",),
    "exposed_communication_ns": ("communication_ns",),
    "exposed_copy_ns": ("copy_ns",),
}
"""Figure → others that, being untrustworthy, take it with them."""


def _is_withheld(key: str, reasons: Mapping[str, str]) -> bool:
    return key in reasons or any(other in reasons for other in _IMPLIES.get(key, ()))


# ---- waterfall --------------------------------------------------------------------------------------------------


def _waterfall(
    ranks: Sequence[RankAccount],
    world_size: int | None,
    count: FlopCount | None,
    tokens_per_step: int | None,
    peak: Peak | None,
    achievable: Peak | None,
    effective_share: float | None,
) -> Waterfall | None:
    """The waterfall of the steady steps (of the whole traces where there are no steps); None of no time."""
    steps = {rank.rank: rank.steady_steps for rank in ranks}
    with_steps = all(steps.values())
    times = [_rank_time(rank, with_steps) for rank in ranks]
    if any(time.window_ns == 0 for time in times):
        return None
    label = _window_label(ranks, with_steps)
    reason = _no_flops_reason(count, peak, with_steps, {len(found) for found in steps.values()})
    if reason is not None or count is None or tokens_per_step is None or peak is None:
        return waterfall(times, order=CLASSES, window=label, reason=reason or "")
    devices = world_size or len(ranks)
    scale = len(next(iter(steps.values())))
    flops = WaterfallFlops(
        flops={
            "compute.matmul": Fraction(scale * (count.matmul + count.logits), devices),
            "compute.attention": Fraction(scale * count.attention, devices),
        },
        peak=peak,
        achievable=achievable,
        effective_share=effective_share,
        token_rule=f"{tokens_per_step:,} tokens a step, padding included, over {devices} devices",
    )
    return waterfall(times, flops, order=CLASSES, window=label)


def _no_flops_reason(
    count: FlopCount | None, peak: Peak | None, with_steps: bool, counts: set[int]
) -> str | None:
    if count is None:
        return (
            "model FLOPs are unknown (give --model and --tokens-per-step): classes in percent of time, no MFU"
        )
    if peak is None:
        return "the peak of the device is unknown: classes in percent of time, no MFU"
    if not with_steps:
        return (
            "no steps were found, so the FLOPs of the window are unknown: classes in percent of time, no MFU"
        )
    if len(counts) > 1:
        return "ranks recorded different numbers of steps: classes in percent of time, no MFU"
    return None


def _rank_time(rank: RankAccount, with_steps: bool) -> RankTime:
    windows = [step.window for step in rank.steady_steps] if with_steps else [rank.whole]
    classes: dict[str, int] = {}
    for window in windows:
        for name, value in window.classes.items():
            classes[name] = classes.get(name, 0) + value
    length = sum(window.window_ns for window in windows)
    return RankTime(rank.rank, length, classes, sum(window.unexplained_ns for window in windows))


def _window_label(ranks: Sequence[RankAccount], with_steps: bool) -> str:
    who = f"rank {ranks[0].rank}" if len(ranks) == 1 else f"mean of {len(ranks)} ranks"
    if not with_steps:
        return f"whole trace, {who}"
    steps = ranks[0].steady_steps
    which = f"step {steps[0].step}" if len(steps) == 1 else f"steps {steps[0].step} to {steps[-1].step}"
    left_out = " (the first recorded step left out)" if len(steps) < len(ranks[0].steps) else ""
    return f"{which}{left_out}, {who}"
