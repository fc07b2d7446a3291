"""The dtype of every class of tensors in a run, as its configuration makes it.

What is fp32 whatever is chosen is an island: kept, summed or computed there although what comes in and goes out has the
compute dtype. A test runs a step and compares what it sees with this table.
"""

from dataclasses import dataclass

from drivetrain.config.derive import data_parallel_size
from drivetrain.config.rules import LaunchFacts
from drivetrain.config.schema import RunConfig

__all__ = ["TensorClass", "tensor_classes"]


@dataclass(frozen=True)
class TensorClass:
    """Tensors of one kind.

    Attributes:
        name: of the class.
        dtype: ``fp32``, ``bf16`` or ``fp16``; None: the run has no such tensors.
        note: what happens there, or why there are none.
    """

    name: str
    dtype: str | None
    note: str


def tensor_classes(config: RunConfig, facts: LaunchFacts) -> tuple[TensorClass, ...]:
    """All classes, from what is kept to what is computed; of a configuration that breaks no rule."""
    precision, parallelism = config.precision, config.parallelism
    compute = precision.params_dtype
    scaled = ", of the scaled loss" if compute == "fp16" else ""
    return (
        TensorClass("masters", "fp32", "parameters as they are kept, updated and saved"),
        TensorClass("parameters", compute, "cast from the masters where they are used; not kept"),
        TensorClass(
            "activations", compute, "from the embedding's output to the logits; operands of products"
        ),
        TensorClass("product sums", "fp32", "inside a matrix product, rounded once to its output"),
        TensorClass("activation gradients", compute, f"what backward hands from layer to layer{scaled}"),
        TensorClass("gradients", "fp32", f"of parameters, summed over micro-batches{scaled}"),
        _reduce_wire(config, facts),
        _wire(
            "tensor-parallel wire",
            compute,
            parallelism.tensor_model_parallel_size > 1,
            "activations and their gradients; embeddings and numbers of the loss travel in fp32",
            "parallelism.tensor_model_parallel_size = 1",
        ),
        _wire(
            "pipeline wire",
            compute,
            parallelism.pipeline_model_parallel_size > 1,
            "hidden states and their gradients",
            "parallelism.pipeline_model_parallel_size = 1",
        ),
        TensorClass(
            "optimizer state",
            precision.optimizer_state_dtype,
            "both moments"
            + ("; updated in fp32, rounded at random" if precision.optimizer_state_dtype != "fp32" else ""),
        ),
        TensorClass("gradient norm", "fp32", "of gradients without loss scale; clipping too"),
        TensorClass("island: embedding", "fp32", "rows of the masters, and positions added to them"),
        TensorClass("island: norms", "fp32", "statistics; input and output have the dtype of activations"),
        TensorClass("island: attention softmax", "fp32", _attention_note(compute)),
        TensorClass("island: loss", "fp32", "softmax, logarithm and sum over tokens; logits are activations"),
        _rotary("island: rotary angles", "fp32", config, "positions times frequencies, sine and cosine"),
        _rotary("rotary tables", compute, config, "sines and cosines that queries and keys are turned by"),
    )


def _reduce_wire(config: RunConfig, facts: LaunchFacts) -> TensorClass:
    return _wire(
        "gradient wire",
        config.precision.grad_reduce_dtype,
        data_parallel_size(config, facts.world_size) > 1,
        "between data-parallel ranks, summed in fp32",
        "one data-parallel rank has nothing to reduce",
    )


def _wire(name: str, dtype: str, travels: bool, note: str, why_not: str) -> TensorClass:
    return TensorClass(name, dtype if travels else None, note if travels else why_not)


def _attention_note(compute: str) -> str:
    note = "over the scores of one query; what it is multiplied by has the dtype of activations"
    if compute == "bf16":
        note += "; scores are rounded to bf16 first by the backend products, on CPUs with bf16 dot products"
    return note


def _rotary(name: str, dtype: str, config: RunConfig, note: str) -> TensorClass:
    if config.model.position_embedding_type == "rope":
        return TensorClass(name, dtype, note)
    return TensorClass(name, None, f"model.position_embedding_type = {config.model.position_embedding_type}")
