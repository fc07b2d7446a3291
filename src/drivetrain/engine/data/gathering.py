"""Encoded blocks, in their order, as a corpus that grows part by part."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import accumulate

import numpy as np

from drivetrain.engine.data.duplicates import SeenDocuments
from drivetrain.engine.data.encoding import Encoded, Encoder
from drivetrain.engine.data.indexed import LONGEST_DOCUMENT
from drivetrain.engine.data.partial import RECORD, PartialCorpus
from drivetrain.engine.data.preparation_workers import encoded_in_order
from drivetrain.engine.data.progress import Progress, ProgressCallback
from drivetrain.engine.data.sources.reading import blocks_of
from drivetrain.engine.data.sources.source import Block, Report, Source
from drivetrain.errors import DataError, EnvironmentFault

__all__ = ["gather"]

DUPLICATES = "duplicate documents"


def gather(
    partial: PartialCorpus,
    sources: Sequence[Source],
    encoder: Encoder,
    *,
    drop_duplicates: bool,
    workers: int,
    part_bytes: int,
    progress: ProgressCallback,
) -> None:
    """Encode what is left of ``sources`` into ``partial``; all of it is in finished parts then.

    Args:
        partial: taken up.
        part_bytes: bytes of the inputs after which a part is finished.
    Raises:
        DataError: see ``Encoder.encode``.
        EnvironmentFault: a process was killed; finished parts, and all that was encoded, are kept.
        OSError: no room; finished parts are kept.
    """
    before = list(accumulate((source.size for source in sources), initial=0))
    seen = SeenDocuments()
    seen.add(np.ascontiguousarray(partial.records()["digest"]))
    finished = partial.totals.consumed
    progress(Progress("encoding", finished, before[-1], "bytes"))
    blocks = blocks_of(sources, encoder.reading, partial.totals.position)
    dirty = False
    with closing(encoded_in_order(encoder, blocks, workers)) as encoded_blocks:
        try:
            for block, encoded in encoded_blocks:
                consumed = before[block.after.source] + block.read_bytes
                _add(partial, seen, block, encoded, consumed, drop_duplicates)
                dirty = True
                progress(Progress("encoding", min(consumed, before[-1]), before[-1], "bytes"))
                if consumed - finished >= part_bytes:
                    partial.finish_part()
                    finished, dirty = consumed, False
        except (KeyboardInterrupt, EnvironmentFault):
            if dirty:
                partial.finish_part()
            raise
    if dirty:
        partial.finish_part()
    progress(Progress("encoding", before[-1], before[-1], "bytes"))


def _add(
    partial: PartialCorpus,
    seen: SeenDocuments,
    block: Block,
    encoded: Encoded,
    consumed: int,
    drop_duplicates: bool,
) -> None:
    """Add a block. The totals change at once at the end: an interrupt finds them with all of it, or without."""
    tokens, lengths, digests = encoded.tokens, encoded.lengths, encoded.digests
    text_bytes, open_tokens = encoded.text_bytes, partial.totals.open_tokens
    report = Report(partial.totals.report.skipped.copy(), list(partial.totals.report.broken))
    report.add(encoded.report)
    duplicates = partial.totals.duplicates
    if encoded.is_open:
        # Whether the document is left out was not decided where it ends: nothing is added to `seen` before.
        dropped = np.array([drop_duplicates and digests[0].tobytes() in seen])
    else:
        again = seen.add(digests)
        duplicates += int(again.sum())
        dropped = again & drop_duplicates
    if dropped.any():
        tokens = tokens[np.repeat(~dropped, lengths)]
        lengths, digests, text_bytes = lengths[~dropped], digests[~dropped], text_bytes[~dropped]
        if not encoded.is_open:
            report.skipped[DUPLICATES] += int(dropped.sum())
    records = np.empty(len(lengths), dtype=RECORD)
    records["digest"], records["length"] = digests, lengths
    if encoded.is_open:
        records, open_tokens = records[:0], (open_tokens or 0) + len(tokens)
    elif open_tokens is not None:
        # The last part of a document; where it is left out there is no record of it.
        if len(records):
            _require_length(open_tokens + len(tokens))
            records["length"] += open_tokens
        open_tokens = None
    partial.append(tokens, records)
    partial.totals = replace(
        partial.totals,
        tokens=partial.totals.tokens + len(tokens),
        documents=partial.totals.documents + len(records),
        text_bytes=partial.totals.text_bytes + int(text_bytes.sum()),
        max_id=max(partial.totals.max_id, int(tokens.max()) if len(tokens) else -1),
        duplicates=duplicates,
        open_tokens=open_tokens,
        consumed=consumed,
        position=block.after,
        report=report,
    )


def _require_length(length: int) -> None:
    if length > LONGEST_DOCUMENT:
        raise DataError(f"a document has {length:,} tokens; the format holds {LONGEST_DOCUMENT:,}")
