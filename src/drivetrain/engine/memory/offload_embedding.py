"""The input embedding lives in host memory, and the device sees the rows that a micro-batch uses.

Of a large vocabulary a micro-batch uses few rows. The matrix, its gradient and its moments stay on the host; what
travels are the rows of the distinct tokens of a micro-batch, there before its forward pass and their gradient back
after its backward pass. AdamW moves every row at every step (its moments go on where there is no gradient, and it
decays), so the update is that of the plain optimizer, done where the matrix lives: on the host's cores.

Rows of the next micro-batch are copied while this one is computed: within a step no weight changes. The first rows of a
step, and those that nobody announced (evaluation, text generation, pipelines), are waited for.

On a CPU it is the same code: what is called the device is other memory of the host, rows are copied, and nothing is
saved. On the device rows are looked up by the operator that looks up the whole matrix otherwise, so that gradients are
those of the plain run to the bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from drivetrain.engine.memory.offload_copies import CopyEngine
from drivetrain.engine.model.batch import Batch
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.parallel.streams import Event

__all__ = ["EMBEDDING_ROWS_VISIT", "EmbeddingOffload"]

EMBEDDING_ROWS_VISIT = "drivetrain/offload/embedding"
"""Span in which the rows of a micro-batch are picked on the host, and their copy is begun."""


@dataclass(frozen=True)
class _Visit:
    """Rows on their way.

    Attributes:
        ids_U: (U,) int64 on the host: the distinct tokens of a micro-batch, ascending.
        place_T: (T,) int64 on the device: which of them each token is.
        rows_UD: (U, D) on the device, once ``arrival`` is over.
    """

    ids_U: Tensor
    place_T: Tensor
    rows_UD: Tensor
    arrival: Event


class EmbeddingOffload:
    """Holds the embedding of one model on the host.

    Args:
        engine: carries the rows.

    Attributes:
        rows_moved: of all visits together.
        weight: (V, D), on the host; None before :meth:`take_home`.
    """

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self.rows_moved = 0
        self.weight: nn.Parameter | None = None
        self._decoder: Decoder | None = None
        self._announced: list[tuple[Batch, _Visit]] = []
        self._ready: list[tuple[Tensor, _Visit]] = []

    def take_home(self, decoder: Decoder) -> None:
        """Give the embedding of ``decoder``, if it has one, a weight in host memory, of any values, and have it looked
        up there; before anybody has a reference to it."""
        if decoder.embedding is None:
            return
        old = decoder.embedding.weight
        self.weight = nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device="cpu"))
        decoder.embedding.weight = self.weight
        decoder.look_up = self.look_up
        self._decoder = decoder

    def announce(self, batch: Batch) -> None:
        """Begin to copy what ``batch``, on the host, will use. Weights do not change before it is looked up."""
        self._announced.append((batch, self._begin(batch.token_ids)))

    def arrived(self, host_batch: Batch, batch: Batch) -> None:
        """``batch`` is what ``host_batch``, which was announced, is on the device."""
        for index, (known, visit) in enumerate(self._announced):
            if known is host_batch:
                del self._announced[index]
                self._ready.append((batch.token_ids, visit))
                return
        raise AssertionError("a batch that was not announced")

    def look_up(self, batch: Batch) -> Tensor:
        """(T, D) on the device: a row for each token of ``batch``, in the dtype of the masters."""
        assert self.weight is not None, "the embedding was not taken home"
        visit = self._visit_of(batch.token_ids)
        rows_UD: Tensor = _Rows.apply(self.weight, visit, self._engine)  # type: ignore[no-untyped-call]
        return F.embedding(visit.place_T, rows_UD)

    def _visit_of(self, token_ids: Tensor) -> _Visit:
        for index, (known, visit) in enumerate(self._ready):
            if known is token_ids:
                del self._ready[index]
                return visit
        return self._begin(token_ids)

    def _begin(self, token_ids: Tensor) -> _Visit:
        assert self.weight is not None, "the embedding was not taken home"
        engine, decoder = self._engine, self._decoder
        if decoder is not None and decoder.before_use is not None and decoder.embedding is not None:
            # What other ranks have updated may still be on its way here.
            decoder.before_use(decoder.embedding)
        with record_function(EMBEDDING_ROWS_VISIT), torch.no_grad():
            ids_U, place_T = torch.unique(token_ids.detach().cpu().flatten(), return_inverse=True)
            staged_UD = engine.host_zeros(len(ids_U), self.weight.shape[1], dtype=self.weight.dtype)
            torch.index_select(self.weight.detach(), 0, ids_U, out=staged_UD)
            rows_UD = torch.empty_like(staged_UD, device=engine.device)
            there_T = torch.empty_like(place_T, device=engine.device)
            self.rows_moved += len(ids_U)
            places_T = engine.host_zeros(len(place_T), dtype=place_T.dtype).copy_(place_T)
            arrival = engine.to_device([(staged_UD, rows_UD), (places_T, there_T)])
        return _Visit(ids_U, there_T, rows_UD, arrival)


class _Rows(torch.autograd.Function):
    """From the matrix on the host to the rows that have arrived on the device, and the way back for their gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, visit: _Visit, engine: CopyEngine) -> Tensor:
        ctx.weight, ctx.visit, ctx.engine = weight, visit, engine
        engine.wait(visit.arrival)
        return visit.rows_UD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (grad_UD,) = gradients
        weight, ids_U, engine = ctx.weight, ctx.visit.ids_U, ctx.engine
        home_UD = engine.host_zeros(*grad_UD.shape, dtype=grad_UD.dtype)
        engine.wait_on_host(engine.to_host([(grad_UD, home_UD)]))
        if weight.grad is None:
            whole_VD = torch.zeros(weight.shape, dtype=weight.dtype)
            return whole_VD.index_copy_(0, ids_U, home_UD), None, None
        # Only the rows that were used are added to what other micro-batches have left.
        return _sparse(ids_U, home_UD, weight.shape), None, None


def _sparse(ids_U: Tensor, rows_UD: Tensor, shape: Sequence[int]) -> Tensor:
    """A matrix of zeros but for these rows; ``ids_U`` ascend."""
    return torch.sparse_coo_tensor(
        ids_U[None], rows_UD, size=tuple(shape), is_coalesced=True, check_invariants=False
    )
