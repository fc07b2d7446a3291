"""Indexed corpora: what is written is read, and what is damaged is refused."""

import os
import pickle
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.engine.data.indexed import IndexedReader, IndexedWriter, dtype_for_vocabulary
from drivetrain.errors import DataError

DOCUMENTS = st.lists(st.lists(st.integers(0, 70_000), max_size=20), max_size=12)


def write(prefix: Path, documents: list[list[int]], vocab_size: int) -> None:
    with IndexedWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add(document)
        writer.commit()


def index_bytes(
    *,
    magic: bytes = b"MMIDIDX\0\0",
    version: int = 1,
    code: int = 8,
    lengths: tuple[int, ...] = (3, 2),
    pointers: tuple[int, ...] = (0, 6),
    documents: tuple[int, ...] = (0, 1, 2),
    tail: bytes = b"",
) -> bytes:
    """An index spelled out by hand, as Megatron writes it."""
    return (
        struct.pack("<9sQBQQ", magic, version, code, len(lengths), len(documents))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(documents)}q", *documents)
        + tail
    )


def put(folder: Path, index: bytes, tokens: bytes = struct.pack("<5H", 1, 2, 3, 4, 5)) -> Path:
    (folder / "c.idx").write_bytes(index)
    (folder / "c.bin").write_bytes(tokens)
    return folder / "c"


@given(documents=DOCUMENTS, small=st.booleans())
@settings(max_examples=60, deadline=None)
def test_documents_come_back_as_they_were_written(documents: list[list[int]], small: bool) -> None:
    if small:
        documents = [[token % 500 for token in document] for document in documents]
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "c"
        write(prefix, documents, 500 if small else 70_001)
        reader = IndexedReader(prefix)
        assert reader.dtype == np.dtype("<u2" if small else "<i4")
        assert [document.tolist() for document in reader] == documents
        assert reader.num_tokens == sum(map(len, documents))
        assert sorted(os.listdir(folder)) == ["c.bin", "c.idx"]


@given(documents=DOCUMENTS, kind=st.sampled_from(["bin", "idx"]), data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_file_cut_anywhere_or_lengthened_is_refused_with_its_sizes(
    documents: list[list[int]], kind: str, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "c"
        write(prefix, documents, 70_001)
        path = Path(f"{prefix}.{kind}")
        content = path.read_bytes()
        size = data.draw(st.integers(0, len(content) + 40))
        if size == len(content):
            return
        path.write_bytes((content + bytes(40))[:size])
        with pytest.raises(DataError) as caught:
            IndexedReader(prefix)
        message = str(caught.value)
        assert f"c.{kind}" in message
        if "multimodal" not in message:
            assert f"found {size:,}" in message
            assert ("truncated" in message) == (size < len(content))


def test_every_cut_of_a_small_corpus_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "c", [[1, 2, 3], [4]], 10)
    for kind in ("bin", "idx"):
        path = tmp_path / f"c.{kind}"
        content = path.read_bytes()
        for size in range(len(content)):
            path.write_bytes(content[:size])
            with pytest.raises(DataError, match=f"c.{kind} is truncated"):
                IndexedReader(tmp_path / "c")
        path.write_bytes(content)
    assert IndexedReader(tmp_path / "c").num_documents == 2


def test_an_index_written_by_hand_is_read(tmp_path: Path) -> None:
    reader = IndexedReader(put(tmp_path, index_bytes()))
    assert [document.tolist() for document in reader] == [[1, 2, 3], [4, 5]]


def test_a_document_of_several_sequences_is_one_document(tmp_path: Path) -> None:
    reader = IndexedReader(put(tmp_path, index_bytes(documents=(0, 2))))
    assert [document.tolist() for document in reader] == [[1, 2, 3, 4, 5]]
    assert reader.num_sequences == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"magic": b"NOTANIDX\0"}, "no Megatron index"),
        ({"version": 2}, "version 2"),
        ({"code": 7}, "float32"),
        ({"code": 77}, "dtype code 77"),
        ({"lengths": (-3, 8)}, "sequence 0 has length -3"),
        ({"pointers": (0, 8)}, "sequence 1 starts at byte 8"),
        ({"documents": (0, 1, 1)}, "document index"),
        ({"documents": (1, 1, 2)}, "document index"),
        ({"documents": (0, 2, 1, 2)}, "document index"),
        ({"documents": ()}, "document index"),
        ({"tail": b"\0\0"}, "multimodal"),
        ({"tail": b"\0"}, "longer"),
        ({"lengths": (3, 3), "pointers": (0, 6)}, "c.bin is truncated: expected 12 bytes, found 10"),
        ({"lengths": (3, 1), "pointers": (0, 6)}, "c.bin is longer than its index says"),
        ({"code": 4, "pointers": (0, 12)}, "c.bin is truncated: expected 20 bytes, found 10"),
    ],
)
def test_an_index_that_does_not_add_up_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        IndexedReader(put(tmp_path, index_bytes(**change)))  # type: ignore[arg-type]


def test_counts_too_large_for_any_file_are_a_truncation_and_no_memory_error(tmp_path: Path) -> None:
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 2**62, 2**63)
    with pytest.raises(DataError, match="truncated"):
        IndexedReader(put(tmp_path, head))


def test_a_missing_corpus_names_the_file_and_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "wikipedia", [[1]], 10)
    with pytest.raises(DataError, match=r"wikipdia.idx does not exist; corpora there: .*wikipedia"):
        IndexedReader(tmp_path / "wikipdia")
    with pytest.raises(DataError, match="no corpus"):
        IndexedReader(tmp_path / "no" / "such" / "folder")


def test_a_prefix_with_a_suffix_says_what_the_prefix_is(tmp_path: Path) -> None:
    write(tmp_path / "c", [[1]], 10)
    with pytest.raises(DataError, match="named by its prefix"):
        IndexedReader(tmp_path / "c.bin")


def test_tokens_without_an_index_are_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "nanogpt.bin").write_bytes(b"\1\0\2\0")
    with pytest.raises(DataError, match="idx is missing beside"):
        IndexedReader(tmp_path / "nanogpt")


def test_ids_outside_the_vocabulary_are_not_written(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "c", 10) as writer:
        with pytest.raises(DataError, match="token id 10"):
            writer.add([1, 10])
        with pytest.raises(DataError, match="token id -1"):
            writer.add([-1])


def test_a_writer_left_without_commit_leaves_nothing_and_keeps_the_old_corpus(tmp_path: Path) -> None:
    write(tmp_path / "c", [[1, 2]], 10)
    with IndexedWriter(tmp_path / "c", 10) as writer:
        writer.add([3])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.idx"]
    assert [document.tolist() for document in IndexedReader(tmp_path / "c")] == [[1, 2]]


def test_dtype_is_the_narrowest_that_holds_the_vocabulary() -> None:
    assert dtype_for_vocabulary(65_536) == np.uint16
    assert dtype_for_vocabulary(65_537) == np.int32


def test_a_reader_sent_to_a_process_carries_its_path_and_not_its_tokens(tmp_path: Path) -> None:
    write(tmp_path / "c", [list(range(10))] * 1000, 10)
    sent = pickle.dumps(IndexedReader(tmp_path / "c"))
    assert len(sent) < 1000
    copy = pickle.loads(sent)  # noqa: S301 - our own bytes, as multiprocessing sends them
    assert copy.num_documents == 1000
