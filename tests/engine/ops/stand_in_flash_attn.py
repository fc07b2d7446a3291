"""Stand-in for flash-attn 2.8.3, the operators beside attention."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stand_in import gradients, install, rms_normed, turned
from torch import Tensor

__all__ = ["MODULES", "stand_in_for_flash_attn"]


def _norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    prenorm: bool,
    zero_centered_weight: bool,
    is_rms_norm: bool,
) -> Any:
    assert x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert x.numel()
    assert type(eps) is float
    assert type(zero_centered_weight) is bool
    assert weight.shape == x.shape[-1:]
    wide = x if residual is None else residual
    assert x.shape[-1] * wide.element_size() <= 65536
    total = x.float()
    if residual is not None:
        assert residual.shape == x.shape
        # Backward reads the sum as it was stored.
        total = (total + residual.float()).to(residual.dtype).float()
    scale = weight.float() + (1.0 if zero_centered_weight else 0.0)
    if is_rms_norm:
        normed = rms_normed(total, scale, eps)
        normed = normed if bias is None else normed + bias.float()
    else:
        normed = F.layer_norm(total, weight.shape, scale, None if bias is None else bias.float(), eps)
    out = normed.to(x.dtype)
    return (out, total.to(wide.dtype)) if prenorm else out


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    return _norm(x, weight, bias, residual, eps, prenorm, zero_centered_weight, is_rms_norm)


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    return _norm(x, weight, bias, residual, eps, prenorm, zero_centered_weight, True)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    assert cu_seqlens is None
    assert isinstance(seqlen_offsets, int)
    _batch, tokens, _heads, width = x.shape
    available, half = cos.shape
    assert sin.shape == cos.shape
    assert 2 * half <= width <= 256
    assert seqlen_offsets + tokens <= available
    assert x.numel()
    angles = (one[:tokens, None, :].float() for one in (cos, sin))
    out = turned(x.float(), *angles, interleaved=interleaved).to(x.dtype)
    return x.copy_(out) if inplace else out


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, lse_square_scale: float, ignore_index: int, inplace: bool
    ) -> Any:
        ctx.save_for_backward(logits, labels)
        ctx.options = lse_square_scale, ignore_index, inplace
        losses, z_losses = _losses(logits.float(), labels, lse_square_scale, ignore_index)
        ctx.mark_non_differentiable(z_losses)
        return losses, z_losses

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor, grad_z_losses: Tensor) -> Any:
        logits, labels = ctx.saved_tensors
        scale, ignore_index, inplace = ctx.options
        (found,) = gradients(
            lambda one: _losses(one, labels, scale, ignore_index)[0], (logits,), (grad_losses,)
        )
        return (logits.copy_(found) if inplace else found), None, None, None, None


def _losses(logits: Tensor, labels: Tensor, scale: float, ignore_index: int) -> tuple[Tensor, Tensor]:
    counted = labels != ignore_index
    normaliser = logits.logsumexp(-1)
    of_label = logits.gather(1, labels.masked_fill(~counted, 0)[:, None])[:, 0]
    z_losses = (scale * normaliser.square()).masked_fill(~counted, 0.0)
    return (normaliser - of_label).masked_fill(~counted, 0.0) + z_losses, z_losses


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    tokens, _words = logits.shape
    assert labels.shape == (tokens,)
    assert labels.dtype == torch.int64
    assert precomputed_lse is None
    found: tuple[Tensor, Tensor] = _Loss.apply(  # type: ignore[no-untyped-call]
        logits, labels, lse_square_scale, ignore_index, inplace_backward
    )
    return found


MODULES: dict[str, dict[str, Any]] = {
    "flash_attn": {},
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": {"apply_rotary_emb": apply_rotary_emb},
    "flash_attn.ops": {},
    "flash_attn.ops.triton": {},
    "flash_attn.ops.triton.layer_norm": {"layer_norm_fn": layer_norm_fn, "rms_norm_fn": rms_norm_fn},
    "flash_attn.ops.triton.cross_entropy": {"cross_entropy_loss": cross_entropy_loss},
}
"""What the library has, by module."""


def stand_in_for_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import it as the library."""
    install(monkeypatch, MODULES)
