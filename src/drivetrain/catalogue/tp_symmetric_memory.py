"""What enters and leaves tensor-parallel matrices is part of their products: fused operators over symmetric memory."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.data_parallelism import overlap_in_words
from drivetrain.catalogue.entry import Optimisation
from drivetrain.catalogue.time_models.communication import FUSED_CALLS
from drivetrain.config import LaunchFacts, Rule, RunConfig
from drivetrain.config.hosts import crossing_groups, ranks_per_host
from drivetrain.config.layout import is_order, layout_of, model_ranks, stage_plan
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "overlap.tp_symmetric_memory"
_TP = "parallelism.tensor_model_parallel_size"
_SEQUENCE = "parallelism.sequence_parallel"
_SPAN = "drivetrain/tp_symmetric/"
"""Begins the name of the region around a fused call; the kind of its collective follows."""
_CALLS_OF_A_BLOCK = 4
"""Of each kind, forward and backward: of a layer's four products two gather and two scatter, and the other way back."""


def _needs_sequences(config: RunConfig, _facts: LaunchFacts) -> str | None:
    parallelism = config.parallelism
    if parallelism.tensor_model_parallel_size >= 2 and parallelism.sequence_parallel:
        return None
    lacks = (
        f"{_TP} = 1 has no ranks that gather or scatter"
        if parallelism.tensor_model_parallel_size == 1
        else f"without {_SEQUENCE} nothing is gathered or scattered"
    )
    return f"{lacks}; nearest legal values: {_FIELD} = false; {_TP} = 2 with {_SEQUENCE} = true"


def _applies(config: RunConfig, facts: LaunchFacts) -> str | None:
    if "cpu" in (config.run.device, facts.device_type):
        return "torch's fused operators over symmetric memory are for CUDA tensors, and this run computes on a CPU"
    ranks = model_ranks(config)
    # Where rules of layouts are broken, they say so themselves.
    if facts.world_size % ranks == 0 and is_order(config.parallelism.rank_order):
        data_parallel = config.parallelism.data_parallel_size
        shards = config.parallelism.hybrid_shard_size
        fits = data_parallel in (None, facts.world_size // ranks)
        if fits and not (shards and (facts.world_size // ranks) % shards):
            crossing = crossing_groups(layout_of(config, facts.world_size), ranks_per_host(facts))
            if crossing:
                return f"devices of several machines share no memory: {crossing[0]}"
    return None


def _on(config: RunConfig, facts: LaunchFacts) -> Mapping[str, Any] | None:
    on_cuda = "cuda" in (config.run.device, facts.device_type)
    if config.overlap.tp_symmetric_memory or not on_cuda or config.memory.recompute_granularity != "none":
        return None
    if _needs_sequences(config, facts) or _applies(config, facts):
        return None
    move: dict[str, Any] = {_FIELD: True}
    if config.overlap.tp_chunks != "1":
        move["overlap.tp_chunks"] = "1"
    if config.overlap.async_tensor_model_parallel_allreduce:
        move["overlap.async_tensor_model_parallel_allreduce"] = False
    return move


def _evidence(config: RunConfig, seen: Observation, account: Account | None) -> Evidence:
    if "ranges" in seen.missing:
        return Evidence("unknown", "the trace has no ranges, by which fused calls would show")
    gathers, scatters = (
        seen.ranges[name].calls if (name := f"{_SPAN}{kind}") in seen.ranges else 0
        for kind in ("all_gather", "reduce_scatter")
    )
    passes = seen.ranges.get("drivetrain/forward")
    pipeline = config.parallelism.pipeline_model_parallel_size > 1
    if not (gathers or scatters):
        if passes is None and not (pipeline and "drivetrain/pipeline" in seen.ranges):
            return Evidence("unknown", "no forward pass was recorded in the window")
        return Evidence("absent", "passes were recorded, and no fused call")
    words = f"{gathers} fused gathers and {scatters} fused scatters in the window"
    if pipeline:
        plan = stage_plan(config)
        blocks = sorted({len(plan.layers_on(rank)) for rank in range(plan.pp)} - {0})
        each = [_CALLS_OF_A_BLOCK * count * max(seen.num_steps, 1) for count in blocks]
        if gathers == scatters and any(gathers % count == 0 for count in each):
            return Evidence(
                "shown", f"{words}, as many of each as whole micro-batches make{overlap_in_words(account)}"
            )
        return Evidence("absent", f"{words}: not what whole micro-batches through this rank's blocks make")
    if passes is None:
        return Evidence("unknown", f"{words}, and no forward pass")
    must = _CALLS_OF_A_BLOCK * config.model.num_layers * passes.calls
    if (gathers, scatters) == (must, must):
        return Evidence(
            "shown", f"{words}, as many as {passes.calls} micro-batches make{overlap_in_words(account)}"
        )
    return Evidence("absent", f"{words}, where {passes.calls} micro-batches make {must} of each")


ENTRY = Optimisation(
    name="tp_symmetric_memory",
    summary="gathers and scatters of tensor-parallel layers are part of their products (CUDA, symmetric memory)",
    sources=(
        "PyTorch, torch.distributed._symmetric_memory (async tensor parallelism)",
        "Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition (ASPLOS)",
    ),
    field=_FIELD,
    requested=lambda config: config.overlap.tp_symmetric_memory,
    on=_on,
    off=lambda _config: {_FIELD: False},
    # The products are of a rank's rows, and the sums over ranks are in another order than the library's.
    numerics="round-off",
    treats=("communication",),
    evidence=_evidence,
    time_model=FUSED_CALLS,
    applies=_applies,
    requires=(
        Rule(
            "tp-symmetric-memory-needs-sequence-parallelism",
            (_FIELD, _TP, _SEQUENCE),
            _needs_sequences,
            f"{_FIELD} needs {_TP} of 2 or more and {_SEQUENCE}.",
        ),
    ),
    # What is recomputed is called again: the count would no longer be the layout's.
    conflicts=("tp_chunks", "tp_async_gradient", "recompute"),
    capability="symmetric_memory",
    evidence_rule=(
        f"shown: regions `{_SPAN}all_gather` and `{_SPAN}reduce_scatter`, {_CALLS_OF_A_BLOCK} of each for each block "
        "and micro-batch of the window (in a pipeline: of whole micro-batches through some rank's blocks); "
        "absent: none, or another number. It has never run on a GPU"
    ),
)
