"""The Triton norms as operators of torch: what they allocate and launch, their shapes without data, their gradients."""

from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.ops._norm_formulas import AFTER_WEIGHT, BEFORE_WEIGHT, check_norm
from drivetrain.engine.ops._triton_available import next_power_of_two, triton_refuses
from drivetrain.engine.ops.signature import Signature

__all__ = ["LARGEST_SIZE", "NORM_KERNELS", "triton_norm", "triton_norm_refuses"]

LARGEST_SIZE = 32768
"""Features of a row: a program keeps a whole one in registers."""
NORM_KERNELS = ("norm_forward", "norm_backward")
_TILE = 2048
"""Elements of a program's block where rows are short: norms of queries and keys have rows of 64 to 128."""
_MOST_ROWS = 16
_MOST_PROGRAMS = 256
"""Of backward, each with a partial sum of the weight's gradient; by the rows alone, so that every device adds alike."""


def triton_norm_refuses(signature: Signature) -> str | None:
    """Why the kernels cannot serve a call; None where they can."""
    refused = triton_refuses(signature)
    weight = signature.argument("weight")
    if refused is None and weight is not None and weight.shape[-1] > LARGEST_SIZE:
        refused = f"rows of {weight.shape[-1]:,} features; a program holds {LARGEST_SIZE:,}"
    return refused


def _block(size: int) -> tuple[int, int, int]:
    """Rows and features of a program's block, and its warps."""
    features = next_power_of_two(size)
    rows = max(1, min(_MOST_ROWS, _TILE // features))
    return rows, features, max(4, min(32, rows * features // 512))


@torch.library.custom_op("drivetrain::norm_forward", mutates_args=())
def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    offset: float,
    rounds_first: bool,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from drivetrain.engine.ops._triton_norm import norm_forward

    x = x.contiguous()
    out, total, mean, scale = _empty(x, residual, centred)
    rows, size = x.shape
    block_rows, block, warps = _block(size)
    if x.numel():
        with torch.cuda.device_of(x):
            norm_forward[(-(-rows // block_rows),)](
                x,
                None if residual is None else residual.contiguous(),
                weight.contiguous(),
                None if bias is None else bias.contiguous(),
                out,
                total,
                mean,
                scale,
                rows,
                size,
                EPSILON=epsilon,
                OFFSET=offset,
                ROUNDS_FIRST=rounds_first,
                CENTRED=centred,
                HAS_RESIDUAL=residual is not None,
                HAS_BIAS=bias is not None,
                ROWS=block_rows,
                BLOCK=block,
                num_warps=warps,
            )
    return out, total, mean, scale


@_forward.register_fake
def _(x: Tensor, residual: Tensor | None, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty(x, residual, centred=options[-1])


def _empty(x: Tensor, residual: Tensor | None, centred: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm; the sum, empty without a residual; mean, empty where none is taken off, and scale of each row."""
    rows = x.shape[0]
    total_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    return (
        x.new_empty(x.shape),
        x.new_empty(x.shape if residual is not None else (0,), dtype=total_dtype),
        x.new_empty(rows if centred else 0, dtype=torch.float32),
        x.new_empty(rows, dtype=torch.float32),
    )


@torch.library.custom_op("drivetrain::norm_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    gradient_of_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    has_bias: bool,
    mean: Tensor,
    scale: Tensor,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from drivetrain.engine.ops._triton_norm import norm_backward

    total = total.contiguous()
    rows, size = total.shape
    block_rows, block, warps = _block(size)
    blocks = -(-rows // block_rows)
    blocks_per_program = max(1, -(-blocks // _MOST_PROGRAMS))
    programs = -(-blocks // blocks_per_program)
    of_total = torch.empty_like(total)
    of_weight = total.new_empty((programs, size), dtype=torch.float32)
    of_bias = total.new_empty((programs if has_bias else 0, size), dtype=torch.float32)
    if total.numel():
        with torch.cuda.device_of(total):
            norm_backward[(programs,)](
                gradient.contiguous(),
                None if gradient_of_total is None else gradient_of_total.contiguous(),
                total,
                weight.contiguous(),
                mean,
                scale,
                of_total,
                of_weight,
                of_bias,
                rows,
                size,
                blocks_per_program,
                OFFSET=offset,
                CENTRED=mean.numel() > 0,
                HAS_GRADIENT_OF_TOTAL=gradient_of_total is not None,
                HAS_BIAS=has_bias,
                ROWS=block_rows,
                BLOCK=block,
                num_warps=warps,
            )
    return of_total, of_weight.sum(0), of_bias.sum(0)


@_backward.register_fake
def _(_gradient: Tensor, _of_total: Tensor | None, total: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    sums = total.new_empty(total.shape[1], dtype=torch.float32)
    return total.new_empty(total.shape), sums, torch.empty_like(sums)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, _epsilon, offset, _rounds_first, _centred = inputs
    _out, total, mean, scale = output
    ctx.save_for_backward(x if residual is None else total, weight, mean, scale)
    ctx.offset = offset
    ctx.dtypes = tuple(None if one is None else one.dtype for one in (x, residual, bias))


def _gradients(
    ctx: Any, gradient: Tensor, gradient_of_total: Tensor, *_: Tensor
) -> tuple[Tensor | None, ...]:
    kept, weight, mean, scale = ctx.saved_tensors
    dtype, residual_dtype, bias_dtype = ctx.dtypes
    of_total, of_weight, of_bias = _backward(
        gradient,
        None if residual_dtype is None else gradient_of_total,
        kept,
        weight,
        bias_dtype is not None,
        mean,
        scale,
        ctx.offset,
    )
    return (
        of_total.to(dtype),
        None if residual_dtype is None else of_total.to(residual_dtype),
        of_weight.to(weight.dtype),
        None if bias_dtype is None else of_bias.to(bias_dtype),
        *(None,) * 4,
    )


_forward.register_autograd(_gradients, setup_context=_keep)


def triton_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    offset: float = 0.0,
    casting: str = AFTER_WEIGHT,
    *,
    centred: bool,
) -> tuple[Tensor, ...]:
    """Any norm by our Triton kernels; arguments and outputs as of ``compiled_norm``."""
    check_norm(x, weight, bias, residual=residual, casting=casting)
    out, total, _mean, _scale = _forward(
        x.reshape(-1, x.shape[-1]),
        None if residual is None else residual.reshape(-1, x.shape[-1]),
        weight,
        bias,
        epsilon,
        offset,
        casting == BEFORE_WEIGHT,
        centred,
    )
    return (out.view(x.shape),) if residual is None else (out.view(x.shape), total.view(x.shape))
