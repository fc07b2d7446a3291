"""Products of rows sorted by expert with the weight of each: ``y_t = x_t weight[e]``, ``ends[e-1] <= t < ends[e]``.

Rows past ``ends[-1]`` belong to nobody: their result is zero, they get no gradient, and what they hold is not looked
at.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.engine.ops._product_cases import grouped_product_cases
from drivetrain.engine.ops.adapters import adapters_of
from drivetrain.engine.ops.operator import Backend, Operator, refuse_dtypes, serves_all
from drivetrain.engine.ops.signature import Signature
from drivetrain.errors import DrivetrainError

__all__ = [
    "OPERATOR",
    "check_grouped_product",
    "grouped_product",
    "keep_rows",
    "loop_over_experts",
    "torch_grouped_mm",
]

_ALIGNMENT_BYTES = 16


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The reference: each expert's product of all rows, those of others set to zero.

    Args:
        x: (T, K), floating point, rows sorted by expert.
        weight: (E, K, N), of the same dtype.
        ends: (E,) int32, the number of rows of all experts up to this one; it does not fall, and its last is at most T.

    Returns:
        (T, N) in the dtype of x. The gradient of the weight of an expert without rows is zero.

    Raises:
        DrivetrainError: shapes or dtypes do not fit; on a CPU also, ends fall or pass T.
    """
    check_grouped_product(x, weight, ends)
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    y = x.new_zeros(x.shape[0], weight.shape[2])
    for expert in range(weight.shape[0]):
        first = ends[expert - 1] if expert else 0
        own = (rows >= first) & (rows < ends[expert])
        y = y + torch.where(own, x, x.new_zeros(())) @ weight[expert]
    return y


def loop_over_experts(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """A product for each expert that has rows; how many is read on the host, which waits for a GPU."""
    check_grouped_product(x, weight, ends)
    # One unbind, not an index for each expert: the gradient of an index is a whole weight of zeros.
    parts, first = [], 0
    for of_expert, end in zip(weight.unbind(), ends.tolist(), strict=True):
        parts.append(x[first:end] @ of_expert)
        first = end
    parts.append(x.new_zeros(x.shape[0] - first, weight.shape[2]))
    return torch.cat(parts)


def torch_grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Torch's grouped product, guarded: it leaves rows past the last end as memory was, in the result and in the
    gradient of x (pytorch 193633, 154557)."""
    check_grouped_product(x, weight, ends)
    held = (torch.arange(x.shape[0], device=x.device) < ends[-1])[:, None]
    return keep_rows(F.grouped_mm(keep_rows(x, held), weight, offs=ends), held)


def keep_rows(x: Tensor, held: Tensor) -> Tensor:
    """x where the (T, 1) booleans are set, zeros elsewhere, whatever x holds there; its gradient the same way."""
    kept: Tensor = _Held.apply(x, held)  # type: ignore[no-untyped-call]
    return kept


class _Held(torch.autograd.Function):
    """Rows that somebody has, zeros for the others, row by row in memory; the gradient is made the same way.

    Chosen, not multiplied: zero times not-a-number is not zero. The product asks for aligned rows of gradients too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Tensor) -> Tensor:
        ctx.save_for_backward(held)
        return torch.where(held, x, x.new_zeros(())).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (held,) = ctx.saved_tensors
        of_x: Tensor = _Held.apply(gradient, held)  # type: ignore[no-untyped-call]
        return of_x, None


def check_grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> None:
    """Refuse what does not belong together.

    Raises:
        DrivetrainError: shapes or dtypes do not fit; on a CPU also, ends fall or pass T.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1] or weight.shape[0] == 0:
        raise DrivetrainError(
            f"grouped_product: x has the shape {tuple(x.shape)}, weight {tuple(weight.shape)}; they have to be (T, K) "
            "and (E, K, N) with at least one expert"
        )
    if x.dtype != weight.dtype:
        raise DrivetrainError(f"grouped_product: x is {x.dtype}, weight {weight.dtype}; convert one of them")
    if ends.shape != weight.shape[:1] or ends.dtype != torch.int32:
        raise DrivetrainError(
            f"grouped_product: ends are {ends.dtype} {tuple(ends.shape)}; they have to be int32 ({weight.shape[0]},)"
        )
    # On a CPU reading them costs nothing; a GPU would have to be waited for.
    if ends.device.type == "cpu" and not torch.compiler.is_compiling() and type(ends) is Tensor:
        numbers = [0, *ends.tolist()]
        if any(one > other for one, other in pairwise(numbers)) or numbers[-1] > x.shape[0]:
            raise DrivetrainError(
                f"grouped_product: ends are {numbers[1:]}; they must not fall, nor pass the {x.shape[0]} rows of x"
            )


def _grouped_mm_refuses(signature: Signature) -> str | None:
    why = refuse_dtypes(signature, torch.bfloat16, torch.float16, torch.float32)
    if why is not None:
        return why
    weight = signature.argument("weight")
    assert weight is not None
    if not weight.contiguous:
        return "weight has gaps or another order of dimensions: it would be copied with every call"
    every = _ALIGNMENT_BYTES // weight.dtype.itemsize
    _, features, outputs = weight.shape
    if features % every or outputs % every:
        return (
            f"rows of {features} and {outputs} elements do not all start at multiples of {_ALIGNMENT_BYTES} bytes: "
            f"both have to be multiples of {every}"
        )
    return None


OPERATOR = Operator(
    name="grouped_product",
    equation="y_t = x_t weight[e] where ends[e-1] <= t < ends[e]; 0 where t >= ends[-1]",
    source="Gale et al., arXiv:2211.15841",
    reference=grouped_product,
    cases=grouped_product_cases,
    backends=(
        Backend("eager", loop_over_experts, serves_all, ran_on=("cpu",), kernels=("aten::mm",)),
        Backend(
            "torch_grouped_mm",
            torch_grouped_mm,
            _grouped_mm_refuses,
            library="torch",
            ran_on=("cpu",),
            kernels=("aten::_grouped_mm",),
        ),
        *adapters_of("grouped_product"),
    ),
)
