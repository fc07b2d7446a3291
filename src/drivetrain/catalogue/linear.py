"""The layout in which the product of a weight's gradient is fastest."""

from drivetrain.catalogue.operators import operator_entry

__all__ = ["ENTRY"]


ENTRY = operator_entry(
    "linear",
    summary="the layout in which the product of a weight's gradient is fastest",
    sources=("oneDNN documentation, matmul: memory layouts",),
    treats=("compute.matmul",),
)
