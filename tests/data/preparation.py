"""Helpers for tests of ``data prepare``: a tokenizer without learning, small blocks and parts, whole corpora."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.meta import CorpusMeta
from drivetrain.engine.data.prepare import Options, prepare_sources
from drivetrain.engine.data.progress import ProgressCallback, silent
from drivetrain.engine.data.sources.discovery import discover

SUFFIXES = (".bin", ".idx", ".meta.json", ".tokenizer.json")
SMALL = Options(block_bytes=200, part_bytes=500)


class Killed(BaseException):
    """Ends the work as a kill does: nothing that handles errors sees it."""


def byte_tokenizer() -> Tokenizer:
    """Each byte is a token; id 256 is the end of a document."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def make(
    inputs: Sequence[str | Path],
    prefix: Path,
    options: Options = SMALL,
    progress: ProgressCallback = silent,
    **changes: object,
) -> CorpusMeta:
    """Prepare ``inputs`` with the byte tokenizer; ``changes`` of ``options``."""
    sources, skipped = discover(inputs)
    return prepare_sources(
        sources,
        prefix,
        tokenizer=byte_tokenizer(),
        vocab_size=None,
        options=replace(options, **changes),  # type: ignore[arg-type]
        described_as=tuple(map(str, inputs)),
        skipped=skipped,
        progress=progress,
    )


def content(prefix: Path) -> dict[str, bytes]:
    """All files of a corpus by suffix."""
    return {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in SUFFIXES}


def decoded(prefix: Path) -> list[str]:
    """The texts of a corpus; each document ends with the end of a document."""
    corpus = Corpus.open(prefix)
    tokenizer = corpus.require_tokenizer()
    texts = []
    for document in corpus.reader:
        assert document[-1] == corpus.eod_id
        texts.append(tokenizer.decode(document[:-1].tolist()))
    return texts


def killing_after(calls: int) -> Callable[[object], None]:
    """A progress callback that kills the work at its ``calls``-th call."""
    left = calls

    def progress(_: object) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            raise Killed

    return progress
