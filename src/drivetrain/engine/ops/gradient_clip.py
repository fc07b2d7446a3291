"""Clipping by the global norm: all gradients are scaled by one factor, so that together their norm has a bound.

Pascanu, Mikolov & Bengio, arXiv:1211.5063. :func:`total_norm`, :func:`clip_coefficient` and :func:`scale_gradients` are
what a step of training calls, in place; the operator is their composition with new tensors, so that it can be graded.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drivetrain.engine.ops._compiled import compiled, inductor_refuses
from drivetrain.engine.ops._gradient_clip_cases import gradient_clip_cases
from drivetrain.engine.ops._tensor_lists import check_lists
from drivetrain.engine.ops._triton_available import triton_refuses
from drivetrain.engine.ops._triton_norm_of_list_calls import SQUARES_KERNELS, triton_sums_of_squares
from drivetrain.engine.ops.operator import FLOOR, Backend, Operator, serves_all
from drivetrain.engine.ops.signature import Signature
from drivetrain.errors import DrivetrainError

__all__ = ["OPERATOR", "clip_coefficient", "gradient_clip", "scale_gradients", "total_norm"]

_ROW = 2048
"""Elements whose squares are added in fp32 before the sum goes on in fp64."""
_FLOOR = {**FLOOR, torch.float32: 2e-6}
"""Equal elements are the worst for a sum by rows: all its rounding goes one way, and it is off by 1.9e-6 (measured over
3,000 values). The sums of whole tensors that this is to tell apart are off by 1e-5 and more."""


def gradient_clip(gradients: Sequence[Tensor], max_norm: float) -> tuple[Tensor, ...]:
    """The reference.

    A norm that is not finite leaves the gradients as they are: scaled by zero or by not-a-number they would no longer
    tell which parameter the bad value came from. That of finite gradients may be infinite too: the reference adds in
    fp64, and of fp32 or 16 bits a backend may add squares in fp32, which a single one leaves above 1.8e19.

    Args:
        gradients: N tensors of any shapes, floating point, all in one dtype.
        max_norm: at least 0; 0 means that the norm is only measured.

    Returns:
        N new tensors in the dtype of the gradients, each rounded once; then the L2 norm of all elements before, and
        the factor ``min(1, max_norm / (norm + 1e-6))``, both of shape () in fp32, or fp64 for fp64.

    Raises:
        DrivetrainError: there are none, or of several dtypes, or the bound is no bound.
    """
    check_clip(gradients, max_norm)
    total = torch.stack([one.double().square().sum() for one in gradients]).sum().sqrt()
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    norm = total.to(wide)
    factor = clip_coefficient(norm, max_norm)
    return (*((one.to(wide) * factor).to(one.dtype) for one in gradients), norm, factor)


def check_clip(gradients: Sequence[Tensor], max_norm: float) -> None:
    """Refuse what cannot be clipped.

    Raises:
        DrivetrainError: there are no gradients, or of several dtypes, or the bound is no bound.
    """
    check_lists(gradients=gradients)
    if not max_norm >= 0:
        raise DrivetrainError(f"max_norm is {max_norm}; it is to be at least 0, and 0 only measures")


@torch.no_grad()
def total_norm(tensors: list[Tensor]) -> Tensor:
    """L2 norm of all elements of ``tensors``, of shape (), on their device; 0 for none of them.

    In their dtype, at least fp32. On a CPU torch adds the squares of a whole tensor one after the other, as many at
    once as a register holds. In fp32 the norm of 16 million elements comes out 6e-4 too small, and another one when
    they are cut, so that clipping would depend on the layout. By rows, and in fp64 from there on, it is right to the
    last digit, or to 2e-6 where many elements are equal.
    """
    if not tensors:
        return torch.zeros(())
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    if tensors[0].device.type != "cpu":
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, 2, dtype=wide)))
        return norm
    rows, small = [], []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        whole = flat.numel() // _ROW * _ROW
        if whole:
            rows.append(torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=wide))
        if whole < flat.numel():
            small.append(flat[whole:])
    if small:
        rows.append(torch.stack(torch._foreach_norm(small, 2, dtype=wide)))
    if not rows:  # empty parts of a dimension that does not divide
        return tensors[0].new_zeros((), dtype=wide)
    total: Tensor = torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64)
    return total.to(wide)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor ``min(1, max_norm / (norm + 1e-6))`` for gradients of this norm, of shape () on the norm's device.

    1 where the norm is not finite, or ``max_norm`` is 0.
    """
    if max_norm == 0:
        return torch.ones_like(norm)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(norm.isfinite(), factor, torch.ones_like(factor))


def scale_gradients(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply all of ``gradients`` in place by ``factor``, of shape ()."""
    # A CPU has no queue to wait for, so a pass over all gradients that would multiply by one is saved.
    if gradients and not (factor.device.type == "cpu" and factor.item() == 1.0):
        torch._foreach_mul_(gradients, factor)


def _clipped(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> tuple[Tensor, ...]:
    factor = clip_coefficient(norm, max_norm)
    # A tensor without dimensions takes the factor's dtype; the others keep their own.
    scaled = torch._foreach_mul(list(gradients), factor)
    return (*(one.to(was.dtype) for one, was in zip(scaled, gradients, strict=True)), norm, factor)


@torch.no_grad()
def _eager(gradients: Sequence[Tensor], max_norm: float) -> tuple[Tensor, ...]:
    check_clip(gradients, max_norm)
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    # On a CPU torch's sums in fp32 lose digits with the size of a tensor; see total_norm.
    within = torch.float64 if gradients[0].device.type == "cpu" else wide
    norms = torch._foreach_norm(list(gradients), 2, dtype=within)
    return _clipped(gradients, torch.linalg.vector_norm(torch.stack(norms)).to(wide), max_norm)


@torch.no_grad()
def _rows(gradients: Sequence[Tensor], max_norm: float) -> tuple[Tensor, ...]:
    check_clip(gradients, max_norm)
    return _clipped(gradients, total_norm(list(gradients)), max_norm)


def _rows_refuses(signature: Signature) -> str | None:
    if signature.device == "cpu":
        return None
    return (
        f"sums by rows make up for those of a CPU; on a device of type {signature.device} it would be eager"
    )


def _sum_of_squares(gradient: Tensor) -> Tensor:
    """Of shape () in fp64."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    flat = gradient.reshape(-1)
    whole = flat.shape[0] // _ROW * _ROW
    rest = flat[whole:].to(wide).square().sum().double()
    return flat[:whole].view(-1, _ROW).to(wide).square().sum(1).double().sum() + rest


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    return (gradient.to(factor.dtype) * factor).to(gradient.dtype)


_compiled_sum = compiled(_sum_of_squares)
_compiled_scaled = compiled(_scaled)


@torch.no_grad()
def _inductor(gradients: Sequence[Tensor], max_norm: float) -> tuple[Tensor, ...]:
    check_clip(gradients, max_norm)
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    norm = torch.stack([_compiled_sum(one) for one in gradients]).sum().sqrt().to(wide)
    factor = clip_coefficient(norm, max_norm)
    return (*(_compiled_scaled(one, factor) for one in gradients), norm, factor)


@torch.no_grad()
def _triton(gradients: Sequence[Tensor], max_norm: float) -> tuple[Tensor, ...]:
    check_clip(gradients, max_norm)
    sums = torch.cat([triton_sums_of_squares(one) for one in gradients])
    return _clipped(gradients, sums.double().sum().sqrt().float(), max_norm)


OPERATOR = Operator(
    name="gradient_clip",
    equation="norm = sqrt(sum of all g^2); g = g min(1, max_norm / (norm + 1e-6)), or g where the norm is not finite",
    source="Pascanu, Mikolov & Bengio, arXiv:1211.5063",
    reference=gradient_clip,
    cases=gradient_clip_cases,
    backends=(
        Backend("eager", _eager, serves_all, ran_on=("cpu",), kernels=("aten::_foreach_norm",)),
        Backend("rows", _rows, _rows_refuses, ran_on=("cpu",), kernels=("aten::linalg_vector_norm",)),
        Backend(
            "inductor", _inductor, inductor_refuses, ran_on=("cpu",), kernels=("_sum_of_squares", "_scaled")
        ),
        Backend("triton", _triton, triton_refuses, kernels=SQUARES_KERNELS),
    ),
    floor=_FLOOR,
    # The norm of 16 tensors of 2^20: 21 ms by rows, 38 in fp64 as eager, 16 in torch's fp32 that is off by 1e-5.
    untuned={"cpu": ("rows",)},
)
