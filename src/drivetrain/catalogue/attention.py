"""Attention by a fused or a tuned implementation."""

from drivetrain.catalogue.operators import operator_entry
from drivetrain.config import LaunchFacts, RunConfig

__all__ = ["ENTRY"]


def _applies(config: RunConfig, _facts: LaunchFacts) -> str | None:
    if config.model.attention_dropout > 0 and config.parallelism.tensor_model_parallel_size > 1:
        return "ranks that share heads draw parts of one dropout mask, which the operator does not"
    return None


ENTRY = operator_entry(
    "attention",
    summary="attention by a fused or a tuned implementation",
    sources=("Dao et al., arXiv:2205.14135", "Dao, arXiv:2307.08691"),
    treats=("compute.attention", "host.launch"),
    applies=_applies,
)
