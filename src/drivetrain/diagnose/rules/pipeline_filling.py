"""A pipeline that is filled and emptied for too few micro-batches.

With p ranks, v stages on each and m micro-batches, ``(p - 1) / (v m + p - 1)`` of a step is bubble in schedules that do
not halve backward (Narayanan et al. 2021, section 2.2).
"""

from collections.abc import Iterator

from drivetrain.config import num_microbatches
from drivetrain.config.layout import stage_plan
from drivetrain.config.stages import ZERO_BUBBLE
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding, Remedy
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.remedies import setting_remedy
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE", "bubble_share"]

_LEAST = 0.1
"""Share of a step that filling and emptying may take before the number of micro-batches is the cause."""
_STANDING = (
    "bubble",
    "communication.pp",
    "communication.world",
    "communication.unknown",
    "idle",
    "unexplained",
)
"""Classes in whose time a stage may stand because it has no work."""


def bubble_share(ranks: int, micro_batches: int, stages: int = 1) -> float:
    """Share of a step by the formula above."""
    return (ranks - 1) / (stages * micro_batches + ranks - 1)


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.config is not None
    assert facts.launch is not None
    parallelism, training = facts.config.parallelism, facts.config.training
    ranks = parallelism.pipeline_model_parallel_size
    if ranks == 1 or parallelism.pipeline_schedule in ZERO_BUBBLE:
        return
    stages = stage_plan(facts.config).num_stages // ranks
    micro_batches = num_microbatches(facts.config, facts.launch.world_size)
    share = bubble_share(ranks, micro_batches, stages)
    if share < _LEAST:
        return
    measured = facts.group_ns("bubble.warmup") + facts.group_ns("bubble.cooldown")
    # Bubbles that no record tells from waiting can only be where a stage waits.
    standing = sum(facts.group_ns(name) for name in _STANDING)
    cost = measured or min(share * facts.mean.window_ns, standing)
    remedies: tuple[Remedy, ...] = ()
    size = training.micro_batch_size
    if size % 2 == 0:
        left = bubble_share(ranks, 2 * micro_batches, stages) / share
        remedies = (
            setting_remedy(
                facts,
                {"training.micro_batch_size": size // 2},
                cost,
                saved_ns=cost * (1 - left),
                rule="(p - 1)/(v m + p - 1) with twice as many micro-batches; smaller products may be slower",
                numerics="round-off",
            ),
        )
    yield loss(
        facts,
        "pipeline_filling",
        "pipeline.too_few_micro_batches",
        "micro-batches of a step",
        cost,
        confidence="high" if measured else "low",
        evidence=(
            Evidence(
                f"{micro_batches} micro-batches for {ranks} ranks with {stages} stages each: {share:.1%} of a step by "
                f"the formula, {measured / 1e6:.3f} ms of bubbles in the records",
                "configuration and account",
                {"micro_batches": micro_batches, "formula_share": share, "measured_ms": measured / 1e6},
            ),
        ),
        remedies=remedies,
        no_remedy="micro_batch_size is odd or 1: only a larger global batch, or another layout, fills it",
        part_of="bubble"
        if measured
        else next((name for name in _STANDING if facts.group_ns(name) >= cost), None),
        class_name="bubble",
    )


RULE = Rule("pipeline_filling", ("pipeline.too_few_micro_batches",), ("configuration",), _detect)
