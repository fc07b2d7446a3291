"""Output matrix and cross-entropy: ``sum_t w_t (lse_t - logit_t[label_t] + z lse_t^2)``, ``logits = hidden weight^T``.

``lse`` is the logarithm of the sum of the logits' exponentials, ``z`` the factor of the z-loss (Chowdhery et al.,
arXiv:2204.02311, section 5). The sum is returned with the sum of the weights, so that whoever divides can add up over
micro-batches and ranks first: a mean of means would weigh tokens by how many others were not ignored beside them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.engine.ops._chunked_cross_entropy import chunked_cross_entropy, compiled_cross_entropy
from drivetrain.engine.ops._compiled import inductor_refuses
from drivetrain.engine.ops._cross_entropy_cases import linear_cross_entropy_cases
from drivetrain.engine.ops._cross_entropy_checks import IGNORE_INDEX, check_cross_entropy, counted_weights
from drivetrain.engine.ops._in_place_cross_entropy import in_place_cross_entropy, in_place_refuses
from drivetrain.engine.ops.adapters import adapters_of
from drivetrain.engine.ops.operator import Backend, Operator, serves_all

__all__ = ["OPERATOR", "linear_cross_entropy", "torch_cross_entropy"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    chunk_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """The reference; all logits exist at once, in the dtype of ``hidden`` and once more in fp32 at least.

    Args:
        hidden: (T, D), floating point.
        weight: (V, D), of the same dtype.
        labels: (T,) int64, each in [0, V) or ``ignore_index``.
        token_weights: (T,), floating point; None: one for each token. They get no gradient.
        ignore_index: the label of tokens that do not count. What ``hidden`` holds there is not looked at, and the same
            is true where a token's weight is zero.
        z_loss: factor of the squared logarithm of the normaliser; 0 is none.
        chunk_rows: tokens whose logits exist at once, for backends that cut; 0 leaves it to them. The result does not
            depend on it, but for roundings.

    Returns:
        The weighted sum and the sum of the weights of what is counted, scalars of fp32, or fp64 for fp64. Both are 0
        where nothing is counted, and so are the gradients then.

    Raises:
        DrivetrainError: shapes or dtypes do not fit, or token weights want a gradient.
    """
    check_cross_entropy(hidden, weight, labels, token_weights, chunk_rows)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    weights = counted_weights(labels, token_weights, ignore_index, wide)
    counted = weights != 0
    logits = (hidden.masked_fill(~counted[:, None], 0.0) @ weight.t()).to(wide)
    normaliser = torch.logsumexp(logits, dim=-1)
    of_label = logits.gather(1, labels.masked_fill(~counted, 0)[:, None])[:, 0]
    return (weights * (normaliser - of_label + z_loss * normaliser.square())).sum(), weights.sum()


def torch_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    chunk_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """Torch's own cross-entropy of all logits in fp32."""
    check_cross_entropy(hidden, weight, labels, token_weights, chunk_rows)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    weights = counted_weights(labels, token_weights, ignore_index, wide)
    counted = weights != 0
    logits = F.linear(hidden.masked_fill(~counted[:, None], 0.0), weight).to(wide)
    losses = F.cross_entropy(logits, labels.masked_fill(~counted, 0), reduction="none")
    if z_loss:
        losses = losses + z_loss * torch.logsumexp(logits, dim=-1).square()
    return (weights * losses).sum(), weights.sum()


OPERATOR = Operator(
    name="linear_cross_entropy",
    equation="sum_t w_t (lse_t - logit_t[label_t] + z lse_t^2), sum_t w_t; logits = hidden weight^T",
    source="z-loss: Chowdhery et al., arXiv:2204.02311",
    reference=linear_cross_entropy,
    cases=linear_cross_entropy_cases,
    backends=(
        Backend(
            "eager",
            torch_cross_entropy,
            serves_all,
            ran_on=("cpu",),
            kernels=("aten::nll_loss", "nll_loss_forward"),
        ),
        Backend(
            "chunked",
            chunked_cross_entropy,
            serves_all,
            ran_on=("cpu",),
            kernels=("_ChunkedCrossEntropy",),
        ),
        Backend(
            "in_place",
            in_place_cross_entropy,
            in_place_refuses,
            ran_on=("cpu",),
            kernels=("_LinearCrossEntropySum",),
        ),
        Backend(
            "inductor",
            compiled_cross_entropy,
            inductor_refuses,
            ran_on=("cpu",),
            kernels=("_losses_of_rows", "_add_with_remainder"),
        ),
        *adapters_of("linear_cross_entropy"),
    ),
    # in_place: half of eager's time at 8,192 words of 320 features in bf16 on a Zen 5 core; on CUDA nothing was timed,
    # and it is what our own models compute there. What it refuses takes chunked about as long as eager, in a quarter of
    # the memory, and chunk_rows means nothing to eager.
    untuned={"cpu": ("in_place", "chunked"), "cuda": ("in_place", "chunked")},
)
