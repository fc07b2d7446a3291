"""Bias, dropout and residual in one: ``y = residual + kept(seed) * (x + bias) / (1 - p)``.

The mask is a function of the seed and an element's number, not of a generator's state: backward, activations computed
again, and every backend on every device have the same one, and none need be kept. On a CPU, compiled code gains
nothing over torch's operators.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.engine.ops._compiled import compiled, inductor_refuses, sum_of_rows
from drivetrain.engine.ops._dropout_mask import STEPS, kept_elements, threshold_of
from drivetrain.engine.ops.operator import Backend, Case, Operator, serves_all
from drivetrain.errors import DrivetrainError

__all__ = ["OPERATOR", "bias_dropout_add"]


def bias_dropout_add(
    x: Tensor, residual: Tensor, seed: Tensor, bias: Tensor | None = None, probability: float = 0.1
) -> Tensor:
    """The reference.

    Args:
        x, residual: (..., D), floating point.
        seed: one int64 on the device of x; the same seed drops the same elements.
        bias: (D,).
        probability: that an element of x + bias is dropped, taken to the nearest multiple of 1 / 65,536.

    Returns:
        (..., D) in the wider dtype of x and residual, rounded once.

    Raises:
        DrivetrainError: shapes or seed do not fit, or the probability is none.
    """
    check_bias_dropout_add(x, residual, seed, bias)
    threshold = threshold_of(probability)
    return _formula(x, residual, bias, kept_elements(x.shape, seed, threshold), threshold)


def check_bias_dropout_add(x: Tensor, residual: Tensor, seed: Tensor, bias: Tensor | None) -> None:
    """Refuse what does not belong together.

    Raises:
        DrivetrainError: shapes or seed do not fit.
    """
    if residual.shape != x.shape or (bias is not None and bias.shape != x.shape[-1:]):
        shapes = [None if one is None else tuple(one.shape) for one in (x, residual, bias)]
        raise DrivetrainError("x, residual and bias have the shapes {}, {} and {}".format(*shapes))
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise DrivetrainError(f"the seed is {seed.dtype} {tuple(seed.shape)}; it is to be one int64")


def _formula(x: Tensor, residual: Tensor, bias: Tensor | None, kept: Tensor, threshold: int) -> Tensor:
    dtype = torch.promote_types(x.dtype, residual.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    values = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    # where, not a product: what is dropped may be infinite.
    return (residual.to(wide) + torch.where(kept, values * _scale(threshold), 0.0)).to(dtype)


def _scale(threshold: int) -> float:
    return STEPS / (STEPS - threshold)


def _eager(
    x: Tensor, residual: Tensor, seed: Tensor, bias: Tensor | None = None, probability: float = 0.1
) -> Tensor:
    check_bias_dropout_add(x, residual, seed, bias)
    threshold = threshold_of(probability)
    values = x if bias is None else x + bias
    if threshold:
        values = torch.where(kept_elements(x.shape, seed, threshold), values, 0.0)
    return torch.add(residual, values, alpha=_scale(threshold))


def _backward_formula(
    gradient_TD: Tensor, kept_TD: Tensor, threshold: int, dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    wide = torch.promote_types(gradient_TD.dtype, torch.float32)
    of_x_TD = torch.where(kept_TD, gradient_TD.to(wide) * _scale(threshold), 0.0)
    return of_x_TD.to(dtype), None if bias_dtype is None else sum_of_rows(of_x_TD).to(bias_dtype)


_compiled_forward = compiled(_formula)
_compiled_backward = compiled(_backward_formula)


class _CompiledDropout(torch.autograd.Function):
    """Keeps the seed and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, residual_TD: Tensor, bias_D: Tensor | None, seed: Tensor, threshold: int
    ) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.threshold = threshold
        ctx.dtypes = (x_TD.dtype, residual_TD.dtype, None if bias_D is None else bias_D.dtype)
        return _compiled_forward(
            x_TD, residual_TD, bias_D, kept_elements(x_TD.shape, seed, threshold), threshold
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TD: Tensor) -> Any:
        (seed,) = ctx.saved_tensors
        dtype, residual_dtype, bias_dtype = ctx.dtypes
        kept_TD = kept_elements(gradient_TD.shape, seed, ctx.threshold)
        of_x_TD, of_bias_D = _compiled_backward(gradient_TD, kept_TD, ctx.threshold, dtype, bias_dtype)
        return of_x_TD, gradient_TD.to(residual_dtype), of_bias_D, None, None


def _inductor(
    x: Tensor, residual: Tensor, seed: Tensor, bias: Tensor | None = None, probability: float = 0.1
) -> Tensor:
    check_bias_dropout_add(x, residual, seed, bias)
    x_TD, residual_TD = x.reshape(-1, x.shape[-1]), residual.reshape(-1, x.shape[-1])
    out: Tensor = _CompiledDropout.apply(x_TD, residual_TD, bias, seed, threshold_of(probability))  # type: ignore[no-untyped-call]
    return out.view(x.shape)


def _cases() -> list[Case]:
    def case(
        name: str,
        shape: tuple[int, ...],
        probability: float = 0.3,
        *,
        with_bias: bool = True,
        transposed: bool = False,
    ) -> Case:
        def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
            x = torch.randn(shape, generator=generator).to(dtype)
            residual = torch.randn(shape, generator=generator).to(dtype)
            if transposed:
                x, residual = (one.mT.contiguous().mT for one in (x, residual))
            given = {"x": x.requires_grad_(), "residual": residual.requires_grad_()}
            if with_bias:
                given["bias"] = torch.randn(shape[-1:], generator=generator).to(dtype).requires_grad_()
            seed = torch.randint(1 << 62, (1,), generator=generator)
            return {**given, "seed": seed, "probability": probability}

        return Case(name, make)

    return [
        case("odd sizes", (3, 5, 37)),
        case("no bias", (6, 33), with_bias=False),
        case("nothing dropped", (6, 33), 0.0),
        case("nearly all dropped", (40, 33), 0.95),
        case("one row", (1, 24)),
        case("one feature", (24, 1)),
        case("one dimension", (41,)),
        case("no rows", (0, 8)),
        case("many rows", (1037, 24)),
        case("columns first in memory", (12, 65), transposed=True),
    ]


OPERATOR = Operator(
    name="bias_dropout_add",
    equation="y = residual + kept(seed) * (x + bias) / (1 - probability)",
    source="Srivastava et al., JMLR 15 (2014); the mask: Steele, Lea and Flood, OOPSLA 2014",
    reference=bias_dropout_add,
    cases=_cases,
    backends=(
        Backend("eager", _eager, serves_all, ran_on=("cpu",), kernels=("aten::where", "aten::add")),
        Backend(
            "inductor",
            _inductor,
            inductor_refuses,
            ran_on=("cpu",),
            kernels=("_formula", "_backward_formula"),
        ),
    ),
)
