"""A trial: a parent and one declared change, in blocks A B B A, then B A A B, each a process of its own.

Blocks may each profile a window after their measured steps (:mod:`drivetrain.tune.block_window`). Whatever happens to a
block is a result. The decision is :mod:`drivetrain.tune.trial_statistics`'.
"""

import shutil
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from drivetrain.archive.reader import open_run
from drivetrain.config import load_config, tokens_per_step
from drivetrain.measure.optimisation import OptimisationRecord
from drivetrain.tune.block_window import BlockPlan, BlockWindow, window_of
from drivetrain.tune.goals import Goal, counted_event
from drivetrain.tune.short_run import as_override, short_run
from drivetrain.tune.trainer import Attempt, Outcome, Runner
from drivetrain.tune.trial_statistics import (
    BLOCKS_OF_UNIT,
    Judgement,
    Noise,
    SpeedRatio,
    noise_of,
    order_of,
)

__all__ = ["Block", "TrialResult", "TrialSettings", "run_trial", "why_without_effect"]

Side = Literal["A", "B"]
_SIDES: tuple[Side, ...] = ("A", "B")
_WORST: tuple[Outcome, ...] = (
    "out_of_memory",
    "hang",
    "crash",
    "diverged",
    "refused",
    "interrupted",
    "finished",
)
_PATIENCE_S = 300.0
"""What a candidate may take longer than five times its parent for as many tokens: torch.compile's first run."""


@dataclass(frozen=True)
class TrialSettings:
    """How a trial is run; declared before it starts.

    Attributes:
        steps: measured steps of a block.
        looks: units of four blocks after which it is judged, increasing.
        confidence: of the interval, over all looks together.
        window_steps: steps in the account of a window that each block profiles after its measured ones; 0: none does.
    """

    steps: int = 12
    looks: tuple[int, ...] = (1, 2)
    confidence: float = 0.95
    window_steps: int = 0

    def __post_init__(self) -> None:
        assert self.steps >= 1
        assert self.window_steps >= 0
        assert self.looks == tuple(sorted(set(self.looks)))
        assert self.looks[0] >= 1
        assert 0 < self.confidence < 1


@dataclass(frozen=True)
class Block:
    """One process of a trial.

    Attributes:
        side: A, the parent, or B, the candidate.
        run: its run directory; None where it did not come so far.
        outcome: how it ended.
        message: why, where it did not finish.
        steps: measured steps: neither tagged (warm-up, compile, …) nor fed from what workers had ready at the start.
        step_s: median of them; None where there are none.
        mean_step_s: their mean.
        tokens_per_second: tokens of a step over ``step_s``.
        peak_memory_bytes: of the run; None in a block with a window, where the profiler's own memory is in it.
        elapsed_s: of the process.
        window: what was profiled after the measured steps.
        no_window: why there is none where there should be; else empty.
        effective_tokens_per_second: tokens of a measured step that carry loss over ``step_s``; None: not logged.
        live_bytes: most live tensor bytes of a step, counted when the run began; None: they were not.
        processes: of the run.
    """

    side: Side
    run: str | None
    outcome: Outcome
    message: str
    steps: int
    step_s: float | None
    mean_step_s: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int | None
    elapsed_s: float
    window: BlockWindow | None = None
    no_window: str = ""
    effective_tokens_per_second: float | None = None
    live_bytes: int | None = None
    processes: int = 1


@dataclass(frozen=True)
class TrialResult:
    """What a trial found.

    Attributes:
        blocks: in the order they ran.
        outcome: the worst of them.
        judgement: None where a block did not finish, or gave no figure.
        faster: whether the candidate is faster by what counts.
        why: in words.
        memory_bytes: median peak memory of the candidate's blocks minus that of the parent's; None: unknown.
        noise: of the parent's blocks.
        speed: the ratio of tokens/s, where the judgement is of something else.
        figures: geometric mean of the scores of each side, in the goal's unit; None where there is no judgement.
    """

    blocks: tuple[Block, ...]
    outcome: Outcome
    judgement: Judgement | None
    faster: bool
    why: str
    memory_bytes: int | None
    noise: Noise = field(default_factory=Noise)
    speed: SpeedRatio | None = None
    figures: Mapping[str, float] | None = None

    @property
    def elapsed_s(self) -> float:
        """Wall time of all blocks."""
        return sum(block.elapsed_s for block in self.blocks)

    def to_document(self) -> dict[str, Any]:
        """What the state of a tune keeps of it."""
        judgement = self.judgement
        return {
            "blocks": [asdict(block) for block in self.blocks],
            "outcome": self.outcome,
            "state": None if judgement is None else judgement.state,
            "measured": None if judgement is None else judgement.measured.to_document(),
            "least_effect": None if judgement is None else judgement.least_effect,
            "faster": self.faster,
            "why": self.why,
            "memory_bytes": self.memory_bytes,
            "noise": asdict(self.noise),
            "speed": None if self.speed is None else self.speed.to_document(),
            "figures": None if self.figures is None else dict(self.figures),
        }


def run_trial(
    parent: Path,
    candidate: Path,
    *,
    trainer: Runner,
    runs_dir: Path,
    name: str,
    settings: TrialSettings | None = None,
    world_size: int | tuple[int, int] = 1,
    noise: Noise | None = None,
    must_be_active: str | None = None,
    goal: Goal | None = None,
    progress: Callable[[str], None] = lambda _message: None,
) -> TrialResult:
    """Measure ``candidate`` against ``parent``, two whole configurations in files.

    Args:
        runs_dir: archive of the blocks' runs. Their checkpoints are removed.
        name: of the runs, with ``-a`` or ``-b`` added.
        world_size: processes of a run; of the parent's and the candidate's, where they differ.
        settings: how; by default one unit, and a second where the first decides nothing.
        noise: of earlier blocks of unchanged configurations, for the least effect.
        must_be_active: name of the catalogue's entry that the change requests; a candidate in which it had no effect
            is not worth more blocks.
        goal: by what it is judged; None: tokens/s.
        progress: told what happens.

    Raises:
        ConfigurationError: a file is no configuration.
    """
    settings = TrialSettings() if settings is None else settings
    goal = Goal() if goal is None else goal
    sizes = (world_size, world_size) if isinstance(world_size, int) else world_size
    sides: dict[Side, _Prepared] = {
        "A": _side(parent, settings, sizes[0], goal),
        "B": _side(candidate, settings, sizes[1], goal),
    }
    blocks: list[Block] = []
    judgement: Judgement | None = None
    speed: SpeedRatio | None = None
    earlier = Noise() if noise is None else noise
    for look, units in enumerate(settings.looks):
        order = order_of(units)
        while len(blocks) < len(order):
            side = order[len(blocks)]
            options = []
            first_run = next((block.run for block in blocks if block.side == "A"), None)
            if side == "B" and first_run is not None:
                options = ["--parent", first_run]
            attempt = _run(
                trainer,
                sides[side],
                [
                    as_override("run.runs_dir", str(runs_dir)),
                    as_override("run.name", f"{name}-{side.lower()}"),
                ],
                options,
                _longest(blocks, sides) if side == "B" else None,
            )
            block = _block(side, attempt, sides[side])
            blocks.append(block)
            progress(_said(block, len(blocks), settings.looks[-1] * BLOCKS_OF_UNIT))
            why = _failure(block, goal) or (_without_effect(attempt, must_be_active) if side == "B" else None)
            if why is not None:
                return _failed(blocks, why)
        scores = [score for block in blocks if (score := goal.score(block)) is not None]
        places = [place for place, side in enumerate(order) if side == "A"]
        own = noise_of([scores[place] for place in places], places)
        judgement, speed = goal.judge(
            order,
            blocks,
            looks=len(settings.looks),
            confidence=settings.confidence,
            noise=earlier + own,
        )
        if judgement.state != "undecided":
            break
        if look + 1 < len(settings.looks):
            progress(f"undecided, {settings.looks[look + 1] - units} more times four blocks: {judgement.why}")
    assert judgement is not None
    return _finished(blocks, judgement, own, goal, speed)


@dataclass(frozen=True)
class _Prepared:
    """One side: its file, its overrides, which of its steps count, and tokens of each."""

    config: Path
    overrides: Sequence[str]
    plan: BlockPlan
    tokens: int
    world_size: int


def _side(path: Path, settings: TrialSettings, world_size: int, goal: Goal) -> _Prepared:
    config = load_config(str(path)).config
    plan = BlockPlan.of(config, world_size, settings.steps, settings.window_steps)
    overrides = [
        *short_run(config, plan.last, profiles=plan.start is not None),
        *(as_override(leaf, value) for leaf, value in goal.counting(config).items()),
    ]
    return _Prepared(path, overrides, plan, tokens_per_step(config), world_size)


def _run(
    trainer: Runner,
    side: _Prepared,
    overrides: Sequence[str],
    options: Sequence[str],
    timeout_s: float | None,
) -> Attempt:
    """One block, with its window where it has one."""
    given = [*side.overrides, *overrides]
    if side.plan.start is None:
        return trainer.train(
            side.config, given, options=options, world_size=side.world_size, timeout_s=timeout_s
        )
    return trainer.profile(
        side.config,
        given,
        steps=side.plan.steps,
        start=side.plan.start,
        options=options,
        world_size=side.world_size,
        timeout_s=timeout_s,
    )


def _training(attempt: Attempt) -> Mapping[str, Any]:
    """What the run says of itself: a profile's document holds it as a part."""
    document = attempt.summary or {}
    found: Mapping[str, Any] = document.get("training", document)
    return found


def _block(side: Side, attempt: Attempt, prepared: _Prepared) -> Block:
    times: list[float] = []
    memory = effective = live = None
    window: BlockWindow | str | None = None
    plan = prepared.plan
    outcome, message = attempt.outcome, attempt.message
    if attempt.run is not None:
        shutil.rmtree(attempt.run / "checkpoints", ignore_errors=True)
    if outcome == "finished":
        assert attempt.run is not None
        run = open_run(attempt.run)
        lines = run.metrics()
        clean = [line for line in lines if not line["tags"]][plan.ahead :]
        clean = [line for line in clean if line["step"] <= plan.measured_to]
        times = [float(line["time/step_s"]) for line in clean]
        effective = _effective_tokens(lines, {int(line["step"]) for line in clean})
        peak = _training(attempt).get("peak_memory_bytes")
        if plan.start is None:
            memory = peak
        else:
            window = window_of(attempt.run, plan)
        counted = counted_event(attempt.run)
        if counted is not None:
            live = int(counted["peak_bytes"])
        elif "allocated" in str(_training(attempt).get("memory_rule")):
            live = peak  # A device's allocator counts all the time.
    median = statistics.median(times) if times else None
    return Block(
        side=side,
        run=None if attempt.run is None else str(attempt.run),
        outcome=outcome,
        message=message,
        steps=len(times),
        step_s=median,
        mean_step_s=statistics.fmean(times) if times else None,
        tokens_per_second=None if median is None else prepared.tokens / median,
        peak_memory_bytes=None if memory is None else int(memory),
        elapsed_s=attempt.elapsed_s,
        window=window if isinstance(window, BlockWindow) else None,
        no_window=window if isinstance(window, str) else "",
        effective_tokens_per_second=None if median is None or effective is None else effective / median,
        live_bytes=None if live is None else int(live),
        processes=prepared.world_size,
    )


def _effective_tokens(lines: Sequence[Mapping[str, Any]], counted: Collection[int]) -> float | None:
    """Mean of the tokens that carry loss over the steps ``counted``; None where they are not logged."""
    key = "progress/effective_tokens"
    if not counted or any(key not in line for line in lines):
        return None
    found, before = [], 0.0
    for line in lines:
        if int(line["step"]) in counted:
            found.append(float(line[key]) - before)
        before = float(line[key])
    return statistics.fmean(found)


def _longest(blocks: Sequence[Block], sides: Mapping[Side, _Prepared]) -> float:
    """Seconds after which a candidate is called a hang: a gain is out of reach long before.

    A step of a larger batch may take longer by as much.
    """
    tokens = {side: one.plan.last * one.tokens for side, one in sides.items()}
    work = max(1.0, tokens["B"] / tokens["A"])
    return 5 * work * max(block.elapsed_s for block in blocks if block.side == "A") + _PATIENCE_S


def _failure(block: Block, goal: Goal) -> str | None:
    who = "the candidate" if block.side == "B" else "the parent itself"
    if block.outcome != "finished":
        return f"{who}: {block.outcome.replace('_', ' ')}: {block.message}"
    lacking = goal.lacks(block)
    return None if lacking is None else f"{who} gave no figure: {lacking}"


def _without_effect(attempt: Attempt, entry: str | None) -> str | None:
    """Why the change that was asked for had no effect, by the run's own record; None where it had, or need not."""
    if entry is None:
        return None
    documents: Sequence[Mapping[str, Any]] = _training(attempt).get("optimisations") or ()
    document = next((one for one in documents if one.get("name") == entry), None)
    if document is None:
        return f"without effect: the run has no record of {entry}"
    record = OptimisationRecord.from_document(document)
    if record.requested and not record.without_effect:
        return None
    return f"without effect: {why_without_effect(record)}"


def why_without_effect(record: OptimisationRecord) -> str:
    """Why an optimisation that is wanted has no effect in the run of its record."""
    if record.active and record.evidence is not None and record.evidence.kind == "absent":
        return record.evidence.why
    if record.reason is not None:
        return record.reason
    return "the run does not say why" if record.requested else f"{record.name} was not requested in the run"


def _failed(blocks: Sequence[Block], why: str) -> TrialResult:
    worst = min((block.outcome for block in blocks), key=_WORST.index)
    return TrialResult(tuple(blocks), worst, None, False, why, _memory(blocks))


def _finished(
    blocks: Sequence[Block], judgement: Judgement, noise: Noise, goal: Goal, speed: SpeedRatio | None
) -> TrialResult:
    faster, why = judgement.state == "faster", judgement.why
    by_side = {side: [one for one in blocks if one.side == side] for side in _SIDES}
    refuted = goal.refuted_by_means(by_side["A"], by_side["B"]) if faster else None
    if refuted is not None:
        faster = False
        why += f"; {refuted}"
    figures: dict[str, float] = {
        side: goal.figure(statistics.geometric_mean(goal.score(one) or 0.0 for one in its))
        for side, its in by_side.items()
    }
    return TrialResult(
        tuple(blocks), "finished", judgement, faster, why, _memory(blocks), noise, speed, figures
    )


def _memory(blocks: Sequence[Block]) -> int | None:
    peaks = {
        side: [
            one.peak_memory_bytes for one in blocks if one.side == side and one.peak_memory_bytes is not None
        ]
        for side in _SIDES
    }
    if not peaks["A"] or not peaks["B"]:
        return None
    return int(statistics.median(peaks["B"]) - statistics.median(peaks["A"]))


def _said(block: Block, number: int, most: int) -> str:
    what = "parent" if block.side == "A" else "candidate"
    if block.tokens_per_second is None or block.step_s is None:
        return f"block {number} of at most {most}, {what}: {block.outcome.replace('_', ' ')}"
    return (
        f"block {number} of at most {most}, {what}: {block.tokens_per_second:,.0f} token/s, "
        f"{block.step_s * 1e3:.1f} ms a step"
    )
