"""Layers of a tensor- and sequence-parallel model whose collectives are part of their products.

======================= ==================================== ====================================
layers                  forward                              backward
======================= ==================================== ====================================
cut by output features  rows gathered and multiplied         gradient of x multiplied and scattered
cut by input features   product multiplied and scattered     gradient gathered and multiplied
======================= ==================================== ====================================

What is gathered is kept for the gradients of the weights, which are plain products of all rows. Several matrices of one
input take one call: gathered once; gradients joined, as the sum over the matrices is the product of what is joined.

As with chunks (:mod:`drivetrain.engine.parallel.chunked_products`) the gradients of x and of the weights are nodes of
their own, so that a schedule that runs backward in two halves calls nothing twice. Nothing here is part of a compiled
block's graphs, and operators of ``fusion.*`` do not serve these products: torch's fused operators are the products.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from drivetrain.engine.parallel.chunked_products import stand_in, with_graph
from drivetrain.engine.parallel.symmetric_memory import SymmetricMemory
from drivetrain.engine.parallel.tensor_parallel_overlap import Matrix, Multiplication

__all__ = ["SymmetricColumns", "symmetric_row_product"]


class SymmetricColumns:
    """Layers cut by output features that multiply one input.

    Not a module: the layers stay where they are, under the names that they have in the whole model.

    Args:
        matrices: layers that have :class:`Matrix`'s methods.
    """

    def __init__(self, matrices: Sequence[nn.Module], memory: SymmetricMemory) -> None:
        self._matrices = [cast(Matrix, matrix) for matrix in matrices]
        self._memory = memory

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """(T / ranks, D) to a (T, own output features) for each layer."""
        memory = self._memory
        multiply = Multiplication(self._matrices, x_TD.dtype, None)
        whole, products = memory.gather_and_multiply(
            x_TD.detach(), [weight.detach().t() for weight in multiply.weights], keep=torch.is_grad_enabled()
        )
        outputs = tuple(
            product if bias is None else product + bias.detach()
            for product, bias in zip(products, multiply.biases, strict=True)
        )
        if not torch.is_grad_enabled():
            return outputs
        assert whole is not None

        def gradient_of_input(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
            return memory.multiply_and_scatter(_joined(gradients, -1), _joined(weights, 0))

        return with_graph(x_TD, whole, outputs, multiply, gradient_of_input)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def symmetric_row_product(x: Tensor, matrix: Matrix, memory: SymmetricMemory) -> Tensor:
    """This rank's rows (T / ranks, N) of the sum over ranks of the products (T, K) with a layer cut by input features,
    without its bias."""
    multiply = Multiplication([matrix], x.dtype, None)
    (weight,) = multiply.weights
    out = memory.multiply_and_scatter(x.detach(), weight.detach().t())
    if not torch.is_grad_enabled():
        return out
    of_input: list[Tensor] = []

    def gather(gradient: Tensor, here: Tensor) -> Tensor:
        """The gradient of the whole product. That of x comes out of the same call, and waits for its own node."""
        whole, (product,) = memory.gather_and_multiply(gradient, [here], keep=True)
        assert whole is not None
        of_input[:] = [product]
        return whole

    def gradient_of_input(_gradients: Sequence[Tensor], _weights: Sequence[Tensor]) -> Tensor:
        return of_input.pop()

    whole = stand_in(x, (x.shape[0], out.shape[1]))
    (of_whole,) = with_graph(x, x.detach(), (whole,), multiply, gradient_of_input)
    recorded: Tensor = _Gathered.apply(of_whole, [out], gather, weight.detach())  # type: ignore[no-untyped-call]
    return recorded


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


class _Gathered(torch.autograd.Function):
    """What was computed already; backward gathers the gradient and multiplies it."""

    @staticmethod
    def forward(
        ctx: Any,
        _whole: Tensor,
        output: list[Tensor],
        gather: Callable[[Tensor, Tensor], Tensor],
        weight: Tensor,
    ) -> Tensor:
        ctx.gather = gather
        ctx.save_for_backward(weight)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return ctx.gather(gradient, weight), None, None, None
