"""Liger-Kernel (LinkedIn, github.com/linkedin/Liger-Kernel): Triton kernels for CUDA. Never run by us on a device.

Its modules are imported one by one: ``liger_kernel.ops`` itself replaces its functions by other implementations, as a
variable of the environment says.

Several of its backward passes write over what they were given or have saved: over the incoming gradient (rotary),
saved inputs (gated units), saved gradients (the loss). Those are called here through functions of our own, on copies.
"""

import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.engine.ops._cross_entropy_checks import IGNORE_INDEX, check_cross_entropy, counted_weights
from drivetrain.engine.ops._norm_formulas import AFTER_WEIGHT, check_norm
from drivetrain.engine.ops.adapters.library import HALVES, Library, hangs_on, refuse_empty, served_by
from drivetrain.engine.ops.operator import Backend
from drivetrain.engine.ops.signature import Signature

__all__ = ["BACKENDS", "LIBRARY", "RULES"]

LIBRARY = Library("liger", "liger-kernel", "0.8.5", oldest="0.8.5")
WIDEST = 65536
"""Features of a row: a program holds a whole one."""


def _norm_refuses(signature: Signature) -> str | None:
    x, residual = signature.argument("x"), signature.argument("residual")
    assert x is not None
    if x.shape[-1] > WIDEST:
        return f"rows of {x.shape[-1]:,} features; liger holds {WIDEST:,}"
    if residual is not None and residual.dtype != x.dtype:
        return f"the residual is {residual.dtype}; liger's sum has the dtype of x, {x.dtype}"
    return refuse_empty(signature)


def _rotary_refuses(signature: Signature) -> str | None:
    if signature.option("style") == "interleaved":
        return "liger turns i with i + R/2 alone; the style is interleaved"
    return refuse_empty(signature)


def _glu_refuses(signature: Signature) -> str | None:
    if signature.option("activation") == "gelu_erf":
        return "liger's GeGLU is gelu_tanh"
    gate = signature.argument("gate")
    assert gate is not None
    if gate.shape[-1] > WIDEST:
        return f"rows of {gate.shape[-1]:,} features; liger holds {WIDEST:,}"
    return refuse_empty(signature)


def _cross_entropy_refuses(signature: Signature) -> str | None:
    if signature.option("chunk_rows"):
        return "liger sizes its chunks itself: chunk_rows has to be 0"
    return refuse_empty(signature)


def _casting(casting: str) -> str:
    """``gemma`` rounds once, behind the weight; ``llama`` before and behind it. Both take sums in fp32."""
    return "gemma" if casting == AFTER_WEIGHT else "llama"


def _rms_norm(
    x: Tensor, weight: Tensor, epsilon: float = 1e-6, offset: float = 0.0, casting: str = AFTER_WEIGHT
) -> Tensor:
    check_norm(x, weight, casting=casting)
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # Not in place: by default the gradient of x is written over the incoming one (Liger-Kernel 370, 376).
    out: Tensor = LigerRMSNormFunction.apply(x, weight, epsilon, offset, _casting(casting), False)
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
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    out, total = LigerFusedAddRMSNormFunction.apply(
        x, residual, weight, epsilon, offset, _casting(casting), False
    )
    return hangs_on(out, x, residual, weight), hangs_on(total, x, residual)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    check_norm(x, weight, bias)
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    # It has none without a bias.
    shift = torch.zeros_like(weight) if bias is None else bias
    out: Tensor = LigerLayerNormFunction.apply(x, weight, shift, epsilon)
    return hangs_on(out, x, weight, bias)


class _Rotation(torch.autograd.Function):
    """Liger turns queries and keys in place, and incoming gradients too: both on copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        from liger_kernel.ops.rope import rope_forward

        ctx.save_for_backward(cosine, sine)
        return _turned(rope_forward, x, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        from liger_kernel.ops.rope import rope_backward

        return _turned(rope_backward, gradient, *ctx.saved_tensors), None, None


def _turned(turn: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    tokens, half = cosine.shape[:-1].numel(), cosine.shape[-1]
    heads, width = x.shape[-2:]
    copy = torch.empty((1, tokens, heads, width), dtype=x.dtype, device=x.device)
    copy.copy_(x.reshape(copy.shape))
    # It turns two tensors with one launch; the second is a head that nobody reads.
    nobody = torch.empty((1, tokens, 1, width), dtype=x.dtype, device=x.device)
    # Heads before tokens by shape, tokens before heads in memory. It computes in the dtype of the angles, and is told
    # the width that is turned, as they are not there twice.
    angles = (one.reshape(1, tokens, half).to(torch.float32) for one in (cosine, sine))
    turned: Tensor = turn(copy.transpose(1, 2), nobody.transpose(1, 2), *angles, rotary_dim=2 * half)[0]
    return turned.transpose(1, 2).reshape(x.shape)


def _rotary(x: Tensor, cosine: Tensor, sine: Tensor, style: str = "half") -> Tensor:
    from drivetrain.engine.ops.rotary import check_rotary  # whose backends this is one of

    check_rotary(x, cosine, sine, style)
    out: Tensor = _Rotation.apply(x, cosine, sine)  # type: ignore[no-untyped-call]
    return out


class _GatedUnit(torch.autograd.Function):
    """Gate and up in two tensors. Liger writes both gradients over what it saved: here over copies."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        from liger_kernel.ops.geglu import geglu_forward
        from liger_kernel.ops.swiglu import swiglu_forward

        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        out: Tensor = (swiglu_forward if activation == "silu" else geglu_forward)(gate, up)[2]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        from liger_kernel.ops.geglu import geglu_backward
        from liger_kernel.ops.swiglu import swiglu_backward

        gate, up = ctx.saved_tensors
        call = swiglu_backward if ctx.activation == "silu" else geglu_backward
        of_gate, of_up = call(gate.clone(), up.clone(), gradient.contiguous())
        return of_gate, of_up, None


def _glu(gate: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    from drivetrain.engine.ops.glu import check_glu  # whose backends this is one of

    check_glu(gate, up, activation)
    if up is None and activation == "silu":
        from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

        # Gate in the first half, as ours; not in place. Its gradient has two dimensions whatever it was given.
        rows: Tensor = LigerFusedGateUpSiLUMulFunction.apply(gate.reshape(-1, gate.shape[-1]), False)
        return hangs_on(rows.view(*gate.shape[:-1], gate.shape[-1] // 2), gate)
    first, second = gate.chunk(2, dim=-1) if up is None else (gate, up)
    out: Tensor = _GatedUnit.apply(first, second, activation)  # type: ignore[no-untyped-call]
    return out


class _Loss(torch.autograd.Function):
    """The sum of all tokens' losses, each times its weight.

    Gradients are made in forward, and multiplied out of place: Liger's own backward multiplies what it saved, and a
    second one would do so twice. Weights of tokens go in before gradients are summed over tokens, where they are last
    told apart.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        token_weights: Tensor | None,
        ignore_index: int,
        z_loss: float,
    ) -> Tensor:
        from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

        losses, _, _, _, of_hidden, of_weight, _ = fused_linear_cross_entropy_forward(
            _input=hidden,
            weight=weight,
            target=labels,
            ignore_index=ignore_index,
            lse_square_scale=z_loss,
            reduction="none",
            accum_dtype=torch.float32,
            token_grad_output=token_weights,
            # By itself it looks at hidden alone, and would leave the weight without a gradient.
            compute_gradients=any(ctx.needs_input_grad[:2]),
            weight_requires_grad=ctx.needs_input_grad[1],
        )
        ctx.save_for_backward(of_hidden, of_weight)
        total: Tensor = losses.sum() if token_weights is None else (losses * token_weights).sum()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_hidden, of_weight = ctx.saved_tensors
        return (
            of_hidden * gradient if ctx.needs_input_grad[0] else None,
            of_weight * gradient if ctx.needs_input_grad[1] else None,
            *(None,) * 4,
        )


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
    weights = counted_weights(labels, token_weights, ignore_index, torch.float32)
    counted = weights != 0
    # What an ignored token holds meets the weight's gradient in a product with 0, which not-a-number survives.
    total: Tensor = _Loss.apply(  # type: ignore[no-untyped-call]
        hidden.masked_fill(~counted[:, None], 0.0),
        weight,
        labels.masked_fill(~counted, ignore_index),
        None if token_weights is None else weights,
        ignore_index,
        z_loss,
    )
    return total, weights.sum()


def _devices() -> tuple[str, ...]:
    """In tests Triton's interpreter runs its kernels on a CPU."""
    return ("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)


RULES = {
    "rms_norm": _norm_refuses,
    "add_rms_norm": _norm_refuses,
    "layer_norm": _norm_refuses,
    "rotary": _rotary_refuses,
    "glu": _glu_refuses,
    "linear_cross_entropy": _cross_entropy_refuses,
}
"""Why the library does not compute a call, wherever it ran; None where it does."""

_CALLS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "rms_norm": (_rms_norm, ("_rms_norm_forward_kernel", "_rms_norm_backward_kernel")),
    "add_rms_norm": (_add_rms_norm, ("_fused_add_rms_norm",)),
    "layer_norm": (_layer_norm, ("_layer_norm_forward_kernel", "_layer_norm_backward_kernel")),
    "rotary": (_rotary, ("_triton_rope",)),
    "glu": (_glu, ("_swiglu_", "_geglu_")),
    "linear_cross_entropy": (_linear_cross_entropy, ("liger_cross_entropy_kernel",)),
}

_SAID = str(LIBRARY)
BACKENDS = {
    name: Backend(
        LIBRARY.name,
        call,
        served_by(LIBRARY, RULES[name], (torch.float32, *HALVES), _devices),
        library=_SAID,
        kernels=kernels,
    )
    for name, (call, kernels) in _CALLS.items()
}
