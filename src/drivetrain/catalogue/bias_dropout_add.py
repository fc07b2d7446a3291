"""Dropout and the addition of the residual in one pass over memory; the mask is computed again, not kept."""

from drivetrain.catalogue.operators import operator_entry
from drivetrain.config import LaunchFacts, RunConfig

__all__ = ["ENTRY"]


def _applies(config: RunConfig, _facts: LaunchFacts) -> str | None:
    if config.model.hidden_dropout == 0:
        return "model.hidden_dropout = 0 drops nothing"
    if config.parallelism.tensor_model_parallel_size > 1:
        return "ranks that share a layer draw parts of one mask, which the operator does not"
    return None


ENTRY = operator_entry(
    "bias_dropout_add",
    summary="dropout and the addition of the residual in one pass over memory; the mask is computed again, not kept",
    sources=("Megatron-LM, fused bias, dropout and add",),
    treats=("compute.elementwise", "host.launch"),
    applies=_applies,
    # Which elements are dropped is another draw than torch's.
    numerics="statistical",
)
