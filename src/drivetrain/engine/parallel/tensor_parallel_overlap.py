"""Layers of a tensor-parallel model whose collectives travel in chunks, under the products.

What :mod:`drivetrain.engine.parallel.tensor_parallel` does in one collective before or behind the matrices of a layer
is done in ``chunks`` here, each of some rows of the micro-batch (:mod:`drivetrain.engine.parallel.chunked_products`).
Whoever serves the products is asked as without chunks; his gradients are computed here, in the form that his backend
has. Nothing of it is part of a compiled block's graphs: neither are the collectives without chunks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from drivetrain.engine.model.linear import Linear
from drivetrain.engine.model.operators import several
from drivetrain.engine.ops._weight_gradient import weight_gradient
from drivetrain.engine.ops.linear import OPERATOR as LINEAR
from drivetrain.engine.ops.operator import Operator
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.ops.signature import signature_of
from drivetrain.engine.parallel.chunked_products import (
    products_of_copied,
    products_of_gathered,
    scattered_product,
    summed_product,
)
from drivetrain.engine.parallel.collectives import Group
from drivetrain.engine.parallel.row_chunks import RowChunks

__all__ = [
    "WHOLE",
    "Chunks",
    "ColumnParallelLinears",
    "Matrix",
    "Multiplication",
    "Together",
    "TunedChunks",
    "row_parallel_product",
]

_KNOWN_BACKENDS = {
    "linear": ("eager", "transposed_gradient"),
    "qkv_product": ("eager", "joined"),
    "gate_up_product": ("eager", "joined"),
}
"""Those whose backward is written down here."""


@dataclass(frozen=True)
class Chunks:
    """Into how many chunks the collectives of a layer are cut; 1: not cut, and not computed by this module.

    Attributes:
        qkv: what enters the products for queries, keys and values.
        output: what leaves attention.
        gate_up: what enters the MLP.
        down: what leaves it.
    """

    qkv: int = 1
    output: int = 1
    gate_up: int = 1
    down: int = 1

    def __post_init__(self) -> None:
        assert min(self.by_product().values()) >= 1

    @staticmethod
    def of_all(count: int) -> "Chunks":
        """The same of all products."""
        return Chunks(count, count, count, count)

    def by_product(self) -> dict[str, int]:
        """The four numbers by name."""
        return asdict(self)

    def of_rows(self, rows: int) -> "Chunks":
        """What is left of them where a rank has ``rows`` rows: no chunk is empty."""
        return Chunks(
            **{name: RowChunks.of(rows, 1, wanted).count for name, wanted in self.by_product().items()}
        )


WHOLE = Chunks()
"""Nothing is cut."""


@dataclass(frozen=True)
class TunedChunks:
    """What a tuned file says of a run.

    Attributes:
        chunks: of each product; 1 where nothing was tuned.
        reason: why it is not in effect, or not for all products; None: it is.
    """

    chunks: Chunks
    reason: str | None


class Matrix(Protocol):
    """A layer that multiplies."""

    def operands(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Weight (N, K) and bias (N,), of the graph, in ``dtype``."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ weight.T + bias`` by whoever serves it."""

    def serving(self, operator: str) -> Selection | None:
        """Who computes that operator; None: the module's own code."""


@dataclass(frozen=True)
class Together:
    """An operator for several matrices of one input, and what it calls their weights."""

    operator: Operator
    names: tuple[str, ...]


class Multiplication:
    """The products of one call of one or several matrices of one input, and their gradients."""

    def __init__(
        self, matrices: Sequence[Matrix], dtype: torch.dtype, joint: tuple[Selection, Together] | None
    ) -> None:
        self._matrices = matrices
        self._dtype = dtype
        self._joint = joint
        self._joined = False
        self._transposed = [False] * len(matrices)

    @cached_property
    def _operands(self) -> list[tuple[Tensor, Tensor | None]]:
        # When they are asked for and not before: nodes made later run earlier, and the conversion of their gradients is
        # to come before the gradient of the input is waited for.
        return [matrix.operands(self._dtype) for matrix in self._matrices]

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """(N, K) each."""
        return tuple(weight for weight, _ in self._operands)

    @property
    def biases(self) -> tuple[Tensor | None, ...]:
        """(N,) each, or None."""
        return tuple(bias for _, bias in self._operands)

    def outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """(T, K) to a (T, N) for each matrix."""
        if self._joint is not None:
            return self._outputs_together(x, *self._joint)
        outputs = []
        for index, matrix in enumerate(self._matrices):
            weight, bias = self.weights[index], self.biases[index]
            outputs.append(matrix.product(x, weight, bias))
            serving = matrix.serving("linear")
            if serving is not None:
                served = _served(serving, LINEAR, {"x": x, "weight": weight, "bias": bias})
                self._transposed[index] = served == "transposed_gradient"
        return tuple(outputs)

    def gradient_of_input(self, gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """(T, K)."""
        if self._joined:
            return torch.cat(list(gradients), dim=-1) @ torch.cat(list(weights))
        # In the order in which autograd sums them without chunks.
        of_x = gradients[-1] @ weights[-1]
        for gradient, weight in zip(reversed(gradients[:-1]), reversed(weights[:-1]), strict=True):
            of_x += gradient @ weight
        return of_x

    def gradients_of_weights(self, gradients: Sequence[Tensor], x: Tensor) -> Sequence[Tensor]:
        """(N, K) for each matrix."""
        if self._joined:
            of_all = torch.cat(list(gradients), dim=-1).t() @ x
            return torch.split(of_all, [weight.shape[0] for weight in self.weights])
        return [
            weight_gradient(gradient, x) if transposed else gradient.t() @ x
            for gradient, transposed in zip(gradients, self._transposed, strict=True)
        ]

    def _outputs_together(self, x: Tensor, selection: Selection, together: Together) -> tuple[Tensor, ...]:
        given = {"x": x, **dict(zip(together.names, self.weights, strict=True))}
        outputs = several(selection.call(together.operator, **given))
        self._joined = _served(selection, together.operator, given) == "joined"
        return outputs


def _served(selection: Selection, operator: Operator, given: Mapping[str, Any]) -> str:
    """The backend that has just served a call."""
    name = selection.choices[signature_of(operator.name, given)].backend.name
    assert name in _KNOWN_BACKENDS[operator.name], (
        f"the gradients of {operator.name} by {name} are not known here"
    )
    return name


class ColumnParallelLinears:
    """Layers cut by output features that multiply one input: it is gathered once, and its gradient sent once.

    Not a module: the layers stay where they are, under the names that they have in the whole model.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Module],
        together: Together | None,
        group: Group,
        chunks: int,
        *,
        sequence_parallel: bool,
    ) -> None:
        """
        Args:
            matrices: layers that have :class:`Matrix`'s methods.
            together: the operator that computes all products at once; None: there is none.
        """
        self._matrices = [cast(Matrix, matrix) for matrix in matrices]
        self._plain = all(type(matrix) is Linear and matrix.bias is None for matrix in matrices)
        self._together = together
        self._group = group
        self._chunks = chunks
        self._products = products_of_gathered if sequence_parallel else products_of_copied

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """(T, D), under sequence parallelism (T / ranks, D), to a (T, own output features) for each layer."""
        joint = None
        if self._together is not None and self._plain:
            serving = self._matrices[0].serving(self._together.operator.name)
            joint = None if serving is None else (serving, self._together)
        multiply = Multiplication(self._matrices, x_TD.dtype, joint)
        return self._products(x_TD, self._group, multiply, self._chunks)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def row_parallel_product(
    x: Tensor, matrix: Matrix, group: Group, chunks: int, *, sequence_parallel: bool
) -> Tensor:
    """The sum over ranks of the products with a layer cut by input features, without its bias.

    Returns:
        (T, N); under sequence parallelism this rank's (T / ranks, N).
    """
    multiply = Multiplication([matrix], x.dtype, None)
    product = scattered_product if sequence_parallel else summed_product
    return product(x, group, multiply, chunks)
