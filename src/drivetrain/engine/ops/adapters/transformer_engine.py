"""Transformer Engine (NVIDIA/TransformerEngine): kernels for CUDA. Never run by us.

Its modules hold weights of their own; ours are arguments. So the functions below its modules are called, which have no
gradients: those are ours to chain. Nothing is quantised (``quantizer`` None).

Rotary embedding is not mapped: it takes angles, and our operator is given their cosine and sine.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.engine.ops._cross_entropy_checks import IGNORE_INDEX, check_cross_entropy, counted_weights
from drivetrain.engine.ops._norm_formulas import AFTER_WEIGHT, BEFORE_WEIGHT, check_norm
from drivetrain.engine.ops.adapters.library import HALVES, Library, hangs_on, refuse_empty, served_by
from drivetrain.engine.ops.operator import Backend, refuse_dtypes
from drivetrain.engine.ops.signature import Signature

__all__ = ["BACKENDS", "LIBRARY", "RULES"]

LIBRARY = Library("transformer_engine", "transformer-engine", "2.18", oldest="2.18")


def _functions() -> Any:
    """The compiled functions; the package that is imported first loads what they are linked to."""
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch

    return transformer_engine_torch


def _their_dtype(dtype: torch.dtype) -> Any:
    from transformer_engine.pytorch.constants import TE_DType

    return TE_DType[dtype]


def _norm_refuses(signature: Signature) -> str | None:
    x = signature.argument("x")
    assert x is not None
    if signature.option("casting") == BEFORE_WEIGHT:
        return "transformer_engine rounds once, behind the weight; casting is before_weight"
    if signature.option("offset") not in (None, 0.0, 1.0):
        return f"transformer_engine adds 0 or 1 to the weight; offset is {signature.option('offset')}"
    for name, one in signature.arguments:
        if one.dtype != x.dtype:
            return f"{name} is {one.dtype}, x {x.dtype}; transformer_engine's own norms give both one dtype"
    return refuse_empty(signature)


def _glu_refuses(signature: Signature) -> str | None:
    if signature.argument("up") is not None:
        return "transformer_engine takes gate and up in one tensor; two would be copied with every call"
    if signature.option("activation") == "gelu_erf":
        return "transformer_engine's GeGLU is gelu_tanh"
    return refuse_empty(signature)


def _cross_entropy_refuses(signature: Signature) -> str | None:
    if signature.option("z_loss"):
        return "transformer_engine's loss has no z-loss"
    return refuse_dtypes(signature, torch.float32, torch.bfloat16) or refuse_empty(signature)


def _grouped_refuses(signature: Signature) -> str | None:
    weight = signature.argument("weight")
    assert weight is not None
    if not weight.contiguous:
        return "weight has gaps or another order of dimensions: it would be copied with every call"
    return refuse_empty(signature)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, adds_one: bool
    ) -> Any:
        rows = (x if residual is None else x + residual).reshape(-1, x.shape[-1]).contiguous()
        weight = weight.contiguous()
        out, _, scale = _functions().rmsnorm_fwd(
            rows, weight, epsilon, None, None, _their_dtype(x.dtype), 0, adds_one
        )
        ctx.save_for_backward(rows, weight, scale)
        ctx.adds_one = adds_one
        return out.view(x.shape) if residual is None else (out.view(x.shape), rows.view(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows, weight, scale = ctx.saved_tensors
        first, *rest = (one.reshape(rows.shape).contiguous() for one in gradients)
        if not rest:
            of_x, of_weight = _functions().rmsnorm_bwd(first, rows, scale, weight, 0, ctx.adds_one)
            return of_x.view(gradients[0].shape), None, of_weight, None, None
        # What comes in for the sum is added behind the norm's own gradient.
        of_x, of_weight = _functions().rmsnorm_bwd_add(first, rows, rest[0], scale, weight, 0, ctx.adds_one)
        of_x = of_x.view(gradients[0].shape)
        return of_x, of_x, of_weight, None, None


def _rms_norm(
    x: Tensor, weight: Tensor, epsilon: float = 1e-6, offset: float = 0.0, casting: str = AFTER_WEIGHT
) -> Tensor:
    check_norm(x, weight, casting=casting)
    out: Tensor = _RMSNorm.apply(x, None, weight, epsilon, offset == 1.0)  # type: ignore[no-untyped-call]
    return out


def _add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float = 1e-6,
    offset: float = 0.0,
    casting: str = AFTER_WEIGHT,
) -> tuple[Tensor, Tensor]:
    check_norm(x, weight, residual=residual, casting=casting)
    out, total = _RMSNorm.apply(x, residual, weight, epsilon, offset == 1.0)  # type: ignore[no-untyped-call]
    return out, total


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        rows, weight = x.reshape(-1, x.shape[-1]).contiguous(), weight.contiguous()
        out, mean, scale = _functions().layernorm_fwd(
            rows, weight, bias.contiguous(), epsilon, None, None, _their_dtype(x.dtype), 0, False
        )
        ctx.save_for_backward(rows, mean, scale, weight)
        normed: Tensor = out.view(x.shape)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, mean, scale, weight = ctx.saved_tensors
        incoming = gradient.reshape(rows.shape).contiguous()
        of_x, of_weight, of_bias = _functions().layernorm_bwd(incoming, rows, mean, scale, weight, 0, False)
        return of_x.view(gradient.shape), of_weight, of_bias, None


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    check_norm(x, weight, bias)
    # It has none without a bias.
    shift = torch.zeros_like(weight) if bias is None else bias
    out: Tensor = _LayerNorm.apply(x, weight, shift, epsilon)  # type: ignore[no-untyped-call]
    return out


class _GatedUnit(torch.autograd.Function):
    """The gate is the first half, as ours and unlike that of ``torch.nn.functional.glu``."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, activation: str) -> Tensor:
        rows = packed.reshape(-1, packed.shape[-1]).contiguous()
        ctx.save_for_backward(rows)
        ctx.activation = activation
        call = _functions().swiglu if activation == "silu" else _functions().geglu
        out: Tensor = call(rows, None).view(*packed.shape[:-1], packed.shape[-1] // 2)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        call = _functions().dswiglu if ctx.activation == "silu" else _functions().dgeglu
        incoming = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        of_packed: Tensor = call(incoming, rows, None).view(*gradient.shape[:-1], rows.shape[-1])
        return of_packed, None


def _glu(gate: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    from drivetrain.engine.ops.glu import check_glu  # whose backends this is one of

    check_glu(gate, up, activation)
    assert up is None, "refused above"
    out: Tensor = _GatedUnit.apply(gate, activation)  # type: ignore[no-untyped-call]
    return out


class _Losses(torch.autograd.Function):
    """(T,) losses of logits. Its own backward multiplies what it saved in place, and a second one would again."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        from transformer_engine.pytorch.triton.cross_entropy import cross_entropy_forward

        # No smoothing, no mean, no group of processes.
        losses, of_logits = cross_entropy_forward(logits[None], labels[None], 0.0, False, None, ignore_index)
        ctx.save_for_backward(of_logits)
        ctx.dtype = logits.dtype
        kept: Tensor = losses[0]
        return kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (of_logits,) = ctx.saved_tensors
        return (of_logits[0] * gradient[:, None]).to(ctx.dtype), None, None


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
    logits = F.linear(hidden.masked_fill(~counted[:, None], 0.0), weight)
    losses = _Losses.apply(logits, labels.masked_fill(~counted, ignore_index), ignore_index)  # type: ignore[no-untyped-call]
    return hangs_on((weights * losses).sum(), hidden, weight), weights.sum()


class _GroupedProduct(torch.autograd.Function):
    """Its layouts, as it reads ``A`` and ``B`` by columns: TN is B A^T, NN is B A, NT is B^T A."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        return _of_rows(x, weight, sizes, "NN", weight.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

        x, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_x = _of_rows(gradient, weight, ctx.sizes, "TN", weight.shape[1])
        # Zeros: experts without rows are left out by some versions.
        of_weight = torch.zeros_like(weight)
        general_grouped_gemm(
            list(gradient.split(ctx.sizes)),
            list(x.split(ctx.sizes)),
            list(of_weight.unbind()),
            [None] * len(ctx.sizes),
            x.dtype,
            layout="NT",
            m_splits=ctx.sizes,
        )
        return of_x, of_weight, None


def _of_rows(rows: Tensor, weight: Tensor, sizes: list[int], layout: str, width: int) -> Tensor:
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

    out = rows.new_empty(rows.shape[0], width)
    general_grouped_gemm(
        list(weight.unbind()),
        list(rows.split(sizes)),
        [out],
        [None] * len(sizes),
        rows.dtype,
        layout=layout,
        m_splits=sizes,
        single_output=True,
    )
    return out


# The host reads how many rows each expert has: traced, they would be constants of a graph.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    from drivetrain.engine.ops.grouped_product import check_grouped_product  # whose backends this is one of

    check_grouped_product(x, weight, ends)
    borders = [0, *ends.tolist()]
    sizes = [last - first for first, last in pairwise(borders)]
    past = x.new_zeros(x.shape[0] - borders[-1], weight.shape[2])
    if borders[-1] == 0:
        # Nobody has a row: a product of none, for the gradients' sake, which are zero.
        return torch.cat((x[:0] @ weight[0], past))
    out = _GroupedProduct.apply(x[: borders[-1]], weight, sizes)  # type: ignore[no-untyped-call]
    return torch.cat((out, past))


RULES: dict[str, Callable[[Signature], str | None]] = {
    "rms_norm": _norm_refuses,
    "add_rms_norm": _norm_refuses,
    "layer_norm": _norm_refuses,
    "glu": _glu_refuses,
    "linear_cross_entropy": _cross_entropy_refuses,
    "grouped_product": _grouped_refuses,
}
"""Why the library does not compute a call, wherever it ran; None where it does."""

_CALLS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "rms_norm": (_rms_norm, ("rmsnorm_fwd", "rmsnorm_bwd")),
    "add_rms_norm": (_add_rms_norm, ("rmsnorm_fwd", "rmsnorm_bwd")),
    "layer_norm": (_layer_norm, ("ln_fwd", "ln_bwd")),
    "glu": (_glu, ("gated_act_kernel", "dgated_act_kernel")),
    "linear_cross_entropy": (_linear_cross_entropy, ("online_softmax_kernel", "cross_entropy_kernel")),
    # cuBLAS, which other products use too: by no kernel of its own.
    "grouped_product": (_grouped_product, ()),
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
