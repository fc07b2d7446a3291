"""Shapes of an operator's tensors from its recorded arguments (``record_shapes``), and what follows from them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.measure.flops import matrix_product_flops

__all__ = ["Product", "Tensor", "factor_of", "output_of", "product_of", "tensors_of"]

# Sizes of the types the profiler writes, in bytes; names as in C++ and, in some versions, as in Python.
_ITEM_BYTES: Mapping[str, int] = {
    "float": 4,
    "double": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2fnuz": 1,
    "long int": 8,
    "long": 8,
    "int": 4,
    "short int": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
}
_SHORT_DTYPES: Mapping[str, str] = {
    "float": "fp32",
    "double": "fp64",
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
    "c10::Float8_e4m3fnuz": "fp8",
    "c10::Float8_e5m2fnuz": "fp8",
}


@dataclass(frozen=True)
class Tensor:
    """A tensor argument."""

    dims: tuple[int, ...]
    dtype: str
    """``bf16 fp16 fp8 fp32 fp64``, else the profiler's word."""
    item_bytes: int

    @property
    def elements(self) -> int:
        """Product of the dimensions; 1 for a scalar tensor."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of all elements, as if each were stored once."""
        return self.elements * self.item_bytes


@dataclass(frozen=True)
class Product:
    """A matrix product of (batch, m, k) and (batch, k, n)."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    item_bytes: int

    @property
    def operations(self) -> int:
        """Multiplications and additions executed: 2·batch·m·n·k."""
        return matrix_product_flops(self.batch, self.m, self.n, self.k)

    @property
    def bytes(self) -> int:
        """Both operands read and the result written once, all of one dtype."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n) * self.item_bytes


def tensors_of(arguments: Mapping[str, Any]) -> tuple[Tensor | None, ...]:
    """Tensor arguments by position; None for what is no tensor, or a list of tensors.

    Empty where shapes were not recorded.
    """
    dims = arguments.get("Input Dims", arguments.get("Input dims"))
    types = arguments.get("Input type", arguments.get("Input Types"))
    if not isinstance(dims, list) or not isinstance(types, list) or len(dims) != len(types):
        return ()
    return tuple(_tensor(shape, word) for shape, word in zip(dims, types, strict=True))


def _tensor(shape: object, word: object) -> Tensor | None:
    if not isinstance(shape, list) or word not in _ITEM_BYTES:
        return None
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        return None
    return Tensor(tuple(shape), _SHORT_DTYPES.get(str(word), str(word)), _ITEM_BYTES[str(word)])


# Position of the two factors among the arguments, for operators that multiply matrices.
_FACTORS: Mapping[str, tuple[int, int]] = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::matmul": (0, 1),
    "aten::addmm": (1, 2),
    "aten::addmm_": (1, 2),
    "aten::_addmm_activation": (1, 2),
    "aten::baddbmm": (1, 2),
    "aten::baddbmm_": (1, 2),
    "aten::_scaled_mm": (0, 1),
    "aten::_int_mm": (0, 1),
    "aten::linear": (0, 1),
}


def product_of(operator: str, tensors: tuple[Tensor | None, ...]) -> Product | None:
    """The matrix product an operator computes; None where it is none, or its shapes do not tell."""
    places = _FACTORS.get(operator)
    if places is None or len(tensors) <= max(places):
        return None
    left, right = tensors[places[0]], tensors[places[1]]
    if left is None or right is None or len(left.dims) < 2 or len(right.dims) < 2:
        return None
    k = left.dims[-1]
    columns, rows = (-2, -1) if operator == "aten::linear" else (-1, -2)
    if right.dims[rows] != k:
        return None
    if len(right.dims) == 2:
        batch, m = 1, math.prod(left.dims[:-1])
    else:
        if left.dims[:-2] != right.dims[:-2]:
            return None
        batch, m = math.prod(left.dims[:-2]), left.dims[-2]
    if 0 in (batch, m, right.dims[columns], k):
        return None
    return Product(batch, m, right.dims[columns], k, left.dtype, left.item_bytes)


def factor_of(operator: str, tensors: tuple[Tensor | None, ...]) -> Tensor | None:
    """The left factor of a matrix product or convolution: its dtype is that of the multiplication.

    None where shapes were not recorded. The first argument of an operator that is not in the table.
    """
    place = _FACTORS.get(operator, (0, 1))[0]
    return tensors[place] if place < len(tensors) else None


def output_of(operator: str, tensors: tuple[Tensor | None, ...]) -> Tensor | None:
    """The result of an element-wise operator: its tensors broadcast, in the first one's dtype.

    ``aten::copy_`` writes its first argument. None where shapes are missing or do not broadcast.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return None
    if operator == "aten::copy_":
        return present[0]
    rank = max(len(tensor.dims) for tensor in present)
    dims = []
    for place in range(1, rank + 1):
        sizes = {tensor.dims[-place] for tensor in present if len(tensor.dims) >= place} - {1}
        if len(sizes) > 1:
            return None
        dims.append(sizes.pop() if sizes else 1)
    first = present[0]
    return Tensor(tuple(reversed(dims)), first.dtype, first.item_bytes)
