"""Text to an indexed corpus with its tokenizer and its facts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from drivetrain.addresses import require_apart, withheld
from drivetrain.archive.atomic import write_fault, write_text
from drivetrain.engine.data.encoding import Encoder
from drivetrain.engine.data.gathering import gather
from drivetrain.engine.data.indexed import index_path
from drivetrain.engine.data.meta import CorpusMeta, fingerprints, write_meta
from drivetrain.engine.data.order import hash64
from drivetrain.engine.data.partial import PartialCorpus, partial_path
from drivetrain.engine.data.preparation_workers import available_cores
from drivetrain.engine.data.progress import Progress, ProgressCallback, silent
from drivetrain.engine.data.remote.cache import remote_cache
from drivetrain.engine.data.remote.inputs import bring_input
from drivetrain.engine.data.remote.store import is_url
from drivetrain.engine.data.sources.discovery import discover
from drivetrain.engine.data.sources.reading import blocks_of, texts_of
from drivetrain.engine.data.sources.source import Reading, Report, Source
from drivetrain.engine.data.tokenizer import (
    cuts_behind_line_breaks,
    end_of_document_id,
    load_tokenizer,
    token_byte_lengths,
    tokenizer_hash,
    train_tokenizer,
    vocabulary_size,
)
from drivetrain.engine.data.work import (
    Work,
    discard,
    discard_without_parts,
    has_parts,
    only_this_process,
    take_up_or_begin,
)
from drivetrain.errors import DataError, DrivetrainError

__all__ = ["DEFAULT_VOCABULARY", "Options", "prepare", "prepare_sources", "tokenizer_path_of"]

DEFAULT_VOCABULARY = 8192
"""Ids of a tokenizer that is trained when neither a size nor a file was given."""
TOKENIZER_TEXT_BYTES = 200_000_000
"""A tokenizer learns from about this much text; larger inputs are sampled by document."""
BYTES_WORTH_PROCESSES = 1 << 23
"""Smaller inputs are encoded before processes would have started."""
SAMPLING_KEY = 0x746F6B656E


def tokenizer_path_of(prefix: str | Path) -> Path:
    """Where the tokenizer of a prepared corpus is kept."""
    return Path(f"{prefix}.tokenizer.json")


@dataclass(frozen=True)
class Options:
    """How a corpus is prepared.

    Attributes:
        json_key: key of the text in JSON lines and WebDataset, and its column in Parquet, Arrow and MDS.
        eod_token: token that ends each document; by default the first usual name the tokenizer has.
        drop_duplicates: of equal documents the first alone is kept.
        strict: a broken JSON line, or a sample without text, is an error, instead of being counted and left out.
        workers: processes that encode. 1: this one alone, where the tokenizer uses threads; None: as many as there
            are cores, if the inputs are worth it. Processes import the script that calls: it needs the usual
            ``if __name__ == "__main__"``. The corpus is the same to the byte.
        block_bytes: about as much text is encoded at once.
        part_bytes: bytes of the inputs after which a part is finished: what was made of them is kept, should the work
            be ended.
    """

    json_key: str = "text"
    eod_token: str | None = None
    drop_duplicates: bool = False
    strict: bool = False
    workers: int | None = 1
    block_bytes: int = 1 << 20
    part_bytes: int = 1 << 24


def prepare(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    *,
    vocab_size: int | None = None,
    tokenizer_path: str | Path | None = None,
    json_key: str = "text",
    eod_token: str | None = None,
    drop_duplicates: bool = False,
    strict: bool = False,
    workers: int | None = 1,
    cache_bytes: int | None = None,
    progress: ProgressCallback = silent,
) -> CorpusMeta:
    """Write ``<output_prefix>.bin``, ``.idx``, ``.meta.json`` and ``.tokenizer.json``.

    The same inputs give the same bytes. Nothing appears under the final names before all is encoded. Work that was
    ended midway, even by ``kill -9``, goes on where it was when it is asked for again (see ``partial``).

    Args:
        inputs: text files (one document each), folders, JSON lines (also .gz and .zst), Parquet, Arrow, MDS and
            WebDataset; by path or URL.
        output_prefix: path without suffix; its folder is made.
        vocab_size: train byte-level BPE of this many ids on the inputs; DEFAULT_VOCABULARY when neither
            this nor ``tokenizer_path`` is given.
        tokenizer_path: a tokenizer.json to use instead.
        json_key, eod_token, drop_duplicates, strict, workers: see :class:`Options`.
        cache_bytes: most bytes on disk of what URLs name; by default as ``data.remote_cache_bytes``.
        progress: called as the work proceeds.
    Raises:
        DataError: inputs missing, damaged or empty; tokenizer missing or unusable.
        EnvironmentFault: no room on the disk, no pyarrow for Parquet; a process was killed.
    """
    if vocab_size is not None and tokenizer_path is not None:
        raise DataError("give a vocabulary size to train a tokenizer, or a tokenizer file, not both")
    given = load_tokenizer(tokenizer_path) if tokenizer_path is not None else None
    with _brought_here(inputs, cache_bytes, progress) as paths:
        sources, skipped = discover(paths)
        return prepare_sources(
            sources,
            output_prefix,
            tokenizer=given,
            vocab_size=DEFAULT_VOCABULARY if vocab_size is None and given is None else vocab_size,
            options=Options(json_key, eod_token, drop_duplicates, strict, workers),
            described_as=tuple(withheld(str(one)) for one in inputs),
            skipped=skipped,
            progress=progress,
        )


@contextmanager
def _brought_here(
    inputs: Sequence[str | Path], cache_bytes: int | None, progress: ProgressCallback
) -> Iterator[list[str | Path]]:
    """The inputs as paths of this machine; what URLs name is held meanwhile."""
    require_apart(str(one) for one in inputs if is_url(one))
    with ExitStack() as held:
        paths: list[str | Path] = []
        for given in inputs:
            if is_url(given):
                brought = bring_input(str(given), remote_cache(num_bytes=cache_bytes), progress)
                held.callback(brought.close)
                paths.append(brought.path)
            else:
                paths.append(given)
        yield paths


def prepare_sources(
    sources: Sequence[Source],
    output_prefix: str | Path,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int | None,
    options: Options = Options(),
    described_as: tuple[str, ...],
    skipped: Counter[str],
    progress: ProgressCallback = silent,
) -> CorpusMeta:
    """``prepare`` for files already found; trains a tokenizer of ``vocab_size`` when given none."""
    _require_prefix(output_prefix)
    if options.workers is not None and options.workers < 1:
        raise DataError(f"{options.workers} processes cannot encode; the smallest number is 1")
    total = sum(source.size for source in sources)
    share = min(1.0, TOKENIZER_TEXT_BYTES / max(total, 1)) if tokenizer is None else None
    given = tokenizer.to_str(pretty=False) if tokenizer is not None else None
    with _disk(output_prefix), _unfinished(output_prefix, progress):
        work = Work(
            sources=tuple(sources),
            tokenizer=given,
            vocab_size=vocab_size,
            tokenizer_text_bytes=TOKENIZER_TEXT_BYTES,
            json_key=options.json_key,
            eod_token=options.eod_token,
            drop_duplicates=options.drop_duplicates,
            strict=options.strict,
        )
        finished = take_up_or_begin(output_prefix, work, progress)
        if finished is not None:
            return finished
        if tokenizer is None:
            tokenizer = _learned(sources, output_prefix, vocab_size, share, options, progress)
        eod_id = end_of_document_id(tokenizer, options.eod_token)
        if eod_id is None:
            raise DataError(
                "the tokenizer has no end-of-document token under a usual name; name one (--eod-token)"
            )
        encoder = Encoder(
            tokenizer.to_str(pretty=False),
            vocabulary_size(tokenizer),
            eod_id,
            _reading(options, split_long=_may_be_cut(tokenizer)),
        )
        with PartialCorpus(output_prefix, encoder.dtype) as partial:
            _say_what_is_there(partial, progress)
            gather(
                partial,
                sources,
                encoder,
                drop_duplicates=options.drop_duplicates,
                workers=_processes(options.workers, total),
                part_bytes=options.part_bytes,
                progress=progress,
            )
            totals = partial.totals
            if not totals.documents:
                # All was read, and its parts hold nothing: there is nothing to go on from either.
                discard(output_prefix)
                raise DataError(_empty(sources, totals.report))
            meta = CorpusMeta(
                origin="prepared",
                documents=totals.documents,
                tokens=totals.tokens,
                max_id=totals.max_id,
                files=fingerprints(*partial.seal()),
                vocab_size=encoder.vocab_size,
                vocab_size_requested=vocab_size,
                tokenizer_sha256=tokenizer_hash(tokenizer),
                eod_id=eod_id,
                text_bytes=totals.text_bytes,
                sources=described_as,
                skipped=dict(sorted((skipped + totals.report.skipped).items())),
                duplicates=totals.duplicates,
                broken_lines=tuple(totals.report.broken),
                tokenizer_text_share=share,
            )
            # The old index goes first and the new one comes last, so that the facts never belong to others.
            index_path(output_prefix).unlink(missing_ok=True)
            write_text(tokenizer_path_of(output_prefix), tokenizer.to_str(pretty=True))
            write_meta(output_prefix, meta)
            partial.publish()
    return meta


def _require_prefix(prefix: str | Path) -> None:
    if str(prefix).endswith(("/", "\\")) or Path(prefix).name in ("", ".", ".."):
        raise DataError(f"the output {str(prefix)!r} is a folder; add a name, as in corpora/mine")
    for suffix in (".bin", ".idx"):
        if str(prefix).endswith(suffix):
            right = str(prefix).removesuffix(suffix)
            raise DataError(f"the output is a prefix: {right!r}, not {str(prefix)!r}")


def _processes(asked: int | None, total: int) -> int:
    """Processes for ``total`` bytes of inputs."""
    if asked is not None:
        return asked
    return available_cores() if total >= BYTES_WORTH_PROCESSES else 1


def _may_be_cut(tokenizer: Tokenizer) -> bool:
    """Whether the ids of a long document are those of its parts."""
    return token_byte_lengths(tokenizer).values is not None and cuts_behind_line_breaks(tokenizer)


def _reading(options: Options, *, split_long: bool) -> Reading:
    return Reading(options.json_key, options.strict, split_long, options.block_bytes)


def _say_what_is_there(partial: PartialCorpus, progress: ProgressCallback) -> None:
    damage = partial.take_up()
    if damage is not None:
        progress(Progress(f"{damage} in {partial.folder}: it is encoded again, with all behind it"))
    if partial.num_parts:
        progress(
            Progress(
                f"going on: {partial.num_parts} finished parts are sound ({partial.totals.documents:,} documents, "
                f"{partial.totals.tokens:,} tokens)"
            )
        )


def _learned(
    sources: Sequence[Source],
    prefix: str | Path,
    vocab_size: int | None,
    share: float | None,
    options: Options,
    progress: ProgressCallback,
) -> Tokenizer:
    """The tokenizer of the inputs: learned before the work was ended, or now."""
    path = partial_path(prefix) / "tokenizer.json"
    if path.exists():
        return load_tokenizer(path)
    assert vocab_size is not None
    assert share is not None
    tokenizer = _train(sources, vocab_size, share, options, progress)
    write_text(path, tokenizer.to_str(pretty=False))
    return tokenizer


def _train(
    sources: Sequence[Source],
    vocab_size: int,
    share: float,
    options: Options,
    progress: ProgressCallback,
) -> Tokenizer:
    before = list(accumulate((source.size for source in sources), initial=0))
    threshold = np.uint64(min(2**64 - 1, int(share * 2**64)))
    report = Report()
    # What is learned here is byte-level.
    reading = _reading(options, split_long=True)
    number = seen = 0

    def texts() -> Iterator[str]:
        nonlocal number, seen
        for block in blocks_of(sources, reading):
            for text in texts_of(block.content, reading, report):
                if not text:
                    continue
                if (
                    share == 1.0
                    or number == 0
                    or hash64(np.array([number], np.uint64), SAMPLING_KEY)[0] < threshold
                ):
                    seen += 1
                    yield text
                number += 1
            consumed = before[block.after.source] + block.read_bytes
            progress(Progress("learning the tokenizer", min(consumed, before[-1]), before[-1], "bytes"))
        progress(Progress("learning the tokenizer", before[-1], before[-1], "bytes"))

    tokenizer = train_tokenizer(texts(), vocab_size)
    if not seen:
        raise DataError(_empty(sources, report))
    return tokenizer


def _empty(sources: Sequence[Source], report: Report) -> str:
    names = ", ".join(str(source.path) for source in sources[:3])
    left_out = "; ".join(f"{count:,} {reason}" for reason, count in sorted(report.skipped.items()))
    return (
        f"the corpus is empty: no text in {len(sources)} file(s){f' ({names})' if names else ''}"
        f"{f'; left out: {left_out}' if left_out else ''}"
        f"{f'; the first broken line is {report.broken[0]}' if report.broken else ''}"
    )


def _kept(prefix: str | Path) -> str:
    return f"finished parts are kept in {partial_path(prefix)}, and the same command goes on from there"


@contextmanager
def _unfinished(prefix: str | Path, progress: ProgressCallback) -> Iterator[None]:
    """Hold the folder of unfinished work. After bad input or a full disk it stays if parts of it are finished."""
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    with only_this_process(prefix):
        try:
            yield
        except KeyboardInterrupt:
            progress(
                Progress(f"interrupted: {_kept(prefix) if has_parts(prefix) else 'no part was finished'}")
            )
            raise
        except (DrivetrainError, OSError):
            discard_without_parts(prefix)
            raise


@contextmanager
def _disk(prefix: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        consequence = f"no corpus was written{f'; {_kept(prefix)}' if has_parts(prefix) else ''}"
        raise write_fault(Path(f"{prefix}.bin"), error, consequence) from error
