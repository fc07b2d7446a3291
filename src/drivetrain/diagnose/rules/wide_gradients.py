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
_GRADIENTS = {0: 1.0, 1: 2 / 3, 2: 1 / 2, 3: 1 / 3}
"""Stage of ZeRO → gradients among what data parallelism sends. An all-reduce moves twice the bytes of a reduce-scatter
or a gather; stages 1 and 2 gather parameters once a step, stage 3 in forward and in backward."""


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
    stage = facts.config.parallelism.zero_stage
    cost = _HALF * _GRADIENTS[stage] * moved
    remedies, none, _ = remedies_against(facts, "communication.fp32_on_the_wire", cost)
    yield loss(
        facts,
        "wide_gradients",
        "communication.fp32_on_the_wire",
        "precision.grad_reduce_dtype",
        cost,
        # What is not split may be waiting for a rank, and gathers may lie elsewhere than reductions.
        confidence="medium"
        if stage == 0 and facts.mean.classes.get("communication.dp.transfer", 0.0) >= cost
        else "low",
        evidence=(
            Evidence(
                f"params_dtype is {precision.params_dtype} and grad_reduce_dtype fp32; data parallelism moves bytes "
                f"for {moved / 1e6:.3f} ms a step with nothing beside, {_GRADIENTS[stage]:.0%} of them gradients at "
                f"zero_stage {stage}",
                "configuration and account",
                {"exposed_ms": moved / 1e6},
            ),
        ),
        remedies=remedies,
        no_remedy=none,
        part_of="communication.dp",
    )


RULE = Rule("wide_gradients", ("communication.fp32_on_the_wire",), ("configuration",), _detect)
