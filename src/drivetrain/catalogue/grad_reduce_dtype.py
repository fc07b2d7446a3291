"""Gradients travel between data-parallel ranks in bf16, and are summed in fp32."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.data_parallelism import TRANSFERS, no_other_rank
from drivetrain.catalogue.entry import Optimisation
from drivetrain.catalogue.time_models.communication import NARROW_GRADIENTS
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "precision.grad_reduce_dtype"
_PACKED = "drivetrain/wire/bf16"
_OPTIMIZER = "drivetrain/optimizer"


def _on(config: RunConfig, facts: LaunchFacts) -> Mapping[str, Any] | None:
    if config.precision.grad_reduce_dtype == "bf16" or no_other_rank(config, facts) is not None:
        return None
    return {_FIELD: "bf16"}


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    packed = seen.ranges.get(_PACKED)
    if packed is not None:
        per_step = packed.calls / max(seen.num_steps, 1)
        sent = sum(seen.collective_bytes.get("all_to_all", ())) / max(seen.num_steps, 1)
        size = f", {sent / 1e6:.3g} MB a step exchanged" if sent else ""
        return Evidence("shown", f"{per_step:.3g} buckets of gradients a step were packed in bf16{size}")
    if _OPTIMIZER in seen.ranges:
        return Evidence("absent", "steps were recorded, and no bucket of gradients was packed in bf16")
    return Evidence("unknown", "the trace has no spans of a step")


ENTRY = Optimisation(
    name="grad_reduce_dtype",
    summary="gradients travel between data-parallel ranks in bf16 and are summed in fp32: half the bytes",
    sources=(
        "Megatron-LM, --grad-reduce-in-bf16",
        "PyTorch documentation, MixedPrecisionPolicy.reduce_dtype",
    ),
    field=_FIELD,
    requested=lambda config: config.precision.grad_reduce_dtype == "bf16",
    on=_on,
    off=lambda _config: {_FIELD: "fp32"},
    # Each element is rounded to 8 bits of mantissa, once or twice: a thousand times more than round-off of fp32, and as
    # much as matrix products in bf16 do to a gradient. Whether training is as good is what the gate has to see.
    numerics="statistical",
    # Fewer bytes make nobody come earlier.
    treats=TRANSFERS,
    relieves=("communication",),
    cures=("communication.fp32_on_the_wire", "communication.too_much"),
    evidence=_evidence,
    time_model=NARROW_GRADIENTS,
    applies=no_other_rank,
    evidence_rule=(
        "shown: gradients were packed in bf16 in the window; absent: steps were recorded in which none were. How far "
        "the first reduced gradient was from one that travelled in fp32 is in the run's events and its summary"
    ),
)
