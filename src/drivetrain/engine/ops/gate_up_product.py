"""Gate and up projections of one input: ``g = x gate^T, u = x up^T``."""

from torch import Tensor

from drivetrain.engine.ops._joined_products import check_joined, joined, separate
from drivetrain.engine.ops._product_cases import joined_cases
from drivetrain.engine.ops.operator import Backend, Case, Operator, serves_all

__all__ = ["OPERATOR", "gate_up_product"]


def gate_up_product(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """The reference.

    Args:
        x: (..., D), floating point.
        gate, up: (I, D), of the same dtype.

    Returns:
        (..., I) twice, in the dtype of x.

    Raises:
        DrivetrainError: shapes or dtypes do not fit.
    """
    check_joined("gate_up_product", x, {"gate": gate, "up": up})
    return x @ gate.t(), x @ up.t()


def _separate(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    check_joined("gate_up_product", x, {"gate": gate, "up": up})
    return separate(x, gate, up)


def _joined(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    check_joined("gate_up_product", x, {"gate": gate, "up": up})
    return joined(x, gate, up)


def _cases() -> list[Case]:
    return joined_cases({"gate": 20, "up": 20})


OPERATOR = Operator(
    name="gate_up_product",
    equation="g = x gate^T, u = x up^T",
    source="Shazeer, arXiv:2002.05202",
    reference=gate_up_product,
    cases=_cases,
    backends=(
        Backend("eager", _separate, serves_all, ran_on=("cpu",), kernels=("aten::linear",)),
        Backend("joined", _joined, serves_all, ran_on=("cpu",), kernels=("aten::cat",)),
    ),
)
