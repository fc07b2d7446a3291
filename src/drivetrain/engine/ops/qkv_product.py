"""Queries, keys and values of one input: ``q = x query^T, k = x key^T, v = x value^T``."""

from torch import Tensor

from drivetrain.engine.ops._joined_products import check_joined, joined, separate
from drivetrain.engine.ops._product_cases import joined_cases
from drivetrain.engine.ops.operator import Backend, Case, Operator, serves_all

__all__ = ["OPERATOR", "qkv_product"]


def qkv_product(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """The reference.

    Args:
        x: (..., D), floating point.
        query: (H W, D), of the same dtype.
        key, value: (G W, D), of the same dtype; fewer heads than queries where they share.

    Returns:
        (..., H W), (..., G W) and (..., G W) in the dtype of x.

    Raises:
        DrivetrainError: shapes or dtypes do not fit.
    """
    check_joined("qkv_product", x, {"query": query, "key": key, "value": value})
    return x @ query.t(), x @ key.t(), x @ value.t()


def _separate(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    check_joined("qkv_product", x, {"query": query, "key": key, "value": value})
    return separate(x, query, key, value)


def _joined(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    check_joined("qkv_product", x, {"query": query, "key": key, "value": value})
    return joined(x, query, key, value)


def _cases() -> list[Case]:
    return joined_cases({"query": 24, "key": 8, "value": 8})


OPERATOR = Operator(
    name="qkv_product",
    equation="q = x query^T, k = x key^T, v = x value^T",
    source="Vaswani et al., arXiv:1706.03762",
    reference=qkv_product,
    cases=_cases,
    backends=(
        Backend("eager", _separate, serves_all, ran_on=("cpu",), kernels=("aten::linear",)),
        Backend("joined", _joined, serves_all, ran_on=("cpu",), kernels=("aten::cat",)),
    ),
)
