"""Stand-in for Liger-Kernel 0.8.5."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stand_in import gradients, install, rms_normed, turned
from torch import Tensor

__all__ = ["MODULES", "stand_in_for_liger"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST = 65536


def _rows(x: Tensor) -> Tensor:
    assert x.dtype in DTYPES
    assert x.is_contiguous()
    assert x.numel()
    assert x.shape[-1] <= WIDEST
    return x.view(-1, x.shape[-1])


def _normed(x: Tensor, weight: Tensor, epsilon: float, offset: float, casting_mode: str) -> Tensor:
    assert type(epsilon) is float
    assert type(offset) is float
    assert casting_mode in ("llama", "gemma", "none")
    assert weight.shape == x.shape[-1:]
    assert casting_mode != "none", "sums in the dtype of x"
    if casting_mode == "gemma":
        return rms_normed(x.float(), weight.float() + offset, epsilon).to(x.dtype)
    before = rms_normed(x.float(), torch.ones_like(weight, dtype=torch.float32), epsilon).to(x.dtype)
    return (before * (weight.float() + offset)).to(x.dtype)


class LigerRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        X: Tensor,
        W: Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> Tensor:
        X, W = X.contiguous(), W.contiguous()
        ctx.save_for_backward(X, W)
        ctx.options = eps, offset
        ctx.in_place = in_place
        return _normed(_rows(X), W, eps, offset, casting_mode).view(X.shape)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> Any:
        X, W = ctx.saved_tensors
        eps, offset = ctx.options
        dY = dY.contiguous()
        of_x, of_weight = gradients(lambda x, w: rms_normed(x, w + offset, eps), (X, W), (dY,))
        if ctx.in_place:
            of_x = dY.copy_(of_x)
        return of_x, of_weight, None, None, None, None, None


class LigerFusedAddRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        X: Tensor,
        R: Tensor,
        W: Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = False,
    ) -> Any:
        X, R, W = X.contiguous(), R.contiguous(), W.contiguous()
        assert X.shape == R.shape
        # Its sum is allocated in the dtype of X.
        total = (_rows(X).float() + _rows(R).float()).to(X.dtype)
        ctx.save_for_backward(total, W)
        ctx.options = eps, offset
        ctx.in_place = in_place
        return _normed(total, W, eps, offset, casting_mode).view(X.shape), total.view(X.shape)

    @staticmethod
    def backward(ctx: Any, dY: Tensor, dS_out: Tensor) -> Any:
        total, W = ctx.saved_tensors
        eps, offset = ctx.options
        dY, dS_out = dY.contiguous(), dS_out.contiguous()
        of_total, of_weight = gradients(
            lambda s, w: (rms_normed(s, w + offset, eps), s),
            (total, W),
            (dY.view(total.shape), dS_out.view(total.shape)),
        )
        of_total = of_total.view(dY.shape)
        if ctx.in_place:
            of_total = dY.copy_(of_total)
        return of_total, of_total, of_weight, None, None, None, None, None


class LigerLayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
        assert type(eps) is float
        X, W, B = X.contiguous(), W.contiguous(), B.contiguous()
        ctx.save_for_backward(X, W, B)
        ctx.eps = eps
        return F.layer_norm(_rows(X).float(), W.shape, W.float(), B.float(), eps).to(X.dtype).view(X.shape)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> Any:
        X, W, B = ctx.saved_tensors
        return *gradients(lambda x, w, b: F.layer_norm(x, w.shape, w, b, ctx.eps), (X, W, B), (dY,)), None


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int | None, sign: float) -> Any:
    """Writes into q and k where their memory has tokens before heads."""
    results = []
    for x in (q, k):
        assert x.dim() == 4
        x = x.transpose(1, 2)
        batch, tokens, _heads, width = x.shape
        assert cos.dim() == sin.dim() == 3
        assert cos.shape[0] in (1, batch)
        assert cos.shape[1] == tokens
        turns = min(cos.shape[-1], width) if rotary_dim is None else rotary_dim
        assert turns % 2 == 0
        assert 0 < turns <= width
        assert cos.shape[-1] >= turns // 2
        x = x.contiguous()
        # It computes in the dtype of the angles.
        half = cos[..., : turns // 2].unsqueeze(-2), sign * sin[..., : turns // 2].unsqueeze(-2)
        x.copy_(turned(x.to(sin.dtype), *half, interleaved=False))
        results.append(x.transpose(1, 2))
    return results


def rope_forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> Any:
    return (*_rope(q, k, cos, sin, rotary_dim, 1.0), cos, sin)


def rope_backward(
    dq: Tensor,
    dk: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> Any:
    return tuple(_rope(dq, dk, cos, sin, rotary_dim, -1.0))


def _gated(activate: Callable[[Tensor], Tensor], a: Tensor, b: Tensor) -> Any:
    assert a.shape == b.shape
    return _rows(a), _rows(b), (activate(a.float()) * b.float()).to(a.dtype)


def _gated_backward(activate: Callable[[Tensor], Tensor], a: Tensor, b: Tensor, dc: Tensor) -> Any:
    """Over its arguments."""
    assert dc.is_contiguous()
    of_a, of_b = gradients(lambda a, b: activate(a) * b, (a, b), (dc.view(a.shape),))
    return a.copy_(of_a).view(dc.shape), b.copy_(of_b).view(dc.shape)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def swiglu_forward(a: Tensor, b: Tensor, gate_multiplier: float = 1.0) -> Any:
    return _gated(F.silu, a, b)


def swiglu_backward(a: Tensor, b: Tensor, dc: Tensor, gate_multiplier: float = 1.0) -> Any:
    return _gated_backward(F.silu, a, b, dc)


def geglu_forward(a: Tensor, b: Tensor) -> Any:
    return _gated(_gelu, a, b)


def geglu_backward(a: Tensor, b: Tensor, dc: Tensor) -> Any:
    return _gated_backward(_gelu, a, b, dc)


class LigerFusedGateUpSiLUMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, in_place: bool = False) -> Tensor:
        y = y.contiguous()
        # Its gradient has the two dimensions of what it saved.
        ctx.save_for_backward(_rows(y))
        ctx.in_place = in_place
        gate, up = y.chunk(2, dim=-1)
        return (F.silu(gate.float()) * up.float()).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> Any:
        (y,) = ctx.saved_tensors

        def formula(packed: Tensor) -> Tensor:
            gate, up = packed.chunk(2, dim=-1)
            return F.silu(gate) * up

        (of_y,) = gradients(formula, (y,), (dc.reshape(y.shape[0], -1),))
        return (y.copy_(of_y) if ctx.in_place else of_y), None


def fused_linear_cross_entropy_forward(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    ce_weight: Tensor | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    ce_impl: str | None = None,
    ce_mode: str | None = None,
    token_grad_output: Tensor | None = None,
    compute_gradients: bool | None = None,
    weight_requires_grad: bool | None = None,
    chunk_mem_const: int = 1,
) -> Any:
    assert _input.dtype == weight.dtype
    assert _input.dtype in DTYPES
    assert target.dtype == torch.int64
    tokens = _input.shape[0]
    assert tokens, "divides by the number of tokens"
    assert reduction == "none"
    makes = _input.requires_grad if compute_gradients is None else compute_gradients
    makes_weight = weight.requires_grad if weight_requires_grad is None else weight_requires_grad
    counted = target != ignore_index
    # Every row is multiplied, an ignored one as well.
    logits = (_input @ weight.t()).float()
    normaliser = logits.logsumexp(-1)
    safe = target.masked_fill(~counted, 0)
    losses = normaliser - logits.gather(1, safe[:, None])[:, 0] + lse_square_scale * normaliser.square()
    losses = losses.masked_fill(~counted, 0.0)
    if not makes:
        return losses, None, None, None, torch.zeros_like(_input), None, None
    of_logits = logits.softmax(-1) * (1.0 + 2.0 * lse_square_scale * normaliser)[:, None]
    of_logits[torch.arange(tokens), safe] -= 1.0
    of_logits = of_logits.masked_fill(~counted[:, None], 0.0).to(_input.dtype)
    if token_grad_output is not None:
        assert token_grad_output.shape == (tokens,)
        of_logits = of_logits * token_grad_output[:, None].to(of_logits.dtype)
    of_weight = None
    if makes_weight:
        assert accum_dtype == torch.float32, "sums over chunks in the dtype of the weight"
        of_weight = (of_logits.float().t() @ _input.float()).to(weight.dtype)
    return losses, None, None, None, of_logits @ weight, of_weight, None


MODULES: dict[str, dict[str, Any]] = {
    "liger_kernel": {},
    "liger_kernel.ops": {},
    "liger_kernel.ops.rms_norm": {"LigerRMSNormFunction": LigerRMSNormFunction},
    "liger_kernel.ops.fused_add_rms_norm": {"LigerFusedAddRMSNormFunction": LigerFusedAddRMSNormFunction},
    "liger_kernel.ops.layer_norm": {"LigerLayerNormFunction": LigerLayerNormFunction},
    "liger_kernel.ops.rope": {"rope_forward": rope_forward, "rope_backward": rope_backward},
    "liger_kernel.ops.geglu": {"geglu_forward": geglu_forward, "geglu_backward": geglu_backward},
    "liger_kernel.ops.swiglu": {
        "swiglu_forward": swiglu_forward,
        "swiglu_backward": swiglu_backward,
        "LigerFusedGateUpSiLUMulFunction": LigerFusedGateUpSiLUMulFunction,
    },
    "liger_kernel.ops.fused_linear_cross_entropy": {
        "fused_linear_cross_entropy_forward": fused_linear_cross_entropy_forward
    },
}
"""What the library has, by module."""


def stand_in_for_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import it as the library."""
    install(monkeypatch, MODULES)
