"""Steps cut into so many micro-batches that the host's part of each is what they cost (SOURCES C13)."""

from collections.abc import Iterator

from drivetrain.config import num_microbatches
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding, Remedy
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.remedies import setting_remedy
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]

_MOST = 16
_ENOUGH = 8
"""Four to eight are harmless, more than sixteen cost, by the source."""


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.config is not None
    assert facts.launch is not None
    if facts.config.parallelism.pipeline_model_parallel_size > 1:
        return  # A pipeline wants many.
    count = num_microbatches(facts.config, facts.launch.world_size)
    if count <= _MOST:
        return
    host = facts.group_ns("host.launch") + facts.group_ns("host.python")
    cost = host * (1 - _ENOUGH / count)
    factor = max(one for one in range(1, count // _ENOUGH + 1) if count % one == 0)
    remedies: tuple[Remedy, ...] = ()
    if factor > 1:
        remedies = (
            setting_remedy(
                facts,
                {"training.micro_batch_size": facts.config.training.micro_batch_size * factor},
                cost,
                saved_ns=host * (1 - 1 / factor),
                rule="the host's time is in proportion to the number of micro-batches",
                numerics="round-off",
                note="activations of a micro-batch grow by the same factor",
            ),
        )
    yield loss(
        facts,
        "deep_accumulation",
        "pipeline.accumulation_too_deep",
        "micro-batches of a step",
        cost,
        confidence="medium",
        evidence=(
            Evidence(
                f"{count} micro-batches of {facts.config.training.micro_batch_size} sequences a step; launches and "
                f"Python take {host / 1e6:.3f} ms of it",
                "configuration and account",
                {"micro_batches": count, "host_ms": host / 1e6},
            ),
        ),
        remedies=remedies,
        part_of="host",
    )


RULE = Rule("deep_accumulation", ("pipeline.accumulation_too_deep",), ("configuration",), _detect)
