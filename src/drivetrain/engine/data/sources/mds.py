"""MDS as text: one document a sample, from one column."""

from collections.abc import Iterator

from drivetrain.engine.data.sources.mds_shards import open_shard
from drivetrain.engine.data.sources.source import Block, Position, Reading, Sample, Samples, Source
from drivetrain.errors import DataError

__all__ = ["blocks"]

TEXT = {"str": "text", "bytes": "text", "json": "json"}
"""How a value of an encoding is read."""


def blocks(source: Source, start: Position, reading: Reading) -> Iterator[Block]:
    """Samples of the shard ``source`` from number ``start.offset`` on, about ``reading.block_bytes`` a block.

    Raises:
        DataError: a damaged shard, pickles, no such column, or no column of text.
        EnvironmentFault: zstandard without pyarrow.
    """
    shard = open_shard(source.path, source.checksum)
    column = reading.json_key
    if column not in shard.columns:
        ids = next((one for one in ("input_ids", "tokens") if one in shard.columns), None)
        hint = f"; {ids} are tokens: train on the folder as data.data_path" if ids else ""
        raise DataError(f"{source.path}: no column {column!r}; its columns: {', '.join(shard.columns)}{hint}")
    encoding = shard.columns[column]
    form = TEXT.get(encoding)
    if form is None:
        raise DataError(f"{source.path}: column {column!r} is {encoding}, expected {', '.join(TEXT)}")
    held: list[Sample] = []
    size, number = 0, start.offset
    for number, value in enumerate(shard.values(column, start.offset), start=start.offset + 1):
        held.append(Sample(f"sample {number - 1}", form, value))
        size += len(value)
        if size >= reading.block_bytes:
            yield _block(source, start.source, held, number, shard.num_samples)
            held, size = [], 0
    if held:
        yield _block(source, start.source, held, number, shard.num_samples)


def _block(source: Source, at: int, held: list[Sample], number: int, count: int) -> Block:
    return Block(
        Samples(source.path, tuple(held)), Position(at, number), source.size * number // max(1, count)
    )
