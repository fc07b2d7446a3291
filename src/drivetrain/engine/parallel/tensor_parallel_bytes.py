"""What tensor parallelism hands to collectives in a step, as a closed formula of the model's shape."""

from collections.abc import Mapping

import torch

from drivetrain.config.model import ModelConfig

__all__ = ["tensor_parallel_bytes"]


def tensor_parallel_bytes(
    model: ModelConfig,
    size: int,
    *,
    sequence_parallel: bool,
    tokens: int,
    compute_dtype: torch.dtype,
    parameter_dtype: torch.dtype = torch.float32,
    layers: int | None = None,
    first: bool = True,
    last: bool = True,
) -> Mapping[str, int]:
    """Payload bytes of a rank for forward and backward of one micro-batch, by kind of collective.

    With T tokens, width D, heads of width K, t ranks, and a, p, s bytes an element of activations, parameters and the
    loss' statistics (fp32; fp64 in an fp64 model):

    * embedding: T D p in one sum;
    * each layer: 4 T D a in four sums (output of attention and of the MLP, gradients of their inputs);
    * the head: T D a for the gradient of its input, and 3 T s for the loss (maximum; sum and label's logit).

    These sums are all-reduces. Under sequence parallelism those of T D elements are reduce-scatters of the same
    payload, each with an all-gather of 1/t of it on the way back; and all-reduced are, in the dtype of the parameters,
    the gradients of all that acts on a rank's own tokens: norms (their biases too), biases of matrices that write into
    the residual stream, learned positions. With or without it: norms of query and key heads; and where ranks share
    heads of keys and values, the gradients of these, (D + 1 with biases) K p each.

    Args:
        size: t.
        tokens: T of the micro-batch.
        layers, first, last: the part of the model: how many layers (all when absent), whether the embedding and
            the head belong to it.
    """
    layers = model.num_layers if layers is None else layers
    width, head = model.hidden_size, model.head_size
    activation, parameter = compute_dtype.itemsize, parameter_dtype.itemsize
    statistic = torch.promote_types(compute_dtype, torch.float32).itemsize

    over_tokens = tokens * width * (first * parameter + (4 * layers + last) * activation)
    loss = last * 3 * tokens * statistic
    gradients = 0
    if model.qk_layernorm:
        gradients += layers * 2 * head
    if model.query_groups < size:
        gradients += layers * 2 * head * (width + model.add_bias_linear)
    if not sequence_parallel:
        return {"all_reduce": over_tokens + loss + gradients * parameter}

    per_norm = width * (2 if model.normalization == "LayerNorm" else 1)
    gradients += (2 * layers + last) * per_norm
    if model.add_bias_linear:
        gradients += layers * 2 * width
    if first and model.position_embedding_type == "learned_absolute":
        gradients += model.max_positions * width
    return {
        "all_reduce": loss + gradients * parameter,
        "reduce_scatter": over_tokens,
        "all_gather": over_tokens // size,
    }
