"""Samples of a run by their number, and the batch made of several: what one corpus and a blend have in common."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from drivetrain.config import DataConfig
from drivetrain.engine.data.filling import PADDING, TOKENS_WORTH_A_COPY
from drivetrain.engine.data.sample_cache import SampleCache
from drivetrain.engine.data.split import Split
from drivetrain.engine.data.timing import COLLATE, OperationTimes
from drivetrain.engine.data.transform import TransformChain
from drivetrain.engine.model.batch import Batch

__all__ = ["RowCounts", "Samples"]

HASHED_SAMPLES = 256


class RowCounts:
    """Rows that were built, and those that were read from the sample cache."""

    def __init__(self) -> None:
        self.built = 0
        self.cached = 0

    def take(self) -> tuple[int, int]:
        """Built and cached since the last call."""
        taken = self.built, self.cached
        self.built = self.cached = 0
        return taken


class Samples(ABC):
    """The samples of one split: sample i is a function of the data, the configuration and i alone. Picklable.

    Args:
        data: masks, positions, packing and batch transform.
        split: ``train`` or ``validation``.
        seq_length: tokens in a sample.
        vocab_size: rows of the model's embedding.
        padding_id: see below.
        times: shared with what reads the rows.
    Attributes:
        num_samples: in one pass over the split.
        num_tokens: of the split.
        padding_fraction: share of the places that hold padding.
        times: of the operations that build batches.
        counts: of rows.
        padding_id: the token id that stands where there is no token.
        packs: whether a row may hold several documents.
        is_baked: whether `data.transform` was applied when the corpus was made.
    """

    num_samples: int
    num_tokens: int
    padding_fraction: float
    is_baked: bool

    def __init__(
        self,
        data: DataConfig,
        split: Split,
        seq_length: int,
        vocab_size: int,
        padding_id: int,
        times: OperationTimes,
    ) -> None:
        self.split = split
        self.seq_length = seq_length
        self.times = times
        self.counts = RowCounts()
        self.packs = data.packing != "pad"
        self.padding_id = padding_id
        self._row_positions = np.arange(seq_length)
        self._reset_attention_mask = data.reset_attention_mask
        self._reset_position_ids = data.reset_position_ids
        # What follows a document in a row of whole documents is a document that has nothing to do with it.
        self._mask_borders = data.eod_mask_loss or data.packing != "concatenate"
        self._batch_transform = (
            TransformChain(data.batch_transform, vocab_size, "data.batch_transform")
            if data.batch_transform is not None
            else None
        )

    @abstractmethod
    def rows(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens of samples (B,) int64 of the run, and where documents start.

        Returns:
            token ids, (B, seq_length + 1) int64, :data:`PADDING` where there is none; and (B, seq_length + 1) bool,
            true at the first token of a document and the first place of padding.
        """

    @abstractmethod
    def contents(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, k) int64: which parts of which documents samples (m,) int64 hold, in any fixed form."""

    @abstractmethod
    def use_cache(self, folder: Path, num_bytes: int) -> None:
        """Keep finished rows in files under ``folder``, and read them from there.

        Raises:
            EnvironmentFault: nothing can be written there.
        """

    @abstractmethod
    def warm_up(self, samples: NDArray[np.int64]) -> None:
        """Tell the system that these samples will be read soon. Does not wait."""

    @property
    @abstractmethod
    def caches(self) -> Sequence[SampleCache]:
        """Where finished rows are kept; empty where none are."""

    def order_hash(self) -> str:
        """Hex SHA-256 of what the first samples hold: equal for runs that see the same data in the same order, whatever
        their ranks, workers and restarts."""
        first = np.arange(min(self.num_samples, HASHED_SAMPLES), dtype=np.int64)
        return hashlib.sha256(np.ascontiguousarray(self.contents(first), dtype="<i8").tobytes()).hexdigest()

    def batch(self, samples: NDArray[np.int64]) -> Batch:
        """The batch of samples (B,) int64 of the run, one row each.

        Held-out samples beyond one pass are there to fill a batch: they carry no loss.

        Raises:
            DataError: a transform's fault.
        """
        beyond = samples >= self.num_samples if self.split == "validation" else None
        tokens, starts = self.rows(samples)
        if self._batch_transform is not None:
            padding = tokens == PADDING
            given = np.where(padding, self.padding_id, tokens)
            changed = self._batch_transform.apply(given, f"samples {samples[0]} to {samples[-1]}", self.times)
            tokens = np.where(padding, PADDING, changed)
        with self.times.of(COLLATE):
            return self.pack(tokens, starts, without_loss=beyond)

    def pack(
        self,
        row_tokens: NDArray[np.int64],
        starts: NDArray[np.bool_],
        *,
        without_loss: NDArray[np.bool_] | None = None,
    ) -> Batch:
        """The batch of rows (B, seq_length + 1), as :meth:`rows` gives them.

        Args:
            without_loss: (B,) bool, rows that carry no loss; None: each does.
        """
        has_padding = bool((row_tokens[:, -1] == PADDING).any())  # padding ends a row
        padding = row_tokens == PADDING if has_padding else None
        if padding is not None:
            row_tokens = np.where(padding, self.padding_id, row_tokens)
        token_ids, labels = row_tokens[:, :-1], row_tokens[:, 1:]
        loss_mask = ~starts[:, 1:] if self._mask_borders else np.ones(token_ids.shape, dtype=np.bool_)
        if padding is not None:
            loss_mask &= ~padding[:, 1:]
        if without_loss is not None:
            loss_mask[without_loss] = False
        first = starts[:, :-1].copy()
        first[:, 0] = True
        rows, columns = token_ids.shape
        flat = np.flatnonzero(first)
        ends = np.empty(len(flat) + 1, dtype=np.int64)
        ends[:-1], ends[-1] = flat, rows * columns
        position_ids = self._positions(np.diff(ends), rows, columns)
        if not self._reset_attention_mask:
            ends = np.arange(rows + 1) * columns
        lengths = np.diff(ends)
        return Batch(
            token_ids=torch.from_numpy(token_ids.copy()),
            labels=torch.from_numpy(labels.copy()),
            loss_mask=torch.from_numpy(loss_mask),
            position_ids=torch.from_numpy(position_ids.reshape(rows, columns)),
            cu_seqlens=torch.from_numpy(ends.astype(np.int32)),
            num_valid_tokens=int(np.count_nonzero(loss_mask)),
            sum_squared_lengths=int(lengths @ lengths),
        )

    def _positions(self, lengths: NDArray[np.int64], rows: int, columns: int) -> NDArray[np.int64]:
        """(rows * columns,) int64 places within documents of ``lengths`` (n,) int64, or within rows."""
        if len(self._row_positions) < columns:
            self._row_positions = np.arange(columns)
        within_row = self._row_positions[:columns]
        if not self._reset_position_ids:
            return np.tile(within_row, rows)
        if len(lengths) * TOKENS_WORTH_A_COPY <= rows * columns:
            return np.concatenate([within_row[:length] for length in lengths.tolist()])
        positions = np.arange(rows * columns)
        positions -= (np.cumsum(lengths) - lengths).repeat(lengths)
        return positions
