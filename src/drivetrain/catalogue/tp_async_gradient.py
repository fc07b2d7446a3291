"""Gradients of what enters tensor-parallel matrices travel while those of the weights are computed."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.data_parallelism import overlap_in_words
from drivetrain.catalogue.entry import Optimisation
from drivetrain.catalogue.time_models.communication import ASYNC_GRADIENTS
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "overlap.async_tensor_model_parallel_allreduce"
_SPAN = "drivetrain/tp_async/"
"""Begins the name of the region in which such a collective is handed over."""


def _applies(config: RunConfig, _facts: LaunchFacts) -> str | None:
    if config.parallelism.tensor_model_parallel_size == 1:
        return "parallelism.tensor_model_parallel_size = 1: no ranks share a layer"
    chunks = config.overlap.wanted_tp_chunks
    if chunks is not None and chunks > 1:
        return f"overlap.tp_chunks = {chunks}: in chunks it does so in any case"
    return None


def _on(config: RunConfig, facts: LaunchFacts) -> Mapping[str, Any] | None:
    if config.overlap.async_tensor_model_parallel_allreduce or _applies(config, facts) is not None:
        return None
    return {_FIELD: True}


def _evidence(_config: RunConfig, seen: Observation, account: Account | None) -> Evidence:
    if "ranges" in seen.missing:
        return Evidence("unknown", "the trace has no ranges, by which it would show")
    begun = sum(count.calls for name, count in seen.ranges.items() if name.startswith(_SPAN))
    if begun:
        words = f"{begun} collectives were handed over before gradients of weights were computed"
        return Evidence("shown", words + overlap_in_words(account))
    if "drivetrain/forward" in seen.ranges:
        return Evidence("absent", "forward passes were recorded, and no such collective")
    return Evidence("unknown", "no forward pass was recorded in the window")


ENTRY = Optimisation(
    name="tp_async_gradient",
    summary="gradients of what enters tensor-parallel layers travel while those of the weights are computed",
    sources=("Megatron-LM, LinearWithGradAccumulationAndAsyncCommunication",),
    field=_FIELD,
    requested=lambda config: config.overlap.async_tensor_model_parallel_allreduce,
    on=_on,
    off=lambda _config: {_FIELD: False},
    # The same products and sums in the same order; only when they are waited for is another.
    numerics="exact",
    treats=("communication",),
    evidence=_evidence,
    time_model=ASYNC_GRADIENTS,
    applies=_applies,
    evidence_rule=(
        f"shown: regions `{_SPAN}<kind>` in the window, one for each collective; absent: forward passes without any"
    ),
)
