"""The operators beside attention in flash-attn (Dao-AILab/flash-attention): Triton kernels for CUDA. Never run by us.

Its norms choose their number of warps by timing the first call of each size; on another rank the choice may differ.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.engine.ops._cross_entropy_checks import IGNORE_INDEX, check_cross_entropy, counted_weights
from drivetrain.engine.ops._norm_formulas import AFTER_WEIGHT, BEFORE_WEIGHT, check_norm
from drivetrain.engine.ops.adapters.library import (
    HALVES,
    Library,
    hangs_on,
    refuse_empty,
    refuse_large,
    served_by,
)
from drivetrain.engine.ops.operator import Backend
from drivetrain.engine.ops.signature import Signature

__all__ = ["BACKENDS", "LIBRARY", "RULES"]

LIBRARY = Library("flash_attn", "flash-attn", "2.8.3", oldest="2.8.3")
LARGEST_ROW = 65536
"""Bytes of a row of a norm."""
WIDEST_HEAD = 256
_BLOCKS = 65535
"""The most that CUDA launches in the second dimension of a grid: there are blocks of tokens."""


def _norm_refuses(signature: Signature) -> str | None:
    x, residual = signature.argument("x"), signature.argument("residual")
    assert x is not None
    if signature.option("casting") == BEFORE_WEIGHT:
        return "flash_attn rounds once, behind the weight; casting is before_weight"
    if signature.option("offset") not in (None, 0.0, 1.0):
        return f"flash_attn adds 0 or 1 to the weight; offset is {signature.option('offset')}"
    wide = x if residual is None else residual
    if torch.promote_types(x.dtype, wide.dtype) != wide.dtype:
        return f"the residual is {wide.dtype}, x {x.dtype}; flash_attn's sum has the dtype of the residual"
    if x.shape[-1] * wide.dtype.itemsize > LARGEST_ROW:
        return f"rows of {x.shape[-1] * wide.dtype.itemsize:,} bytes; flash_attn holds {LARGEST_ROW:,}"
    return refuse_empty(signature) or refuse_large(signature)


def _rotary_refuses(signature: Signature) -> str | None:
    x, cosine = signature.argument("x"), signature.argument("cosine")
    assert x is not None
    assert cosine is not None
    if x.shape[-1] > WIDEST_HEAD:
        return f"heads are {x.shape[-1]} wide; flash_attn turns at most {WIDEST_HEAD}"
    tokens = torch.Size(cosine.shape[:-1]).numel()
    most = _BLOCKS * (8 if 2 * cosine.shape[-1] <= 128 else 4)
    if tokens > most:
        return f"{tokens:,} tokens; one launch of flash_attn turns {most:,}"
    return refuse_empty(signature) or refuse_large(signature)


def _rms_norm(
    x: Tensor, weight: Tensor, epsilon: float = 1e-6, offset: float = 0.0, casting: str = AFTER_WEIGHT
) -> Tensor:
    check_norm(x, weight, casting=casting)
    from flash_attn.ops.triton.layer_norm import rms_norm_fn

    out: Tensor = rms_norm_fn(x, weight, None, eps=epsilon, zero_centered_weight=offset == 1.0)
    return hangs_on(out, x, weight)


def _add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float = 1e-6,
    offset: float = 0.0,
    casting: str = AFTER_WEIGHT,
) -> tuple[Tensor, Tensor]:
    check_norm(x, weight, residual=residual, casting=casting)
    from flash_attn.ops.triton.layer_norm import rms_norm_fn

    # prenorm: the sum is returned too.
    out, total = rms_norm_fn(
        x,
        weight,
        None,
        residual=residual,
        eps=epsilon,
        prenorm=True,
        zero_centered_weight=offset == 1.0,
    )
    return hangs_on(out, x, residual, weight), hangs_on(total, x, residual)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    check_norm(x, weight, bias)
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    out: Tensor = layer_norm_fn(x, weight, bias, eps=epsilon)
    return hangs_on(out, x, weight, bias)


def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, epsilon: float = 1e-5
) -> tuple[Tensor, Tensor]:
    check_norm(x, weight, bias, residual=residual)
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    out, total = layer_norm_fn(x, weight, bias, residual=residual, eps=epsilon, prenorm=True)
    return hangs_on(out, x, residual, weight, bias), hangs_on(total, x, residual)


def _rotary(x: Tensor, cosine: Tensor, sine: Tensor, style: str = "half") -> Tensor:
    from drivetrain.engine.ops.rotary import check_rotary  # whose backends this is one of

    check_rotary(x, cosine, sine, style)
    from flash_attn.layers.rotary import apply_rotary_emb

    # One sequence of all tokens, as each has an angle of its own.
    tokens, half = cosine.shape[:-1].numel(), cosine.shape[-1]
    out: Tensor = apply_rotary_emb(
        x.reshape(1, tokens, *x.shape[-2:]),
        cosine.reshape(tokens, half),
        sine.reshape(tokens, half),
        interleaved=style == "interleaved",
        inplace=False,
    )
    return hangs_on(out.reshape(x.shape), x)


def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    chunk_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    check_cross_entropy(hidden, weight, labels, token_weights, chunk_rows)
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    weights = counted_weights(labels, token_weights, ignore_index, torch.float32)
    counted = weights != 0
    # All logits exist at once, as with eager: it is the loss alone that is fused. Not in place: by default it is not,
    # and the gradient would lie where the logits are.
    losses, _ = cross_entropy_loss(
        F.linear(hidden.masked_fill(~counted[:, None], 0.0), weight),
        labels.masked_fill(~counted, ignore_index),
        lse_square_scale=z_loss,
        ignore_index=ignore_index,
        inplace_backward=False,
    )
    return hangs_on((weights * losses).sum(), hidden, weight), weights.sum()


RULES: dict[str, Callable[[Signature], str | None]] = {
    "rms_norm": _norm_refuses,
    "add_rms_norm": _norm_refuses,
    "layer_norm": _norm_refuses,
    "add_layer_norm": _norm_refuses,
    "rotary": _rotary_refuses,
    "linear_cross_entropy": refuse_empty,
}
"""Why the library does not compute a call, wherever it ran; None where it does."""

_NORM_KERNELS = ("_layer_norm_fwd_1pass_kernel", "_layer_norm_bwd_kernel")
_CALLS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "rms_norm": (_rms_norm, _NORM_KERNELS),
    "add_rms_norm": (_add_rms_norm, _NORM_KERNELS),
    "layer_norm": (_layer_norm, _NORM_KERNELS),
    "add_layer_norm": (_add_layer_norm, _NORM_KERNELS),
    "rotary": (_rotary, ("rotary_kernel",)),
    "linear_cross_entropy": (_linear_cross_entropy, ("cross_entropy_fwd_kernel", "cross_entropy_bwd_kernel")),
}

_SAID = str(LIBRARY)
BACKENDS = {
    name: Backend(
        LIBRARY.name,
        call,
        served_by(LIBRARY, RULES[name], (torch.float32, *HALVES), lambda: ("cuda",)),
        library=_SAID,
        kernels=kernels,
    )
    for name, (call, kernels) in _CALLS.items()
}
