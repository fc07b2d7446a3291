"""Output matrix and loss without all logits in fp32."""

from drivetrain.catalogue.operators import operator_entry
from drivetrain.config import LaunchFacts, RunConfig

__all__ = ["ENTRY"]


def _applies(config: RunConfig, _facts: LaunchFacts) -> str | None:
    if config.parallelism.tensor_model_parallel_size > 1:
        return "the vocabulary is spread over ranks, and their loss has code of its own"
    return None


ENTRY = operator_entry(
    "linear_cross_entropy",
    summary="output matrix and loss without all logits in fp32",
    sources=("Wijmans et al., Cut Your Losses, arXiv:2411.09009", "Liger Kernel, arXiv:2410.10989"),
    treats=("compute.loss", "compute.matmul"),
    relieves=("activations",),
    applies=_applies,
)
