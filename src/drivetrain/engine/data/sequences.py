"""Samples: which tokens the i-th sequence of a run holds, and the batch made of several.

The documents of a split are concatenated once, in a seeded order, into a stream that is cut into windows
of ``seq_length + 1`` tokens with stride ``seq_length``: every token but the first of the stream is
predicted exactly once an epoch; the last ``(tokens - 1) % seq_length`` are dropped. Windows come in an
order that is shuffled anew each epoch (held-out windows: always in order). Sample i of a run is a
function of the corpus, the configuration and i alone: not of ranks, workers, or where a run was resumed.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from drivetrain.config import DataConfig
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.order import derive_key, permute
from drivetrain.engine.data.split import Split, split_documents
from drivetrain.engine.data.transform import TransformedDocuments
from drivetrain.engine.model.batch import Batch
from drivetrain.errors import DataError

__all__ = ["Sequences"]

WINDOW_KEY = 0x77696E646F77


class Sequences:
    """The samples of one split of a corpus. Picklable: a worker maps the corpus itself.

    Args:
        corpus: an opened corpus.
        data: split, borders and transform.
        split: ``train`` or ``validation``.
        seq_length: tokens in a sample.
        seed: of the order of training samples (:func:`drivetrain.config.data_seed`).
    Attributes:
        num_samples: windows in one epoch.
        num_tokens: tokens of the split.
    Raises:
        DataError: too few tokens for one sample; a transform that cannot be found.
    """

    def __init__(self, corpus: Corpus, data: DataConfig, split: Split, seq_length: int, seed: int) -> None:
        self.split = split
        self.seq_length = seq_length
        self.seed = seed
        self._reset_attention_mask = data.reset_attention_mask
        self._reset_position_ids = data.reset_position_ids
        self._eod_mask_loss = data.eod_mask_loss
        self._eod_id = corpus.eod_id
        self._reader = corpus.reader
        self._transformed = (
            TransformedDocuments(corpus.reader, data.transform, corpus.vocab_size)
            if data.transform is not None
            else None
        )
        self._pieces = split_documents(corpus.reader.lengths(), data.split, split, seed)
        self._stream = np.zeros(len(self._pieces) + 1, dtype=np.int64)
        np.cumsum(self._pieces.lengths, out=self._stream[1:])
        self._sources = corpus.reader.document_offsets[self._pieces.documents] + self._pieces.skips
        self.num_tokens = int(self._stream[-1])
        self.num_samples = max(0, (self.num_tokens - 1) // seq_length)
        if self.num_samples == 0:
            raise DataError(
                f"the {split} split of {corpus.prefix!r} has {self.num_tokens:,} tokens in "
                f"{len(self._pieces):,} documents; one sample takes {seq_length + 1:,} "
                "(model.seq_length + 1). Use a larger corpus, a shorter model.seq_length, "
                f"or another data.split (training,validation; now {data.split!r})"
            )

    def windows(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n,) int64 windows of the stream that samples (n,) int64 of the run show."""
        epochs, within = np.divmod(samples, self.num_samples)
        if self.split == "validation":
            return within
        result = np.empty_like(within)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            key = derive_key(WINDOW_KEY, self.seed, int(epoch))
            result[chosen] = permute(within[chosen], self.num_samples, key)
        return result

    def read(self, windows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens of windows, and where documents start.

        Args:
            windows: (B,) int64 in ``[0, num_samples)``.
        Returns:
            token ids, (B, seq_length + 1) int64; and (B, seq_length + 1) bool, true at the first token of
            a document: where the index says so, or after an end-of-document id inside one.
        """
        length = self.seq_length + 1
        tokens = np.empty((len(windows), length), dtype=np.int64)
        starts = np.zeros((len(windows), length), dtype=np.bool_)
        for row, window in enumerate(windows.tolist()):
            begin = window * self.seq_length
            first = int(np.searchsorted(self._stream, begin, side="right")) - 1
            last = int(np.searchsorted(self._stream, begin + length, side="left"))
            edges = self._stream[first : last + 1] - begin
            inside = edges[:-1]
            starts[row, inside[inside >= 0]] = True
            if self._transformed is None:
                edges = edges.clip(0, length)
                shift = self._sources[first:last] - self._stream[first:last] + begin
                at = np.arange(length, dtype=np.int64) + np.repeat(shift, np.diff(edges))
                tokens[row] = self._reader.tokens[at]
            else:
                self._read_transformed(tokens[row], range(first, last), begin)
        if self._eod_id is not None:
            starts[:, 1:] |= tokens[:, :-1] == self._eod_id
        return tokens, starts

    def _read_transformed(self, row: NDArray[np.int64], pieces: range, begin: int) -> None:
        assert self._transformed is not None
        for piece in pieces:
            start = max(int(self._stream[piece]), begin)
            stop = min(int(self._stream[piece + 1]), begin + len(row))
            skip = int(self._pieces.skips[piece]) + start - int(self._stream[piece])
            document = self._transformed.document(int(self._pieces.documents[piece]))
            row[start - begin : stop - begin] = document[skip : skip + stop - start]

    def batch(self, samples: NDArray[np.int64]) -> Batch:
        """The batch of samples (B,) int64 of the run, one row each.

        Held-out samples beyond one pass are there to fill a batch: they carry no loss.
        """
        beyond = samples >= self.num_samples if self.split == "validation" else None
        return self.pack(*self.read(self.windows(samples)), without_loss=beyond)

    def pack(
        self,
        window_tokens: NDArray[np.int64],
        starts: NDArray[np.bool_],
        *,
        without_loss: NDArray[np.bool_] | None = None,
    ) -> Batch:
        """The batch of windows (B, seq_length + 1), as :meth:`read` gives them.

        Args:
            without_loss: (B,) bool, rows that carry no loss; None: each does.
        """
        token_ids, labels = window_tokens[:, :-1], window_tokens[:, 1:]
        loss_mask = np.ones(token_ids.shape, dtype=np.bool_)
        if self._eod_mask_loss:
            # The token after an end of document is the first of the next.
            loss_mask &= ~starts[:, 1:]
        if without_loss is not None:
            loss_mask[without_loss] = False
        first = starts[:, :-1].copy()
        first[:, 0] = True
        rows, columns = token_ids.shape
        flat = np.flatnonzero(first)
        if self._reset_position_ids:
            position_ids = np.arange(rows * columns) - np.repeat(flat, np.diff(flat, append=rows * columns))
        else:
            position_ids = np.tile(np.arange(columns), rows)
        borders = flat if self._reset_attention_mask else np.arange(rows) * columns
        cu_seqlens = np.append(borders, rows * columns)
        return Batch(
            token_ids=torch.from_numpy(token_ids.copy()),
            labels=torch.from_numpy(labels.copy()),
            loss_mask=torch.from_numpy(loss_mask),
            position_ids=torch.from_numpy(position_ids.reshape(rows, columns)),
            cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
            num_valid_tokens=int(loss_mask.sum()),
            sum_squared_lengths=int((np.diff(cu_seqlens) ** 2).sum()),
        )
