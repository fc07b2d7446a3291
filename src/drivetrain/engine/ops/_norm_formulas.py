"""The formulas of all norms, forward and backward: what Inductor compiles, and what the Triton kernels repeat.

Legend: T rows, D features of each. A norm has up to four parts: a residual that is added first, a mean that is taken
off (LayerNorm), a weight with an offset (Gemma's ``1 + w``), and a bias.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.engine.ops._compiled import compiled, sum_of_rows
from drivetrain.errors import DrivetrainError

__all__ = ["AFTER_WEIGHT", "BEFORE_WEIGHT", "check_norm", "compiled_norm", "wide_dtype"]

AFTER_WEIGHT = "after_weight"
"""The product with the weight is fp32, and is rounded once: Gemma's way, and torch's."""
BEFORE_WEIGHT = "before_weight"
"""The normalised values are rounded to the dtype of x, and the product again: the way of the Llama code in
transformers."""


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums over features: at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def check_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    casting: str = AFTER_WEIGHT,
) -> None:
    """Refuse what would read or write beside its tensors.

    Raises:
        DrivetrainError: weight or bias do not have the features of x, the residual is of another shape, or there is no
            such casting.
    """
    if residual is not None and residual.shape != x.shape:
        raise DrivetrainError(f"the residual has the shape {tuple(residual.shape)}, x {tuple(x.shape)}")
    for name, one in (("weight", weight), ("bias", bias)):
        if one is not None and one.shape != x.shape[-1:]:
            raise DrivetrainError(
                f"{name} has the shape {tuple(one.shape)}; x of {tuple(x.shape)} needs {tuple(x.shape[-1:])}"
            )
    if casting not in (AFTER_WEIGHT, BEFORE_WEIGHT):
        raise DrivetrainError(f"casting is {casting!r}; there are {AFTER_WEIGHT} and {BEFORE_WEIGHT}")


def _forward_formula(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor | None,
    epsilon: float,
    offset: float,
    casting: str,
    centred: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    total_TD = None if residual_TD is None else x_TD + residual_TD
    values_TD = x_TD if total_TD is None else total_TD
    wide = wide_dtype(values_TD)
    values_TD = values_TD.to(wide)
    mean_T1 = None
    if centred:
        mean_T1 = values_TD.mean(-1, keepdim=True)
        values_TD = values_TD - mean_T1
    scale_T1 = torch.rsqrt(values_TD.square().mean(-1, keepdim=True) + epsilon)
    normed_TD = values_TD * scale_T1
    if casting == BEFORE_WEIGHT:
        normed_TD = normed_TD.to(x_TD.dtype).to(wide)
    out_TD = normed_TD * (weight_D.to(wide) + offset)
    if bias_D is not None:
        out_TD = out_TD + bias_D.to(wide)
    return out_TD.to(x_TD.dtype), total_TD, mean_T1, scale_T1


def _backward_formula(
    gradient_TD: Tensor,
    gradient_of_total_TD: Tensor | None,
    total_TD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None,
    mean_T1: Tensor | None,
    scale_T1: Tensor,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    wide = scale_T1.dtype
    values_TD = total_TD.to(wide)
    if mean_T1 is not None:
        values_TD = values_TD - mean_T1
    normed_TD = values_TD * scale_T1
    gradient_TD = gradient_TD.to(wide)
    of_normed_TD = gradient_TD * (weight_D.to(wide) + offset)
    inner_TD = of_normed_TD - normed_TD * (of_normed_TD * normed_TD).mean(-1, keepdim=True)
    if mean_T1 is not None:
        inner_TD = inner_TD - of_normed_TD.mean(-1, keepdim=True)
    of_total_TD = inner_TD * scale_T1
    if gradient_of_total_TD is not None:
        of_total_TD = of_total_TD + gradient_of_total_TD.to(wide)
    of_weight_D = sum_of_rows(gradient_TD * normed_TD).to(weight_D.dtype)
    of_bias_D = None if bias_D is None else sum_of_rows(gradient_TD).to(bias_D.dtype)
    return of_total_TD.to(total_TD.dtype), of_weight_D, of_bias_D


_forward = compiled(_forward_formula)
_backward = compiled(_backward_formula)


class _CompiledNorm(torch.autograd.Function):
    """Keeps what is normalised, the weight and one or two numbers of each row; nothing of the width of a row
    besides."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        weight_D: Tensor,
        bias_D: Tensor | None,
        epsilon: float,
        offset: float,
        casting: str,
        centred: bool,
    ) -> Any:
        out_TD, total_TD, mean_T1, scale_T1 = _forward(
            x_TD, residual_TD, weight_D, bias_D, epsilon, offset, casting, centred
        )
        kept_TD = x_TD if total_TD is None else total_TD
        ctx.save_for_backward(kept_TD, weight_D, bias_D, mean_T1, scale_T1)
        ctx.offset = offset
        ctx.dtypes = (x_TD.dtype, None if residual_TD is None else residual_TD.dtype)
        return out_TD if total_TD is None else (out_TD, total_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient_TD, gradient_of_total_TD = gradients if len(gradients) == 2 else (gradients[0], None)
        kept_TD, weight_D, bias_D, mean_T1, scale_T1 = ctx.saved_tensors
        of_total_TD, of_weight_D, of_bias_D = _backward(
            gradient_TD, gradient_of_total_TD, kept_TD, weight_D, bias_D, mean_T1, scale_T1, ctx.offset
        )
        dtype, residual_dtype = ctx.dtypes
        of_residual_TD = None if residual_dtype is None else of_total_TD.to(residual_dtype)
        return of_total_TD.to(dtype), of_residual_TD, of_weight_D, of_bias_D, None, None, None, None


def compiled_norm(
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
    """Any norm by Inductor.

    Args:
        x, residual: (..., D).
        weight, bias: (D,).
        epsilon, offset, casting: as of ``rms_norm``.
        centred: take the mean off, as LayerNorm does.

    Returns:
        The norm, (..., D) in the dtype of x; with a residual the sum, too.
    """
    check_norm(x, weight, bias, residual=residual, casting=casting)
    x_TD = x.reshape(-1, x.shape[-1])
    residual_TD = None if residual is None else residual.reshape(-1, residual.shape[-1])
    found = _CompiledNorm.apply(x_TD, residual_TD, weight, bias, epsilon, offset, casting, centred)  # type: ignore[no-untyped-call]
    outputs: tuple[Tensor, ...] = found if isinstance(found, tuple) else (found,)
    return tuple(output.view(x.shape) for output in outputs)
