"""Gradients travel in buckets while backward still computes, instead of all together when it has ended."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.data_parallelism import no_other_rank, overlap_in_words
from drivetrain.catalogue.entry import Knob, Optimisation
from drivetrain.catalogue.time_models.communication import BUCKETS
from drivetrain.config import LaunchFacts, RunConfig, data_parallel_size
from drivetrain.config.layout import model_ranks
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation
from drivetrain.measure.parameters import parameter_count

__all__ = ["ENTRY"]

_FIELD = "overlap.bucket_size_mb"
_LARGEST_MB = 25.0
_GRADIENT_BYTES = 4
"""Gradients are fp32."""
_MESSAGE_BYTES = 64
"""The loop's own sums (token counts, loss, votes) are smaller than this, any bucket of gradients is larger."""


def _gradient_mb(config: RunConfig) -> float:
    return parameter_count(config.model).total * _GRADIENT_BYTES / 1e6


def _applies(config: RunConfig, facts: LaunchFacts) -> str | None:
    size = config.overlap.bucket_size_mb
    if (why := no_other_rank(config, facts)) is not None:
        return why
    if config.parallelism.zero_stage == 3:
        return "with parallelism.zero_stage = 3 a block's gradients are one bucket"
    if config.parallelism.pipeline_model_parallel_size > 1:
        return (
            "a pipeline's gradients are whole when its schedule has ended, and nothing is reduced before; the size "
            "bounds the memory of the reduction alone"
        )
    gradients = _gradient_mb(config)
    # How much a rank has of a model that several share is not known here.
    if model_ranks(config) == 1 and 0 < gradients <= size:
        return (
            f"one bucket of {size:g} MB holds all gradients ({gradients:.3g} MB): nothing is reduced before "
            "backward has ended"
        )
    return None


def _on(config: RunConfig, facts: LaunchFacts) -> Mapping[str, Any] | None:
    parallelism = config.parallelism
    if parallelism.zero_stage == 3 or parallelism.pipeline_model_parallel_size > 1:
        return None
    if data_parallel_size(config, facts.world_size) == 1:
        return None
    if config.overlap.bucket_size_mb and _applies(config, facts) is None:
        return None
    # A quarter of the gradients: three of four buckets can travel while backward computes.
    return {_FIELD: float(f"{min(_LARGEST_MB, _gradient_mb(config) / 4):.2g}")}


def _evidence(config: RunConfig, seen: Observation, account: Account | None) -> Evidence:
    if "collectives" in seen.missing:
        return Evidence("unknown", "the trace has no collectives")
    if model_ranks(config) > 1:
        return Evidence(
            "unknown", "reductions of gradients are not told from those of ranks that share the model"
        )
    reductions = [size for kind in _kinds(config) for size in seen.collective_bytes.get(kind, ())]
    buckets = [size for size in reductions if size > _MESSAGE_BYTES]
    if not reductions:
        return Evidence("absent", "no all-reduce of known size was recorded")
    if not buckets:
        return Evidence("absent", f"{len(reductions)} all-reduces were recorded, none of them of gradients")
    per_step = len(buckets) / max(seen.num_steps, 1)
    largest = f"{max(buckets) / 1e6:.3g} MB"
    if per_step < 1.5:
        return Evidence("absent", f"one all-reduce of all gradients a step, of {largest}")
    return Evidence(
        "shown",
        f"{per_step:.3g} all-reduces of gradients a step, the largest of {largest}{overlap_in_words(account)}",
    )


def _kinds(config: RunConfig) -> tuple[str, ...]:
    """The collectives by which gradients are reduced. Over gloo torch's reduce-scatter shows as an all-reduce, and one
    of our own, or a sum of narrow values, as an all-to-all."""
    if config.parallelism.zero_stage == 2:
        return "reduce_scatter", "all_reduce", "all_to_all"
    return ("all_to_all",) if config.precision.grad_reduce_dtype == "bf16" else ("all_reduce",)


ENTRY = Optimisation(
    name="ddp_bucket",
    summary="gradients are reduced in buckets while backward runs",
    sources=("Li et al. 2020, PyTorch Distributed (VLDB 13)",),
    field=_FIELD,
    requested=lambda config: config.overlap.bucket_size_mb > 0,
    on=_on,
    off=lambda _config: {_FIELD: 0.0},
    # Two ranks add the same two numbers whatever the buckets: equal to the bit, as measured. With more, a ring adds an
    # element in an order that depends on its place in the bucket: measured with three and four ranks over gloo.
    numerics="round-off",
    treats=("communication",),
    cures=("communication.serial",),
    evidence=_evidence,
    time_model=BUCKETS,
    applies=_applies,
    knobs=(Knob(_FIELD, 0.1, 200.0, scale="log"),),
    evidence_rule=(
        "shown: more than one all-reduce of gradients a step in the window; absent: at most one, since nothing can "
        "then travel before backward has ended"
    ),
)
