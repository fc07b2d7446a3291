"""Small corpora made on the spot."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from drivetrain.config import RunConfig
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.indexed import IndexedWriter

WriteCorpus = Callable[..., str]


@pytest.fixture
def write_corpus(tmp_path: Path) -> WriteCorpus:
    """Write documents of token ids as a corpus of another tool: .bin and .idx only. Returns the prefix."""

    def write(documents: Sequence[Sequence[int]], vocab_size: int = 100, name: str = "corpus") -> str:
        prefix = tmp_path / name
        with IndexedWriter(prefix, vocab_size) as writer:
            for document in documents:
                writer.add(list(document))
            writer.commit()
        return str(prefix)

    return write


@pytest.fixture
def make_config() -> Callable[..., RunConfig]:
    """A run configuration with a tiny model; keyword arguments are sections."""

    def make(vocab_size: int = 100, seq_length: int = 8, **sections: dict[str, object]) -> RunConfig:
        model = {
            "num_layers": 1,
            "hidden_size": 8,
            "num_attention_heads": 1,
            "vocab_size": vocab_size,
            "seq_length": seq_length,
        }
        return RunConfig.model_validate({"model": model, **sections})

    return make


@pytest.fixture
def numbered_corpus(write_corpus: WriteCorpus) -> Corpus:
    """60 documents of 1 to 40 tokens. Every token id occurs once, so that tokens can be told apart."""
    documents, first = [], 0
    for index in range(60):
        length = 1 + (index * 17) % 40
        documents.append(range(first, first + length))
        first += length
    return Corpus.open(write_corpus(documents, vocab_size=first), vocab_size=first)
