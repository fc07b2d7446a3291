"""Gradients that travel in fp32 although the model computes in 16 bits."""

from collections.abc import Iterator

from drivetrain.config import data_parallel_size
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.remedies import remedies_against
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]

_HALF = 0.5
"""Bytes of bf16 over those of fp32."""


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.config is not None
    assert facts.launch is not None
    precision = facts.config.precision
    if precision.params_dtype == "fp32" or precision.grad_reduce_dtype != "fp32":
        return
    if data_parallel_size(facts.config, facts.launch.world_size) == 1:
        return
    moved = sum(facts.mean.classes.get(f"communication.dp.{part}", 0.0) for part in ("transfer", "unsplit"))
    if not moved:
        return
    cost = _HALF * moved
    remedies, none, _ = remedies_against(facts, "communication.fp32_on_the_wire", cost)
    yield loss(
        facts,
        "wide_gradients",
        "communication.fp32_on_the_wire",
        "precision.grad_reduce_dtype",
        cost,
        confidence="medium" if facts.mean.classes.get("communication.dp.transfer", 0.0) >= cost else "low",
        evidence=(
            Evidence(
                f"params_dtype is {precision.params_dtype} and grad_reduce_dtype fp32; data parallelism moves bytes "
                f"for {moved / 1e6:.3f} ms a step with nothing beside",
                "configuration and account",
                {"exposed_ms": moved / 1e6},
            ),
        ),
        remedies=remedies,
        no_remedy=none,
        part_of="communication.dp",
    )


RULE = Rule("wide_gradients", ("communication.fp32_on_the_wire",), ("configuration",), _detect)
