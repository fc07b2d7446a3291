"""Products with weights that are spread over ranks, in chunks of rows: what is sent of one hides under the next.

======================= ============================================ ============================================
products                forward                                      backward
======================= ============================================ ============================================
of a copied input       products                                     each chunk: gradient of x, all-reduce
of a gathered input     each chunk: all-gather of x, products        each chunk: gradient of x, reduce-scatter
summed                  each chunk: product, all-reduce              gradient of x
summed and scattered    each chunk: product, reduce-scatter          each chunk: all-gather, gradient of x
======================= ============================================ ============================================

A chunk is sent when its product was computed (on CUDA: launched), and none is read before its collective was waited
for: torch's ``Work`` is the event between the two, on a CPU and on CUDA alike, and the process group is the stream in
which the communication runs. The weights' gradients are one product of all rows, as without chunks. Where the gradient
of x travels, they are computed meanwhile: it is waited for by a node of autograd's graph of its own
(:class:`_Awaited`), made before that of the weights and so run after it.

The gradients of x and of the weights are nodes of their own, because zero-bubble schedules of a pipeline run backward
twice, for one and for the other, and a node runs whole: nothing is computed, and nothing sent, twice.

Between the nodes that begin and those that wait travels a tensor that is not there yet. No other code may read it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.engine.parallel.collectives import Group
from drivetrain.engine.parallel.flat_collectives import CountedGroup
from drivetrain.engine.parallel.row_chunks import RowChunks

__all__ = [
    "CHUNK_SPAN",
    "WHOLE_SPAN",
    "Multiply",
    "products_of_copied",
    "products_of_gathered",
    "scattered_product",
    "stand_in",
    "summed_product",
    "with_graph",
]


class Multiply(Protocol):
    """Products of one input with one or several weights."""

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """(N, K) each, in the dtype of the input, of the graph."""

    @property
    def biases(self) -> tuple[Tensor | None, ...]:
        """(N,) or None, one for each weight."""

    def outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """(T, K) to a (T, N) for each weight."""

    def gradient_of_input(self, gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """(T, K), of gradients (T, N) for each weight."""

    def gradients_of_weights(self, gradients: Sequence[Tensor], x: Tensor) -> Sequence[Tensor]:
        """(N, K) for each weight, of gradients (T, N) and the input (T, K)."""


CHUNK_SPAN = "drivetrain/tp_chunk/"
"""Begins the name of the region of a profile in which a chunk's collective is handed over; its kind follows."""
WHOLE_SPAN = "drivetrain/tp_async/"
"""The same of a collective of all rows."""

_OfInput = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
_OfParameters = Callable[[Sequence[Tensor], Tensor, Sequence[bool]], list[Tensor | None]]
_Shape = tuple[int, int]


class _Travelling:
    """Collectives that have begun, in order; each is waited for once."""

    def __init__(self, kind: str, chunks: int) -> None:
        """``kind``: of products, as a profile is to show them."""
        self._span = f"{CHUNK_SPAN if chunks > 1 else WHOLE_SPAN}{kind}"
        self._works: list[dist.Work | None] = []
        self._read: list[Tensor] = []

    def begin(self, collective: Callable[[], dist.Work], *read: Tensor) -> None:
        """``read``: what the collective reads, and nobody else may keep."""
        if torch.autograd.profiler._is_profiler_enabled:
            with torch.profiler.record_function(self._span):
                self._works.append(collective())
        else:
            self._works.append(collective())
        self._read += read

    def wait(self, index: int) -> None:
        """For the collective that was the ``index``-th to begin."""
        work, self._works[index] = self._works[index], None
        if work is not None:
            work.wait()

    def wait_for_all(self) -> None:
        """From here on nothing is under way."""
        for index in range(len(self._works)):
            self.wait(index)
        self._works, self._read = [], []


def products_of_copied(x: Tensor, group: Group, multiply: Multiply, chunks: int) -> tuple[Tensor, ...]:
    """Products of what every rank holds alike and uses in its own way: (T, K) to a (T, N) for each weight."""
    wire, rows = _wire(group), RowChunks.of(x.shape[0], 1, chunks)
    travelling = _Travelling("copied", rows.count)
    x_awaited = _awaited(x, travelling)
    outputs = _computed(multiply, x, wanted=x.requires_grad)

    def gradient_of_input(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        of_x = gradients[0].new_empty(x.shape)
        for index in range(rows.count):
            part = of_x[rows.own(index)]
            part.copy_(multiply.gradient_of_input([rows.taken(one, index) for one in gradients], weights))
            travelling.begin(partial(wire.all_reduce, part))
        return of_x

    return with_graph(x_awaited, x.detach(), outputs, multiply, gradient_of_input)


def products_of_gathered(x: Tensor, group: Group, multiply: Multiply, chunks: int) -> tuple[Tensor, ...]:
    """Products of all ranks' rows: (T / ranks, K) to a (T, N) for each weight."""
    wire, rows = _wire(group), RowChunks.of(x.shape[0], group.size, chunks)
    travelling = _Travelling("gathered", rows.count)
    x_awaited = _awaited(x, travelling)
    outputs, whole = _gathered_and_multiplied(x, wire, rows, multiply)

    def gradient_of_input(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        of_x = gradients[0].new_empty(x.shape)
        for index in range(rows.count):
            part = multiply.gradient_of_input([rows.taken(one, index) for one in gradients], weights)
            summand = part.contiguous().view(group.size, -1)
            share = of_x[rows.own(index)].view(-1)
            travelling.begin(partial(wire.reduce_scatter, share, summand), summand)
        return of_x

    return with_graph(x_awaited, whole, outputs, multiply, gradient_of_input)


def summed_product(x: Tensor, group: Group, multiply: Multiply, chunks: int) -> Tensor:
    """The sum over ranks of the product with one weight: (T, K) to (T, N) on each."""
    wire, rows = _wire(group), RowChunks.of(x.shape[0], 1, chunks)
    travelling = _Travelling("summed", rows.count)
    out = x.new_empty(x.shape[0], multiply.weights[0].shape[0])
    for index in range(rows.count):
        (summand,) = _computed(multiply, rows.taken(x, index), wanted=x.requires_grad)
        part = out[rows.own(index)]
        part.copy_(summand)
        travelling.begin(partial(wire.all_reduce, part))
    travelling.wait_for_all()
    (recorded,) = with_graph(x, x.detach(), (out,), multiply, multiply.gradient_of_input)
    return recorded


def scattered_product(x: Tensor, group: Group, multiply: Multiply, chunks: int) -> Tensor:
    """This rank's rows of that sum: (T, K) to (T / ranks, N)."""
    assert x.shape[0] % group.size == 0, f"{group.size} ranks do not divide {x.shape[0]}"
    wire, rows = _wire(group), RowChunks.of(x.shape[0] // group.size, group.size, chunks)
    travelling = _Travelling("scattered", rows.count)
    out = x.new_empty(rows.rows, multiply.weights[0].shape[0])
    for index in range(rows.count):
        (product,) = _computed(multiply, rows.taken(x, index), wanted=x.requires_grad)
        summand = product.contiguous().view(group.size, -1)
        share = out[rows.own(index)].view(-1)
        travelling.begin(partial(wire.reduce_scatter, share, summand), summand)
    travelling.wait_for_all()
    if not torch.is_grad_enabled():
        return out

    def gather(gradient: Tensor) -> Tensor:
        """Chunks behind one another; they are on their way."""
        travelling.wait_for_all()  # of an earlier backward pass of this graph
        chunked = gradient.new_empty(x.shape[0], gradient.shape[1])
        _begin_gathering(wire, rows, gradient.contiguous(), chunked, travelling)
        return chunked

    def gradient_of_input(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        (chunked,) = gradients
        of_x = chunked.new_empty(x.shape)
        for index in range(rows.count):
            travelling.wait(index)
            part = multiply.gradient_of_input([chunked[rows.behind_one_another(index)]], weights)
            rows.put(of_x, index, part)
        return of_x

    def arrived(chunked: Tensor) -> Tensor:
        travelling.wait_for_all()
        return rows.in_order(chunked)

    whole = stand_in(x, (x.shape[0], out.shape[1]))
    (of_whole,) = with_graph(x, x.detach(), (whole,), multiply, gradient_of_input, arrived)
    recorded: Tensor = _GatheredGradient.apply(of_whole, [out], gather)  # type: ignore[no-untyped-call]
    return recorded


def _wire(group: Group) -> CountedGroup:
    return group.begun


def _computed(multiply: Multiply, x: Tensor, *, wanted: bool) -> tuple[Tensor, ...]:
    """The products, without a graph.

    Args:
        wanted: whether the gradient of ``x`` is, where gradients are recorded: who serves a call may depend on it.
    """
    if not torch.is_grad_enabled():
        return multiply.outputs(x)
    # Not detach(), which shares the count of writes: other chunks of the same tensor arrive meanwhile, and hooks of
    # saved tensors take that for a write to this one.
    return tuple(one.detach() for one in multiply.outputs(x.data.requires_grad_(wanted)))


def _begin_gathering(
    wire: CountedGroup, rows: RowChunks, own: Tensor, chunked: Tensor, travelling: _Travelling
) -> None:
    """Begin to gather the chunks of ``own`` (T / ranks, K) into ``chunked`` (T, K), chunks behind one another."""
    for index in range(rows.count):
        whole, part = chunked[rows.behind_one_another(index)], own[rows.own(index)]
        travelling.begin(partial(wire.all_gather, whole.view(rows.parts, -1), part.view(-1)), own)


def _gathered_and_multiplied(
    x: Tensor, wire: CountedGroup, rows: RowChunks, multiply: Multiply
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The products of all ranks' rows, and these rows."""
    own = x.detach().contiguous()
    chunked = own.new_empty(rows.parts * rows.rows, own.shape[1])
    travelling = _Travelling("gathered", rows.count)
    _begin_gathering(wire, rows, own, chunked, travelling)
    # In the order in which the outputs' gradients will come, for the weights' gradients.
    whole = chunked if rows.count == 1 else torch.empty_like(chunked)
    outputs = tuple(own.new_empty(chunked.shape[0], weight.shape[0]) for weight in multiply.weights)
    for index in range(rows.count):
        travelling.wait(index)
        chunk = chunked[rows.behind_one_another(index)]
        parts = _computed(multiply, chunk, wanted=x.requires_grad)
        for output, part in zip(outputs, parts, strict=True):
            rows.put(output, index, part)
        if whole is not chunked:
            rows.put(whole, index, chunk)
    travelling.wait_for_all()
    return outputs, whole


def _awaited(x: Tensor, travelling: _Travelling) -> Tensor:
    awaited: Tensor = _Awaited.apply(x, travelling)  # type: ignore[no-untyped-call]
    return awaited


def with_graph(
    x: Tensor,
    x_whole: Tensor,
    outputs: tuple[Tensor, ...],
    multiply: Multiply,
    gradient_of_input: _OfInput,
    arrived: Callable[[Tensor], Tensor] = lambda gradient: gradient,
) -> tuple[Tensor, ...]:
    """``outputs``, which were computed without a graph, with one whose two halves are nodes of their own.

    Args:
        x: what gets the gradient of the input.
        x_whole: (T, K) that were multiplied.
        arrived: of a gradient that may be on its way: when it has arrived, in the order of ``x_whole``.
    """
    if not torch.is_grad_enabled():
        return outputs
    weights = multiply.weights
    shapes = [(x_whole.shape[0], weight.shape[0]) for weight in weights]

    def gradients_of_parameters(
        gradients: Sequence[Tensor], whole: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        gradients = [arrived(one) for one in gradients]
        of_weights: Sequence[Tensor | None] = [None] * len(weights)
        if any(wanted[: len(weights)]):
            of_weights = multiply.gradients_of_weights(gradients, whole)
        biases = zip(gradients, wanted[len(weights) :], strict=True)
        return [*of_weights, *(one.sum(0) if is_wanted else None for one, is_wanted in biases)]

    for_parameters: tuple[Tensor, ...] = _ParameterGradients.apply(  # type: ignore[no-untyped-call]
        x_whole, shapes, gradients_of_parameters, *weights, *multiply.biases
    )
    # Made later, this node runs earlier: communication begins before the weights' gradients are computed.
    for_input: tuple[Tensor, ...] = _InputGradient.apply(  # type: ignore[no-untyped-call]
        x, shapes, gradient_of_input, *(weight.detach() for weight in weights)
    )
    recorded: tuple[Tensor, ...] = _Outputs.apply(outputs, *for_input, *for_parameters)  # type: ignore[no-untyped-call]
    return recorded


def stand_in(like: Tensor, shape: _Shape) -> Tensor:
    """It holds no memory and means nothing; its gradient does."""
    return like.new_empty_strided(shape, (0, 0))


class _Awaited(torch.autograd.Function):
    """Nothing forward; backward waits until the gradient is there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, travelling: _Travelling) -> Tensor:
        ctx.travelling = travelling
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.travelling.wait_for_all()
        return gradient, None


class _InputGradient(torch.autograd.Function):
    """From the gradients of all outputs to that of the input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shapes: Sequence[_Shape], compute: _OfInput, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.compute = compute
        ctx.save_for_backward(*weights)
        return tuple(stand_in(x, shape) for shape in shapes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weights = ctx.saved_tensors
        return ctx.compute(gradients, weights), None, None, *[None] * len(weights)


class _ParameterGradients(torch.autograd.Function):
    """From the gradients of all outputs to those of weights and biases."""

    @staticmethod
    def forward(
        ctx: Any, x_whole: Tensor, shapes: Sequence[_Shape], compute: _OfParameters, *_: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.compute = compute
        ctx.save_for_backward(x_whole)
        return tuple(stand_in(x_whole, shape) for shape in shapes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x_whole,) = ctx.saved_tensors
        return None, None, None, *ctx.compute(gradients, x_whole, ctx.needs_input_grad[3:])


class _Outputs(torch.autograd.Function):
    """What was computed already; backward hands each gradient to both nodes that need it."""

    @staticmethod
    def forward(_ctx: Any, outputs: tuple[Tensor, ...], *_stand_ins: Tensor) -> tuple[Tensor, ...]:
        return outputs

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradients, *gradients


class _GatheredGradient(torch.autograd.Function):
    """What was computed already; backward begins to gather the gradient."""

    @staticmethod
    def forward(ctx: Any, _whole: Tensor, output: list[Tensor], gather: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.gather = gather
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gather(gradient), None, None
