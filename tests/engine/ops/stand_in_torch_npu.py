"""Stand-in for torch_npu: signatures of ``op_plugin_functions.yaml`` at op-plugin 517f2e7.

Functions that ``derivatives.yaml`` has no formula for give constants.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stand_in import gradients, install, rms_normed, turned
from torch import Tensor

__all__ = ["MODULES", "stand_in_for_torch_npu"]

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALVES)


def _constant(call: Callable[..., Any]) -> Callable[..., Any]:
    """Without a formula for its gradient."""

    @wraps(call)
    def called(*given: Any, **named: Any) -> Any:
        with torch.no_grad():
            return call(*given, **named)

    return called


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    assert 2 <= self.dim() <= 8
    assert self.numel()
    assert gamma.shape == self.shape[-1:]
    assert self.dtype in DTYPES
    assert gamma.dtype in (self.dtype, torch.float32)
    scale = torch.rsqrt(self.float().square().mean(-1, keepdim=True) + epsilon)
    return rms_normed(self.float(), gamma.float(), epsilon).to(self.dtype), scale.detach()


@_constant
def npu_rms_norm_backward(dy: Tensor, self: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    assert dy.shape == self.shape
    assert dy.is_contiguous()
    assert rstd.dtype == torch.float32
    assert rstd.numel() * self.shape[-1] == self.numel()
    scale = rstd.reshape(*self.shape[:-1], 1)
    epsilon = (scale.double() ** -2 - self.double().square().mean(-1, keepdim=True)).float()
    of_x, of_gamma = gradients(
        lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * w,
        (self, gamma.float()),
        (dy,),
    )
    return of_x, of_gamma


@_constant
def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06
) -> tuple[Tensor, Tensor, Tensor]:
    assert x1.shape == x2.shape
    assert x1.numel()
    assert x1.dtype == x2.dtype == gamma.dtype
    assert x1.dtype in DTYPES
    total = (x1.float() + x2.float()).to(x1.dtype)
    scale = torch.rsqrt(total.float().square().mean(-1, keepdim=True) + epsilon)
    return (total.float() * scale * gamma.float()).to(x1.dtype), scale, total


def npu_add_layer_norm(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float = 1e-05,
    additional_output: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert x1.shape == x2.shape
    assert x1.dtype == x2.dtype == gamma.dtype == beta.dtype
    total = (x1.float() + x2.float()).to(x1.dtype)
    out = F.layer_norm(total.float(), gamma.shape, gamma.float(), beta.float(), epsilon).to(x1.dtype)
    nothing = x1.new_zeros(1)
    return out, nothing, nothing, total if additional_output else nothing


def npu_rotary_mul(
    self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    assert self.dim() == 3
    tokens, heads, width = self.shape
    assert r1.shape == r2.shape == (tokens, 1, width)
    assert self.dtype == r1.dtype == r2.dtype
    assert width < 896
    assert width % 2 == 0
    assert heads < 1000
    assert rotary_mode in ("half", "interleave")
    assert rotate is None
    assert not r1.requires_grad
    if rotary_mode == "half":
        assert torch.equal(r1[..., : width // 2], r1[..., width // 2 :])
        cosine, sine = r1[..., : width // 2], r2[..., : width // 2]
    else:
        assert torch.equal(r1[..., ::2], r1[..., 1::2])
        cosine, sine = r1[..., ::2], r2[..., ::2]
    return turned(self.float(), cosine.float(), sine.float(), rotary_mode == "interleave").to(self.dtype)


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    assert self.is_contiguous()
    assert self.numel()
    gate, up = self.float().chunk(2, dim=dim)
    return (F.silu(gate) * up).to(self.dtype)


def npu_geglu(
    self: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[Tensor, Tensor]:
    assert self.is_contiguous()
    first, second = self.float().chunk(2, dim=dim)
    gate, up = (first, second) if activate_left else (second, first)
    gelu = F.gelu(gate, approximate="tanh" if approximate else "none")
    return (gelu * up).to(self.dtype), gelu.detach().to(self.dtype)


@_constant
def npu_fused_linear_online_max_sum(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    return_logits: bool = False,
) -> tuple[Tensor, ...]:
    assert input.dtype == weight.dtype
    assert input.dtype in HALVES
    assert input.is_contiguous()
    assert weight.is_contiguous()
    assert weight.shape[1] <= 65534
    assert vocab_start_index == 0
    assert vocab_end_index == weight.shape[0] - 1
    assert target.shape == input.shape[:1]
    assert ((target >= 0) & (target <= vocab_end_index)).all()
    logits = (input @ weight.t()).float()
    largest = logits.amax(-1)
    less = logits - largest[:, None]
    of_label = less.gather(1, target[:, None])[:, 0]
    outside = torch.zeros((len(target) + 7) // 8, dtype=torch.uint8)
    return largest, less.exp().sum(-1), of_label, outside, target.clone(), logits.new_empty(0)


@_constant
def npu_fused_cross_entropy_loss_with_max_sum(
    logits_max: Tensor,
    sum_exp_logits: Tensor,
    predicted_logits: Tensor,
    *,
    label_smoothing: float = 0.0,
    input: Tensor | None = None,
    weight: Tensor | None = None,
    vocab_parallel_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert logits_max.shape == sum_exp_logits.shape == predicted_logits.shape
    assert logits_max.dtype == sum_exp_logits.dtype == predicted_logits.dtype == torch.float32
    return sum_exp_logits.log() - predicted_logits, logits_max.new_empty(0)


@_constant
def npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    target_mask: Tensor,
    masked_target: Tensor,
    label_smoothing: float = 0.0,
    logits_max: Tensor | None = None,
    sum_exp_logits: Tensor | None = None,
    softmax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert grad.dtype == torch.float32
    assert grad.shape == input.shape[:1]
    assert grad.is_contiguous()
    assert weight.shape[0] >= 128
    assert target_mask.dtype == torch.uint8
    assert len(target_mask) * 8 >= len(grad)
    assert softmax is None
    assert logits_max is not None
    assert sum_exp_logits is not None
    shares = ((input @ weight.t()).float() - logits_max[:, None]).exp() / sum_exp_logits[:, None]
    shares[torch.arange(len(grad)), masked_target] -= 1.0
    of_logits = shares * grad[:, None]
    return (of_logits @ weight.float()).to(input.dtype), (of_logits.t() @ input.float()).to(weight.dtype)


@_constant
def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: Any = None,
    scale: Any = None,
    offset: Any = None,
    antiquant_scale: Any = None,
    antiquant_offset: Any = None,
    per_token_scale: Any = None,
    group_list: Tensor | None = None,
    activation_input: Any = None,
    activation_quant_scale: Any = None,
    activation_quant_offset: Any = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    act_type: int = 0,
    tuning_config: list[int] | None = None,
    output_dtype: Any = None,
) -> list[Tensor]:
    (left,), (right,) = x, weight
    assert split_item in (2, 3)
    assert group_list_type == 0
    assert group_list is not None
    assert group_list.dtype == torch.int64
    ends = group_list.tolist()
    assert ends == sorted(ends)
    assert left.numel()
    if group_type == 0:
        assert left.is_contiguous(), "x may not be transposed"
        assert right.dim() == 3
        assert len(ends) == len(right)
        assert ends[-1] == len(left)
        parts = zip([0, *ends], ends, right, strict=False)
        return [torch.cat([left[first:last] @ of_group for first, last, of_group in parts])]
    assert group_type == 2
    assert left.t().is_contiguous()
    assert right.is_contiguous()
    assert ends[-1] == left.shape[1] == right.shape[0]
    # A group without rows is left as memory was found.
    found = left.new_full((len(ends), left.shape[0], right.shape[1]), float("nan"))
    for group, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        if last > first:
            found[group] = left[:, first:last] @ right[first:last]
    return [found]


MODULES: dict[str, dict[str, Any]] = {
    "torch_npu": {
        one.__name__: one
        for one in (
            npu_rms_norm,
            npu_rms_norm_backward,
            npu_add_rms_norm,
            npu_add_layer_norm,
            npu_rotary_mul,
            npu_swiglu,
            npu_geglu,
            npu_fused_linear_online_max_sum,
            npu_fused_cross_entropy_loss_with_max_sum,
            npu_fused_linear_cross_entropy_loss_with_max_sum_backward,
            npu_grouped_matmul,
        )
    },
}
"""What the library has, by module."""


def stand_in_for_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import it as the library."""
    install(monkeypatch, MODULES)
