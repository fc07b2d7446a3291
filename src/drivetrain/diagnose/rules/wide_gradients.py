"""Gradients that travel in fp32 although the model computes in 16 bits.

A run that says itself how long its collectives were under way tells what half the bytes would bring: half of the time
in which they move, as far as somebody waits for it. What is hidden now stays hidden, so that all of that half comes off
what is waited for. An account alone knows what nothing hides, and half of that is the least that half the bytes bring.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from drivetrain.config import data_parallel_size
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.moving import moved_s
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
    stage = facts.config.parallelism.zero_stage
    known = facts.communication
    if known is not None and known.get("exposed_s") is not None:
        yield from _of_flights(facts, known, stage)
        return
    moved = sum(facts.mean.classes.get(f"communication.dp.{part}", 0.0) for part in ("transfer", "unsplit"))
    if not moved:
        return
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


def _of_flights(facts: Facts, known: Mapping[str, Any], stage: int) -> Iterator[Finding]:
    """By what the run says of its collectives, in steady steps without the profiler."""
    assert facts.config is not None
    kind = "all_reduce" if stage < 2 else "reduce_scatter"
    found = {
        name: group["kinds"][kind]
        for name, group in known["groups"].items()
        if name in ("dp", "dp_shard") and kind in group["kinds"]
    }
    waited = sum(moved_s(facts, name, kind, one["exposed_s"]) for name, one in found.items())
    moving = sum(_moving_s(one) for one in found.values())
    if not waited:
        return
    cost = 1e9 * min(waited, _HALF * moving)
    remedies, none, _ = remedies_against(facts, "communication.fp32_on_the_wire", cost)
    yield loss(
        facts,
        "wide_gradients",
        "communication.fp32_on_the_wire",
        "precision.grad_reduce_dtype",
        cost,
        confidence="medium",
        evidence=(
            Evidence(
                f"params_dtype is {facts.config.precision.params_dtype} and grad_reduce_dtype fp32; gradients move for "
                f"{1e3 * moving:.3f} ms a step and are waited for for {1e3 * waited:.3f} ms",
                f"configuration, and collectives of {known['steps']} steps without the profiler",
                {"moving_s": moving, "exposed_s": waited},
            ),
        ),
        remedies=remedies,
        no_remedy=none,
        part_of="communication",
    )


def _moving_s(kind: Mapping[str, Any]) -> float:
    """For how long bytes move: without waiting for a rank, and without what a call costs whatever its size, where the
    line through sizes and times tells them apart."""
    under_way: float = kind["wire_s"]
    return under_way if not kind["bytes_per_s"] else min(under_way, kind["bytes"] / kind["bytes_per_s"])


RULE = Rule("wide_gradients", ("communication.fp32_on_the_wire",), ("configuration",), _detect)
