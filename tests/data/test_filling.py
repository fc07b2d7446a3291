"""Rows that are filled in one pass: equal to rows filled token by token; and what the system is told of them."""

import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from drivetrain.config import DataConfig
from drivetrain.engine.data import filling, samples
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.data.sequences import Sequences
from drivetrain.engine.data.warm_up import PageCache
from drivetrain.engine.model.batch import Batch

WriteCorpus = Callable[..., str]
PACKINGS = ("concatenate", "best_fit", "pad")
COPIES, GATHER = 0, 10**9
"""Bounds under which all rows are filled by a copy for each part, and by one gather."""


@pytest.fixture(params=[np.uint16, np.int32])
def corpus(request: pytest.FixtureRequest, write_corpus: WriteCorpus) -> Corpus:
    """Documents of 0 to 90 tokens, of which every fifth holds the end-of-document id 9 inside."""
    random = np.random.default_rng(3)
    documents = [random.integers(10, 60_000, size=length) for length in random.integers(0, 90, size=300)]
    for document in documents[::5]:
        document[len(document) // 2 :: 7] = 9
    vocabulary = 60_000 if request.param is np.uint16 else 100_000
    made = Corpus.open(write_corpus(documents, vocab_size=vocabulary), vocab_size=vocabulary)
    assert made.reader.dtype == request.param
    object.__setattr__(made, "eod_id", 9)
    return made


def token_by_token(subject: Sequences, corpus: Corpus, row: int) -> tuple[list[int], list[bool]]:
    """A row as its parts say, in plain Python."""
    length = subject.seq_length + 1
    tokens, starts = [filling.PADDING] * length, [False] * length
    parts = subject._rows.parts(np.array([row]))
    columns = (parts.documents, parts.skips, parts.starts, parts.stops, parts.begin)
    for document, skip, start, stop, begin in zip(*(one.tolist() for one in columns), strict=True):
        starts[start] |= begin
        for place in range(start, stop):
            tokens[place] = int(corpus.reader.document(document)[skip + place - start])
    (end,) = parts.ends.tolist()
    assert end == max(parts.stops.tolist())
    if end < length:
        starts[end] = True
    for place in range(1, length):
        starts[place] |= tokens[place - 1] == 9
    return tokens, starts


@pytest.mark.parametrize("bound", [COPIES, GATHER])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("seq_length", [7, 64])
def test_rows_filled_together_are_those_filled_token_by_token(
    corpus: Corpus, packing: str, bound: int, seq_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "TOKENS_WORTH_A_COPY", bound)
    data = DataConfig.model_validate({"packing": packing, "split": "100,0"})
    subject = Sequences(corpus, data, "train", seq_length, 1)
    chosen = np.random.default_rng(4).integers(0, subject.num_samples, size=30)
    tokens, starts = subject.read(chosen)
    for place, row in enumerate(chosen.tolist()):
        expected = token_by_token(subject, corpus, row)
        assert (tokens[place].tolist(), starts[place].tolist()) == expected, row


@pytest.mark.parametrize("packing", PACKINGS)
def test_many_rows_at_once_hold_what_each_holds_alone(corpus: Corpus, packing: str) -> None:
    data = DataConfig.model_validate({"packing": packing, "split": "100,0"})
    rows = Sequences(corpus, data, "train", 31, 1)._rows
    chosen = np.array([5, 0, 5, rows.count - 1, 2])
    together = rows.parts(chosen)
    assert sorted(set(together.rows.tolist())) == [0, 1, 2, 3, 4]
    for place in range(len(chosen)):
        alone, here = rows.parts(chosen[place : place + 1]), together.rows == place
        for name in ("documents", "skips", "starts", "stops", "begin"):
            assert np.array_equal(getattr(together, name)[here], getattr(alone, name)), name
        assert together.ends[place] == alone.ends[0]


@pytest.mark.parametrize("reset", [True, False])
def test_positions_do_not_depend_on_how_they_are_counted(
    corpus: Corpus, reset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataConfig.model_validate({"split": "100,0", "reset_position_ids": reset})
    batches = []
    for bound in (COPIES, GATHER):
        monkeypatch.setattr(samples, "TOKENS_WORTH_A_COPY", bound)
        batches.append(Sequences(corpus, data, "train", 31, 1).batch(np.arange(6)))
    assert equal(*batches)
    assert (int(batches[0].position_ids.max()) == 30) >= (not reset)


def equal(one: Batch, other: Batch) -> bool:
    return all(
        bool((getattr(one, name) == getattr(other, name)).all())
        for name in ("token_ids", "labels", "loss_mask", "position_ids", "cu_seqlens")
    )


class Advised:
    """What the system is told, instead of telling it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[int, int]] = []
        monkeypatch.setattr(os, "posix_fadvise", self.advise)

    def advise(self, descriptor: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        self.ranges.append((start, size))

    def taken(self) -> list[tuple[int, int]]:
        taken, self.ranges = self.ranges, []
        return taken


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Advised:
    return Advised(monkeypatch)


def ids(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


@pytest.fixture
def pages(write_corpus: WriteCorpus) -> Corpus:
    """32 pages of two-byte ids."""
    return Corpus.open(write_corpus([[7] * 1024] * 64), vocab_size=100)


def test_a_page_is_named_once_and_a_long_range_each_time(pages: Corpus, advised: Advised) -> None:
    cache = PageCache(pages.reader)
    cache.will_need(ids(0, 2050, 3000), ids(10, 20, 0))
    assert advised.taken() == [(0, 20), (4100, 40)]
    cache.will_need(ids(100, 2000, 4000), ids(10, 100, 100))
    assert advised.taken() == [(8000, 200)], "its second page is new"
    for _ in range(2):
        cache.will_need(ids(10), ids(7000))
        assert advised.taken() == [(20, 14_000)]


def test_what_was_named_long_ago_is_named_again(pages: Corpus, advised: Advised) -> None:
    cache = PageCache(pages.reader, remembered_bytes=3 * 4096)
    cache.will_need(ids(0), ids(10))
    cache.will_need(ids(0), ids(10))
    assert advised.taken() == [(0, 20)]
    cache.will_need(ids(2048, 4096, 6144), ids(10, 10, 10))
    advised.taken()
    cache.will_need(ids(0), ids(10))
    assert advised.taken() == [(0, 20)]


def test_a_process_remembers_for_itself(pages: Corpus, advised: Advised) -> None:
    cache = PageCache(pages.reader)
    cache.will_need(ids(0), ids(10))
    advised.taken()
    other: Any = pickle.loads(pickle.dumps(cache))  # noqa: S301
    other.will_need(ids(0), ids(10))
    assert advised.taken() == [(0, 20)]


@pytest.mark.parametrize("packing", PACKINGS)
def test_all_that_a_run_reads_was_named_before(
    make_config: Callable[..., Any], corpus: Corpus, advised: Advised, packing: str
) -> None:
    training = {"micro_batch_size": 2, "global_batch_size": 2}
    made = make_config(corpus.vocab_size, 64, training=training, data={"packing": packing, "split": "100,0"})
    item = corpus.reader.dtype.itemsize
    with BatchLoader(made, corpus, "train") as loader:
        named: set[int] = set()
        for number in range(20):
            next(loader)
            for start, size in advised.taken():
                named.update(range(start // 4096, (start + size - 1) // 4096 + 1))
            parts = loader.samples._rows.parts(loader.samples.windows(ids(2 * number, 2 * number + 1)))  # type: ignore[attr-defined]
            first = (corpus.reader.document_offsets[parts.documents] + parts.skips) * item
            last = first + (parts.stops - parts.starts) * item - 1
            needed = {
                page
                for start, stop in zip(first.tolist(), last.tolist(), strict=True)
                for page in range(start // 4096, stop // 4096 + 1)
                if stop >= start
            }
            assert needed <= named
