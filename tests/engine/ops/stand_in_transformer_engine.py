"""Stand-in for Transformer Engine 2.18.

Its compiled functions take positions, not names, and know nothing of gradients.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stand_in import gradients, install, rms_normed
from torch import Tensor

__all__ = ["MODULES", "stand_in_for_transformer_engine"]

TE_DType = {torch.float32: "kFloat32", torch.float16: "kFloat16", torch.bfloat16: "kBFloat16"}


def _check_norm(x: Tensor, weight: Tensor, otype: str, sm_margin: int, zero_centered_gamma: bool) -> None:
    assert x.dim() == 2
    assert x.numel()
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert weight.shape == x.shape[1:]
    assert weight.dtype == x.dtype
    assert otype == TE_DType[x.dtype]
    assert sm_margin == 0
    assert type(zero_centered_gamma) is bool


def _rms(x: Tensor, weight: Tensor, epsilon: float, zero_centered: bool) -> Tensor:
    return rms_normed(x, weight + 1.0 if zero_centered else weight, epsilon)


def _no_gradients(*tensors: Tensor) -> None:
    assert not (torch.is_grad_enabled() and any(one.requires_grad for one in tensors))


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: str,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    _no_gradients(input, weight)
    _check_norm(input, weight, otype, sm_margin, zero_centered_gamma)
    assert ln_out is None
    assert quantizer is None
    scale = torch.rsqrt(input.float().square().mean(-1) + eps)
    wide = weight.float() + (1.0 if zero_centered_gamma else 0.0)
    return [(input.float() * scale[:, None] * wide).to(input.dtype), None, scale]


def _rmsnorm_gradients(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, zero_centered: bool
) -> tuple[Tensor, ...]:
    assert dz.shape == x.shape
    assert rsigma.shape == x.shape[:1]
    assert rsigma.dtype == torch.float32
    # What was added to the mean square, from what it became.
    epsilon = (rsigma.double() ** -2 - x.double().square().mean(-1)).float()[:, None]
    return gradients(
        lambda x, w: (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * (w + 1.0 if zero_centered else w)
        ),
        (x, gamma),
        (dz,),
    )


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    _check_norm(x, gamma, TE_DType[x.dtype], sm_margin, zero_centered_gamma)
    return list(_rmsnorm_gradients(dz, x, rsigma, gamma, zero_centered_gamma))


def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    assert add.shape == x.shape
    assert add.dtype == x.dtype
    _check_norm(x, gamma, TE_DType[x.dtype], sm_margin, zero_centered_gamma)
    of_x, of_gamma = _rmsnorm_gradients(dz, x, rsigma, gamma, zero_centered_gamma)
    return [of_x + add, of_gamma]


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: str,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    _no_gradients(input, weight, bias)
    _check_norm(input, weight, otype, sm_margin, zero_centered_gamma)
    assert bias.is_contiguous()
    assert bias.dtype == weight.dtype
    assert not zero_centered_gamma
    wide = input.float()
    mean = wide.mean(-1)
    scale = torch.rsqrt(wide.var(-1, unbiased=False) + eps)
    out = (wide - mean[:, None]) * scale[:, None] * weight.float() + bias.float()
    return [out.to(input.dtype), mean, scale]


def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    _check_norm(x, gamma, TE_DType[x.dtype], sm_margin, zero_centered_gamma)
    assert mu.shape == rsigma.shape == x.shape[:1]
    torch.testing.assert_close(mu, x.float().mean(-1), rtol=1e-4, atol=1e-4)
    centred = x.double() - x.double().mean(-1, keepdim=True)
    epsilon = (rsigma.double() ** -2 - centred.square().mean(-1)).float()[:, None]

    def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + epsilon) * weight + bias

    return list(gradients(formula, (x, gamma, torch.zeros_like(gamma)), (dz,)))


def _activated(name: str, x: Tensor) -> Tensor:
    """The gate is the first half."""
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate) if name == "swiglu" else F.gelu(gate, approximate="tanh")) * up


def _glu(name: str, input: Tensor, quantizer: Any) -> Tensor:
    _no_gradients(input)
    assert quantizer is None
    assert input.is_contiguous()
    assert input.dim() == 2
    assert input.numel()
    return _activated(name, input.float()).to(input.dtype)


def _dglu(name: str, grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Tensor:
    assert quantizer is None
    assert grad.is_contiguous()
    assert fwd_input.is_contiguous()
    assert grad.shape == (fwd_input.shape[0], fwd_input.shape[1] // 2)
    return gradients(lambda x: _activated(name, x), (fwd_input,), (grad,))[0]


def swiglu(input: Tensor, quantizer: Any) -> Tensor:
    return _glu("swiglu", input, quantizer)


def geglu(input: Tensor, quantizer: Any) -> Tensor:
    return _glu("geglu", input, quantizer)


def dswiglu(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Tensor:
    return _dglu("swiglu", grad, fwd_input, quantizer)


def dgeglu(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Tensor:
    return _dglu("geglu", grad, fwd_input, quantizer)


def cross_entropy_forward(
    _input: Tensor,
    target: Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    dist_process_group: Any,
    ignore_idx: int,
) -> tuple[Tensor, Tensor]:
    sequences, tokens, words = _input.shape
    assert target.numel() == sequences * tokens
    assert target.dtype == torch.int64
    assert label_smoothing == 0.0
    assert reduce_loss is False
    assert dist_process_group is None
    counted = (target != ignore_idx).flatten()
    logits = _input.reshape(-1, words).float()
    safe = target.flatten().masked_fill(~counted, 0)
    losses = F.cross_entropy(logits, safe, reduction="none").masked_fill(~counted, 0.0)
    of_logits = logits.softmax(-1)
    of_logits[torch.arange(len(safe)), safe] -= 1.0
    of_logits = of_logits.masked_fill(~counted[:, None], 0.0)
    return losses.view(sequences, tokens), of_logits.view(_input.shape)


def general_grouped_gemm(
    A: list[Tensor],
    B: list[Tensor],
    out: list[Tensor],
    quantization_params: list[Any],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: list[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: list[Tensor] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: Any = None,
    single_output: bool = False,
) -> Any:
    assert len(A) == len(B) == len(quantization_params)
    assert set(quantization_params) == {None}
    assert out_dtype == out[0].dtype == A[0].dtype == B[0].dtype
    assert all(one.is_contiguous() for one in (*A, *B, *out))
    assert m_splits is not None
    products = []
    for a, b in zip(A, B, strict=True):
        left = b.t() if layout[1] == "T" else b
        right = a.t() if layout[0] == "T" else a
        products.append(left @ right)
    if single_output:
        assert [len(one) for one in B] == m_splits
        (whole,) = out
        assert len(whole) == sum(m_splits)
        out = list(whole.split(m_splits))
    for place, product in zip(out, products, strict=True):
        assert place.shape == product.shape
        place.copy_(product)
    return out


MODULES: dict[str, dict[str, Any]] = {
    "transformer_engine": {},
    "transformer_engine.pytorch": {},
    "transformer_engine.pytorch.constants": {"TE_DType": TE_DType},
    "transformer_engine.pytorch.cpp_extensions": {"general_grouped_gemm": general_grouped_gemm},
    "transformer_engine.pytorch.triton": {},
    "transformer_engine.pytorch.triton.cross_entropy": {"cross_entropy_forward": cross_entropy_forward},
    "transformer_engine_torch": {
        one.__name__: one
        for one in (
            rmsnorm_fwd,
            rmsnorm_bwd,
            rmsnorm_bwd_add,
            layernorm_fwd,
            layernorm_bwd,
            swiglu,
            geglu,
            dswiglu,
            dgeglu,
        )
    },
}
"""What the library has, by module."""


def stand_in_for_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import it as the library."""
    install(monkeypatch, MODULES)
