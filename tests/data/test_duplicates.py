"""Equal documents: counted over blocks of any size as a set would, and left out where asked."""

from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preparation import decoded, make

from drivetrain.engine.data.duplicates import DocumentDigest, SeenDocuments, as_array, digest


@given(blocks=st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=12))
@settings(max_examples=200, deadline=None)
def test_seen_documents_are_what_a_set_holds(blocks: list[list[int]]) -> None:
    seen, known = SeenDocuments(), set[int]()
    for block in blocks:
        expected = []
        for value in block:
            expected.append(value in known)
            known.add(value)
        digests = as_array([digest(str(value).encode()) for value in block])
        assert seen.add(digests).tolist() == expected
    for value in range(31):
        assert (digest(str(value).encode()) in seen) == (value in known)


def test_documents_that_share_half_of_their_digest_are_different() -> None:
    seen = SeenDocuments()
    assert seen.add(np.array([[5, 1]], dtype=np.uint64)).tolist() == [False]
    assert seen.add(np.array([[5, 2], [4, 1]], dtype=np.uint64)).tolist() == [False, False]
    assert seen.add(np.array([[5, 1], [5, 2], [4, 1]], dtype=np.uint64)).tolist()[0]


def test_a_digest_in_parts_is_that_of_the_whole() -> None:
    parts = DocumentDigest()
    parts.update(b"some ")
    parts.update(b"text")
    assert parts.value() == digest(b"some text")


TEXTS = ["one", "two", "one", "", "three", "two", "one", "a longer text\nOf lines"]


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(orjson.dumps({"text": text}) for text in TEXTS))
    (tmp_path / "y.txt").write_text("two")
    (tmp_path / "long.txt").write_text("Line of text.\n" * 60)
    (tmp_path / "same.txt").write_text("Line of text.\n" * 60)
    return [tmp_path / name for name in ("x.jsonl", "y.txt", "long.txt", "same.txt")]


def test_duplicates_are_counted_and_kept(inputs: list[Path], tmp_path: Path) -> None:
    meta = make(inputs, tmp_path / "c")
    assert meta.duplicates == 5
    assert meta.documents == len(decoded(tmp_path / "c")) == 10
    assert meta.skipped == {"empty documents": 1}


@pytest.mark.parametrize("block_bytes", [30, 100, 10_000])
def test_duplicates_are_left_out_where_asked_and_the_first_stays(
    inputs: list[Path], tmp_path: Path, block_bytes: int
) -> None:
    meta = make(inputs, tmp_path / "c", drop_duplicates=True, block_bytes=block_bytes)
    kept = ["one", "two", "three", "a longer text\nOf lines", "Line of text.\n" * 60]
    assert decoded(tmp_path / "c") == kept
    assert meta.duplicates == meta.skipped["duplicate documents"] == 5
    assert meta.text_bytes == sum(len(text) for text in kept)
    assert meta.tokens == meta.text_bytes + len(kept)
