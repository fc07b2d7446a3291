"""Ascend's operators in ``torch_npu`` (github.com/Ascend/op-plugin). Never run by us.

Which of them have a gradient is in op-plugin's ``derivatives.yaml``: not ``npu_add_rms_norm``, ``npu_grouped_matmul``
and the fused loss, which are chained here to the functions of their gradients. LayerNorm without a residual is not
mapped: eager is torch's own there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.engine.ops._cross_entropy_checks import IGNORE_INDEX, check_cross_entropy, counted_weights
from drivetrain.engine.ops._norm_formulas import AFTER_WEIGHT, BEFORE_WEIGHT, check_norm
from drivetrain.engine.ops.adapters.library import HALVES, Library, hangs_on, refuse_empty, served_by
from drivetrain.engine.ops.operator import Backend
from drivetrain.engine.ops.signature import Signature

__all__ = ["BACKENDS", "LIBRARY", "RULES"]

LIBRARY = Library("npu", "torch-npu", "op-plugin 517f2e7 (2026-08-21)")
WIDEST_HEAD = 896
MOST_HEADS = 1000
INNER_LIMIT = 65536
"""Elements of the last dimension of a grouped product's operands: below this."""
MOST_EXPERTS = 1024
LEAST_WORDS = 128
MOST_FEATURES = 65534


def _functions() -> Any:
    import torch_npu

    return torch_npu


def _rms_norm_refuses(signature: Signature) -> str | None:
    x, weight = signature.argument("x"), signature.argument("weight")
    assert x is not None
    assert weight is not None
    if signature.option("casting") == BEFORE_WEIGHT:
        return "npu_rms_norm rounds once, behind the weight; casting is before_weight"
    if weight.dtype not in (x.dtype, torch.float32):
        return f"weight is {weight.dtype}, x {x.dtype}; npu_rms_norm takes a weight of that dtype or of fp32"
    return refuse_empty(signature)


def _add_norm_refuses(signature: Signature) -> str | None:
    x = signature.argument("x")
    assert x is not None
    if signature.option("casting") == BEFORE_WEIGHT:
        return "npu_add_rms_norm rounds once, behind the weight; casting is before_weight"
    for name, one in signature.arguments:
        if one.dtype != x.dtype:
            return f"{name} is {one.dtype}, x {x.dtype}; Ascend's norms of a sum take one dtype for all"
    if signature.option("offset") not in (None, 0.0) and x.dtype != torch.float32:
        return f"the weight of npu_add_rms_norm is {x.dtype}, in which weight + offset loses digits of the weight"
    return refuse_empty(signature)


def _rotary_refuses(signature: Signature) -> str | None:
    x = signature.argument("x")
    assert x is not None
    heads, width = x.shape[-2:]
    if width >= WIDEST_HEAD or width % 2:
        return f"heads are {width} wide; npu_rotary_mul turns an even number below {WIDEST_HEAD}"
    if heads >= MOST_HEADS:
        return f"{heads} heads; npu_rotary_mul turns fewer than {MOST_HEADS:,}"
    return refuse_empty(signature)


def _glu_refuses(signature: Signature) -> str | None:
    if signature.argument("up") is not None:
        return "Ascend's gated units take gate and up in one tensor; two would be copied with every call"
    return refuse_empty(signature)


def _cross_entropy_refuses(signature: Signature) -> str | None:
    weight = signature.argument("weight")
    assert weight is not None
    words, features = weight.shape
    if weight.dtype not in HALVES:
        return f"weight is {weight.dtype}; Ascend's fused loss takes fp16 and bf16"
    if signature.option("z_loss"):
        return "Ascend's fused loss has no z-loss"
    if signature.option("chunk_rows"):
        return "Ascend's fused loss sizes its blocks itself: chunk_rows has to be 0"
    if words < LEAST_WORDS:
        return f"{words} words; the gradient of Ascend's fused loss needs {LEAST_WORDS}"
    if features > MOST_FEATURES:
        return f"{features:,} features; Ascend's fused loss takes {MOST_FEATURES:,}"
    return refuse_empty(signature)


def _grouped_refuses(signature: Signature) -> str | None:
    weight = signature.argument("weight")
    assert weight is not None
    experts, features, outputs = weight.shape
    if max(features, outputs) >= INNER_LIMIT:
        return f"rows of {max(features, outputs):,} elements; npu_grouped_matmul takes fewer than {INNER_LIMIT:,}"
    if experts > MOST_EXPERTS:
        return f"{experts:,} experts; npu_grouped_matmul takes {MOST_EXPERTS:,}"
    return refuse_empty(signature)


def _rms_norm(
    x: Tensor, weight: Tensor, epsilon: float = 1e-6, offset: float = 0.0, casting: str = AFTER_WEIGHT
) -> Tensor:
    check_norm(x, weight, casting=casting)
    # A weight in fp32 is taken beside a 16-bit x: in 16 bits 1 + w would round the weight away.
    scale = weight if offset == 0.0 else weight.to(torch.float32) + offset
    out: Tensor = _functions().npu_rms_norm(x.reshape(-1, x.shape[-1]), scale, epsilon=epsilon)[0]
    return hangs_on(out.view(x.shape), x, weight)


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Any:
        rows, others = (one.reshape(-1, one.shape[-1]) for one in (x, residual))
        out, scale, total = _functions().npu_add_rms_norm(rows, others, weight, epsilon=epsilon)
        ctx.save_for_backward(total, weight, scale)
        return out.view(x.shape), total.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, gradient_of_total: Tensor) -> Any:
        total, weight, scale = ctx.saved_tensors
        incoming = gradient.reshape(total.shape).contiguous()
        through, of_weight = _functions().npu_rms_norm_backward(incoming, total, weight, scale)
        of_total = through.view(gradient.shape) + gradient_of_total
        return of_total, of_total, of_weight.to(weight.dtype), None


def _add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float = 1e-6,
    offset: float = 0.0,
    casting: str = AFTER_WEIGHT,
) -> tuple[Tensor, Tensor]:
    check_norm(x, weight, residual=residual, casting=casting)
    scale = weight if offset == 0.0 else weight + offset
    out, total = _AddRMSNorm.apply(x, residual, scale, epsilon)  # type: ignore[no-untyped-call]
    return out, total


def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, epsilon: float = 1e-5
) -> tuple[Tensor, Tensor]:
    check_norm(x, weight, bias, residual=residual)
    rows, others = (one.reshape(-1, one.shape[-1]) for one in (x, residual))
    # It has none without a bias; the sum is returned where it is asked for.
    shift = torch.zeros_like(weight) if bias is None else bias
    out, _, _, total = _functions().npu_add_layer_norm(
        rows, others, weight, shift, epsilon=epsilon, additional_output=True
    )
    return (
        hangs_on(out.view(x.shape), x, residual, weight, bias),
        hangs_on(total.view(x.shape), x, residual),
    )


def _rotary(x: Tensor, cosine: Tensor, sine: Tensor, style: str = "half") -> Tensor:
    from drivetrain.engine.ops.rotary import check_rotary  # whose backends this is one of

    check_rotary(x, cosine, sine, style)
    tokens, half = cosine.shape[:-1].numel(), cosine.shape[-1]
    heads, width = x.shape[-2:]
    rows = x.reshape(tokens, heads, width)
    turned, rest = rows.split((2 * half, width - 2 * half), dim=-1)

    def wide(angles: Tensor) -> Tensor:
        """(T, 1, R): one number for each feature, in the dtype of x."""
        flat = angles.detach().reshape(tokens, 1, half).to(x.dtype)
        return torch.cat((flat, flat), dim=-1) if style == "half" else flat.repeat_interleave(2, dim=-1)

    mode = "half" if style == "half" else "interleave"
    out: Tensor = _functions().npu_rotary_mul(turned.contiguous(), wide(cosine), wide(sine), rotary_mode=mode)
    return hangs_on((torch.cat((out, rest), dim=-1) if rest.shape[-1] else out).view(x.shape), x)


def _glu(gate: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    from drivetrain.engine.ops.glu import check_glu  # whose backends this is one of

    check_glu(gate, up, activation)
    assert up is None, "refused above"
    packed = gate.contiguous()
    out: Tensor
    if activation == "silu":
        # The gate is the first half, as ours.
        out = _functions().npu_swiglu(packed, dim=-1)
    else:
        # By default it is the second.
        approximate = 1 if activation == "gelu_tanh" else 0
        out = _functions().npu_geglu(packed, dim=-1, approximate=approximate, activate_left=True)[0]
    return hangs_on(out, gate)


class _Losses(torch.autograd.Function):
    """(T,) losses in fp32. The logits are made again in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        largest, sums, of_label, outside, labels, _ = _functions().npu_fused_linear_online_max_sum(
            hidden, weight, labels, 0, weight.shape[0] - 1, return_logits=False
        )
        losses: Tensor = _functions().npu_fused_cross_entropy_loss_with_max_sum(largest, sums, of_label)[0]
        ctx.save_for_backward(hidden, weight, outside, labels, largest, sums)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight, outside, labels, largest, sums = ctx.saved_tensors
        of_hidden, of_weight = _functions().npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
            gradient.contiguous(), hidden, weight, outside, labels, logits_max=largest, sum_exp_logits=sums
        )
        return of_hidden.to(hidden.dtype), of_weight.to(weight.dtype), None


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
    assert not z_loss, "refused above"
    weights = counted_weights(labels, token_weights, ignore_index, torch.float32)
    counted = weights != 0
    # It ignores no label: those tokens get a loss of word 0, and a weight of 0 takes it and its gradient away.
    losses = _Losses.apply(  # type: ignore[no-untyped-call]
        hidden.masked_fill(~counted[:, None], 0.0).contiguous(),
        weight.contiguous(),
        labels.masked_fill(~counted, 0),
    )
    return (weights * losses).sum(), weights.sum()


class _GroupedProduct(torch.autograd.Function):
    """``group_type`` 0 cuts the rows of ``x`` by the ends in ``group_list``, 2 the sum over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _grouped(x.contiguous(), weight.contiguous(), ends, group_type=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_x = _grouped(gradient, weight.contiguous().transpose(1, 2), ends, group_type=0)
        of_weight = _grouped(x.contiguous().t(), gradient, ends, group_type=2)
        # Whether an expert without rows is written at all is not documented.
        empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        return of_x, torch.where(empty[:, None, None], of_weight.new_zeros(()), of_weight), None


def _grouped(left: Tensor, right: Tensor, ends: Tensor, *, group_type: int) -> Tensor:
    found: list[Tensor] = _functions().npu_grouped_matmul(
        [left], [right], group_list=ends, split_item=3, group_type=group_type, group_list_type=0
    )
    return found[0]


def _grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    from drivetrain.engine.ops.grouped_product import check_grouped_product, keep_rows

    check_grouped_product(x, weight, ends)
    held = (torch.arange(x.shape[0], device=x.device) < ends[-1])[:, None]
    # Its last end has to be the number of rows. Those that nobody has are zeros of the last expert: no host is asked,
    # and neither the result nor a gradient changes.
    borders = ends.to(torch.int64)
    borders[-1] = x.shape[0]
    out = _GroupedProduct.apply(keep_rows(x, held), weight, borders)  # type: ignore[no-untyped-call]
    return keep_rows(out, held)


RULES: dict[str, Callable[[Signature], str | None]] = {
    "rms_norm": _rms_norm_refuses,
    "add_rms_norm": _add_norm_refuses,
    "add_layer_norm": _add_norm_refuses,
    "rotary": _rotary_refuses,
    "glu": _glu_refuses,
    "linear_cross_entropy": _cross_entropy_refuses,
    "grouped_product": _grouped_refuses,
}
"""Why the library does not compute a call, wherever it ran; None where it does."""

_CALLS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "rms_norm": (_rms_norm, ("RmsNorm",)),
    "add_rms_norm": (_add_rms_norm, ("AddRmsNorm", "RmsNormGrad")),
    "add_layer_norm": (_add_layer_norm, ("AddLayerNorm",)),
    "rotary": (_rotary, ("RotaryMul", "RotaryPositionEmbedding")),
    "glu": (_glu, ("SwiGlu", "GeGlu")),
    "linear_cross_entropy": (_linear_cross_entropy, ("FusedLinearOnlineMaxSum", "FusedCrossEntropyLoss")),
    "grouped_product": (_grouped_product, ("GroupedMatmul",)),
}

_SAID = str(LIBRARY)
BACKENDS = {
    name: Backend(
        LIBRARY.name,
        call,
        served_by(LIBRARY, RULES[name], (torch.float32, *HALVES), lambda: ("npu",)),
        library=_SAID,
        kernels=kernels,
    )
    for name, (call, kernels) in _CALLS.items()
}
