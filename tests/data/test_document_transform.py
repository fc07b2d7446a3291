"""``data.transform``: found by its path, applied to whole documents, refused when it breaks its contract."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from drivetrain.config import DataConfig, RunConfig
from drivetrain.engine.data import transform as subject
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.sequences import Sequences
from drivetrain.engine.data.transform import TransformedDocuments, resolve_transform
from drivetrain.errors import DataError


@pytest.fixture
def corpus(write_corpus: Callable[..., str]) -> Corpus:
    return Corpus.open(write_corpus([[1, 2, 3], range(10, 30), [7]]), vocab_size=100)


def read(corpus: Corpus, name: str) -> TransformedDocuments:
    return TransformedDocuments(corpus.reader, f"data_transforms:{name}", corpus.vocab_size)


def test_both_ways_of_writing_a_path_lead_to_the_callable() -> None:
    first, second = (
        resolve_transform(path) for path in ("data_transforms:add_one", "data_transforms.add_one")
    )
    assert first is second


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_in_this_folder.py").write_text("def same(ids):\n    return ids\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    assert resolve_transform("mine_in_this_folder:same")(np.array([1])).tolist() == [1]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "module 'no_such_module' cannot be imported"),
        ("data_transforms:absent", "has no 'absent'"),
        ("data_transforms:NOT_CALLABLE", "is int, not callable"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        resolve_transform(path)


def test_documents_are_transformed_whole_and_the_corpus_stays_as_it_is(corpus: Corpus) -> None:
    assert read(corpus, "add_one").document(0).tolist() == [2, 3, 4]
    documents = read(corpus, "reverse_in_place")
    assert documents.document(1).tolist() == list(range(29, 9, -1))
    assert documents.document(1).tolist() == list(range(29, 9, -1))
    assert corpus.reader.document(1).tolist() == list(range(10, 30))
    assert read(corpus, "to_32_bits").document(0).dtype == np.int64


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shorten", r"returned shape \(2,\), expected \(3,\)"),
        ("to_list", "returned list, expected an int64 array"),
        ("to_float", "returned float64, expected int64"),
        ("beyond", r"returned id 1000000 at position 0, outside model\.vocab_size = 100"),
        ("negative", "returned id -2 at position 0"),
        ("fail", "raised KeyError: 'no such thing'"),
        ("leave", "raised SystemExit: 3"),
    ],
)
def test_a_broken_contract_names_the_callable_and_the_document(
    corpus: Corpus, name: str, message: str
) -> None:
    with pytest.raises(DataError, match=rf"'data_transforms:{name}', document 0: it {message}"):
        read(corpus, name).document(0)


def test_memory_of_transformed_documents_is_bounded(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "CACHE_BYTES", 100)
    documents = read(corpus, "add_one")
    for index in (0, 1, 2, 0, 1):
        documents.document(index)
    assert list(documents._cache) == [1]
    assert documents._cached_bytes == 160


def test_it_travels_to_a_process_without_its_cache(corpus: Corpus) -> None:
    documents = read(corpus, "add_one")
    documents.document(1)
    copy = pickle.loads(pickle.dumps(documents))  # noqa: S301 - our own bytes, as multiprocessing sends them
    assert not copy._cache
    assert copy.document(0).tolist() == [2, 3, 4]


def test_samples_are_those_of_the_transformed_documents(
    numbered_corpus: Corpus, make_config: Callable[..., RunConfig]
) -> None:
    plain = Sequences(numbered_corpus, DataConfig(), "train", 8, 1)
    data = DataConfig(transform="data_transforms:to_32_bits")
    same = Sequences(numbered_corpus, data, "train", 8, 1)
    everything = np.arange(plain.num_samples)
    assert np.array_equal(plain.read(everything)[0], same.read(everything)[0])
    assert np.array_equal(plain.read(everything)[1], same.read(everything)[1])

    reversed_ = Sequences(
        numbered_corpus, DataConfig(transform="data_transforms:reverse_in_place"), "train", 8, 1
    )
    tokens, starts = reversed_.read(everything)
    assert not np.array_equal(tokens, plain.read(everything)[0])
    # Ids rise by one inside a document, so reversed they fall by one.
    inside = ~starts[:, 1:]
    assert (tokens[:, 1:] - tokens[:, :-1])[inside].tolist() == [-1] * int(inside.sum())
