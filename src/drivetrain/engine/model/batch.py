"""What the model is fed: token ids, labels, which of them carry loss, positions and document borders."""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["Batch", "check_batch", "documents_of", "whole_sequences"]


@dataclass(frozen=True)
class Batch:
    """One micro-batch of packed documents.

    Attributes:
        token_ids: (B, S) int64, each in [0, V).
        labels: (B, S) int64, the token to predict at each place; in [0, V) even where ``loss_mask`` is off.
        loss_mask: (B, S) bool, the places whose prediction counts.
        position_ids: (B, S) int64.
        cu_seqlens: (number of documents + 1,) int32, **always on the CPU**: cumulative document lengths over
            the flattened B x S tokens, from 0 to B x S. Every sequence border is a document border. The
            host cuts attention by it, so that a copy on a device would mean a synchronisation per layer.
        num_valid_tokens: places with loss, a host integer.
        sum_squared_lengths: sum of the squared document lengths, a host integer (attention FLOPs).
    """

    token_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    num_valid_tokens: int
    sum_squared_lengths: int

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "Batch":
        """The same batch on ``device``; ``cu_seqlens`` stays where it is."""
        return replace(
            self,
            token_ids=self.token_ids.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            loss_mask=self.loss_mask.to(device, non_blocking=non_blocking),
            position_ids=self.position_ids.to(device, non_blocking=non_blocking),
        )


def documents_of(batch: Batch) -> list[tuple[int, int]]:
    """First token and one past the last token of each document, over the flattened B x S tokens."""
    borders: list[int] = batch.cu_seqlens.tolist()
    return list(pairwise(borders))


def whole_sequences(token_ids_BS: Tensor) -> Batch:
    """A batch whose rows are one document each, positions from 0, labels the next token of the row.

    The last place of a row has nothing to predict and carries no loss. For generation, and for checks.
    """
    batch_size, length = token_ids_BS.shape
    loss_mask_BS = torch.ones_like(token_ids_BS, dtype=torch.bool)
    loss_mask_BS[:, -1] = False
    positions_S = torch.arange(length, device=token_ids_BS.device)
    return Batch(
        token_ids=token_ids_BS,
        labels=token_ids_BS.roll(-1, dims=1),
        loss_mask=loss_mask_BS,
        position_ids=positions_S.expand(batch_size, length),
        cu_seqlens=torch.arange(0, batch_size * length + 1, length, dtype=torch.int32),
        num_valid_tokens=batch_size * (length - 1),
        sum_squared_lengths=batch_size * length**2,
    )


def check_batch(batch: Batch, vocab_size: int) -> None:
    """Assert every property the class promises. Reads values on the host: for tests, not for the loop."""
    shape = batch.token_ids.shape
    assert len(shape) == 2, f"token_ids has shape {tuple(shape)}, not (B, S)"
    for name, dtype in (("labels", torch.int64), ("loss_mask", torch.bool), ("position_ids", torch.int64)):
        tensor: Tensor = getattr(batch, name)
        assert tensor.shape == shape, f"{name} has shape {tuple(tensor.shape)}, token_ids {tuple(shape)}"
        assert tensor.dtype == dtype, f"{name} is {tensor.dtype}, not {dtype}"
    assert batch.token_ids.dtype == torch.int64, f"token_ids is {batch.token_ids.dtype}"
    for name in ("token_ids", "labels"):
        tensor = getattr(batch, name)
        assert int(tensor.min()) >= 0, f"{name} holds {int(tensor.min())}"
        assert int(tensor.max()) < vocab_size, f"{name} holds {int(tensor.max())}, vocabulary {vocab_size}"
    assert int(batch.position_ids.min()) >= 0, "a position is negative"
    borders = batch.cu_seqlens
    assert borders.device.type == "cpu", f"cu_seqlens is on {borders.device}"
    assert borders.dtype == torch.int32, f"cu_seqlens is {borders.dtype}"
    documents = documents_of(batch)
    assert documents, "no document"
    assert documents[0][0] == 0, f"the first document starts at {documents[0][0]}"
    assert documents[-1][1] == shape.numel(), f"documents end at {documents[-1][1]} of {shape.numel()}"
    assert all(first < last for first, last in documents), "an empty document"
    row_borders = set(range(0, shape.numel(), shape[1]))
    assert row_borders <= {first for first, _ in documents}, "a document crosses a sequence border"
    assert batch.num_valid_tokens == int(batch.loss_mask.sum()), "num_valid_tokens is not the mask's sum"
    squared = sum((last - first) ** 2 for first, last in documents)
    assert batch.sum_squared_lengths == squared, f"sum_squared_lengths is not {squared}"
