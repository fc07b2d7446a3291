"""Tokens of other tools: opened as they are, told apart by their first bytes, refused where damaged."""

import os
import pickle
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preparation import byte_tokenizer
from test_sources import saved

from drivetrain.config import RunConfig
from drivetrain.engine.data.corpus import Corpus, ensure_corpus
from drivetrain.engine.data.formats.opening import open_tokens
from drivetrain.engine.data.formats.raw import RawReader
from drivetrain.engine.data.indexed import HEADER, MAGIC, IndexedReader
from drivetrain.engine.data.progress import Progress
from drivetrain.engine.data.sequences import Sequences
from drivetrain.errors import DataError, EnvironmentFault


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def llm_c(ids: list[int], *, magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    dtype = "<u4" if magic == 20240801 else "<u2"
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    return header.tobytes() + np.array(ids, dtype=dtype).tobytes()


def nano_gpt(ids: list[int]) -> bytes:
    return np.array(ids, dtype="<u2").tobytes()


IDS = [7, 8, 50256, 9, 50256, 50256, 10, 11]


@pytest.mark.parametrize(
    ("content", "name"),
    [(nano_gpt(IDS), "nanoGPT, uint16"), (llm_c(IDS), "llm.c, uint16")],
)
def test_a_file_of_ids_is_opened_with_borders_behind_the_end_of_text(
    tmp_path: Path, content: bytes, name: str
) -> None:
    (tmp_path / "train.bin").write_bytes(content)
    corpus = Corpus.open(tmp_path / "train.bin", vocab_size=50257)
    assert corpus.reader.format == name
    assert corpus.eod_id == 50256
    assert [document.tolist() for document in corpus.reader] == [[7, 8, 50256], [9, 50256], [50256], [10, 11]]
    assert corpus.reader.tokens.tolist() == IDS
    assert corpus.meta.max_id == 50256
    copy = pickle.loads(pickle.dumps(corpus.reader))  # noqa: S301 - our own bytes, as multiprocessing sends them
    assert [document.tolist() for document in copy] == [document.tolist() for document in corpus.reader]


def test_a_file_of_llama_ids_is_32_bits_wide(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(llm_c([128000, 5, 70000, 128000, 6], magic=20240801, version=7))
    corpus = Corpus.open(tmp_path / "x.bin")
    assert corpus.reader.dtype == np.uint32
    assert [document.tolist() for document in corpus.reader] == [[128000], [5, 70000, 128000], [6]]


def test_without_a_known_end_a_file_is_one_document_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(nano_gpt([1, 2, 3, 1]))
    heard: list[Progress] = []
    corpus = Corpus.open(tmp_path / "x.bin", vocab_size=10, progress=heard.append)
    assert corpus.reader.num_documents == 1
    assert corpus.eod_id is None
    assert "no id is known that ends a document" in heard[-1].phase


def test_the_tokenizer_tells_where_documents_end_and_the_search_is_kept(
    tmp_path: Path, own_cache: Path
) -> None:
    (tmp_path / "x.bin").write_bytes(nano_gpt([1, 256, 2, 3, 256]))
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    heard: list[Progress] = []
    corpus = Corpus.open(tmp_path / "x.bin", vocab_size=257, progress=heard.append)
    assert [document.tolist() for document in corpus.reader] == [[1, 256], [2, 3, 256]]
    assert len(list((own_cache / "borders").iterdir())) == 1
    assert "searching borders" in heard[-1].phase
    heard.clear()
    assert Corpus.open(tmp_path / "x.bin", vocab_size=257, progress=heard.append).reader.num_documents == 2
    assert not heard
    (tmp_path / "x.bin").write_bytes(nano_gpt([1, 256, 2, 256, 3]))
    assert Corpus.open(tmp_path / "x.bin", vocab_size=257).reader.num_documents == 3


def test_a_cache_that_cannot_be_written_costs_the_search_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.bin").write_bytes(nano_gpt(IDS))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path / "file"))
    heard: list[Progress] = []
    corpus = Corpus.open(tmp_path / "x.bin", progress=heard.append)
    assert "will be repeated next time" in heard[-1].phase
    copy = pickle.loads(pickle.dumps(corpus.reader))  # noqa: S301 - our own bytes
    assert copy.num_documents == corpus.reader.num_documents == 4


def test_a_run_trains_on_a_file_of_ids_as_on_a_corpus(
    tmp_path: Path, make_config: Callable[..., RunConfig]
) -> None:
    ids = [number % 90 for number in range(400)]
    (tmp_path / "train.bin").write_bytes(llm_c(ids))
    config = make_config(vocab_size=100, data={"data_path": str(tmp_path / "train.bin")})
    corpus = ensure_corpus(config.data, config.model)
    tokens, _ = Sequences(corpus, config.data, "train", 8, 0).read(np.arange(3))
    assert tokens.tolist() == [ids[start : start + 9] for start in (0, 8, 16)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\1", "an even number of bytes"),
        (nano_gpt(IDS) + b"\0", "has 17 bytes: token ids as nanoGPT writes them are uint16"),
        (llm_c([]), "is empty"),
        (llm_c(IDS)[:-1], "is truncated: expected 1,040 bytes, found 1,039"),
        (llm_c(IDS, count=9), "is truncated: expected 1,042 bytes"),
        (llm_c(IDS, count=7), "is longer than its header says: expected 1,038"),
        (llm_c(IDS, count=-1), "its header says that it holds -1 tokens"),
        (llm_c(IDS, version=2), "has version 2 of llm.c's format; version 1 is readable"),
        (llm_c(IDS)[:600], "is truncated: the header of llm.c has 1024 bytes, found 600"),
        (b"PK\3\4" + bytes(20), "is a zip archive, as torch.save writes, and no file of token ids"),
        (b"\x80\x02" + bytes(20), "is a pickle"),
        (struct.pack("<Q", 40) + b'{"a": 1}', "is a safetensors file"),
        (HEADER.pack(MAGIC, 1, 8, 0, 1) + bytes(8), "is a Megatron index"),
    ],
)
def test_a_file_that_holds_no_ids_or_not_all_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        Corpus.open(tmp_path / "x.bin")
    assert "x.bin" in str(caught.value)


@given(content=st.binary(max_size=1100), head=st.sampled_from([b"", llm_c([1, 2, 3])[:12], b"MMIDIDX\0\0"]))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_ids_or_are_refused(content: bytes, head: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.bin"
        path.write_bytes(head + content)
        try:
            reader = open_tokens(path)
        except DataError as error:
            message = str(error)
        else:
            message = ""
        if message:
            assert str(path) in message
            return
        assert isinstance(reader, RawReader)
        assert len(reader.tokens) == reader.num_tokens > 0
        assert reader.tokens.nbytes in (path.stat().st_size, path.stat().st_size - 1024)


def test_ids_outside_the_vocabulary_are_refused_by_place(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(llm_c([1, 2, 300, 4]))
    with pytest.raises(
        DataError,
        match=r"x\.bin holds token id 300 at position 2 \(document 0\), outside model\.vocab_size = 256",
    ):
        Corpus.open(tmp_path / "x.bin", vocab_size=256)


def table(path: Path, rows: list[list[int]], kind: pa.DataType | None = None, **columns: object) -> Path:
    values = pa.array(rows, kind or pa.list_(pa.int32()))
    pq.write_table(pa.table({"input_ids": values, **columns}), path, row_group_size=2)
    return path


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64())])
def test_parquet_with_input_ids_is_a_corpus_of_its_rows(tmp_path: Path, kind: pa.DataType) -> None:
    rows = [[1, 2, 3], [], [4], [5, 6], [7]]
    path = table(tmp_path / "x.parquet", rows, kind, attention_mask=[[1]] * 5)
    corpus = Corpus.open(path, vocab_size=8)
    assert [document.tolist() for document in corpus.reader] == rows
    assert corpus.prefix == str(path)
    with pytest.raises(DataError, match="token id 7"):
        Corpus.open(path, vocab_size=7)


def test_rows_of_equal_length_are_read_too(tmp_path: Path) -> None:
    path = table(tmp_path / "x.parquet", [[1, 2], [3, 4]], pa.list_(pa.uint16(), 2))
    assert [document.tolist() for document in Corpus.open(path).reader] == [[1, 2], [3, 4]]


def test_a_folder_of_parquet_and_a_saved_data_set_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    table(tmp_path / "shards" / "b.parquet", [[3]])
    table(tmp_path / "shards" / "a.parquet", [[1], [2]])
    assert [document.tolist() for document in Corpus.open(tmp_path / "shards").reader] == [[1], [2], [3]]
    folder = saved(tmp_path / "set", [["text"]])
    with pytest.raises(
        DataError, match="no column 'input_ids', so that it holds no token ids; its columns: id, text"
    ):
        Corpus.open(folder)
    batch = pa.record_batch({"input_ids": pa.array([[1, 2], [3]])})
    data = str(folder / "data-00000-of-00001.arrow")
    with pa.OSFile(data, "wb") as file, pa.ipc.new_stream(file, batch.schema) as writer:
        writer.write_batch(batch)
    assert [document.tolist() for document in Corpus.open(folder).reader] == [[1, 2], [3]]


def test_a_table_is_copied_once_and_again_when_it_changes(tmp_path: Path, own_cache: Path) -> None:
    path = table(tmp_path / "x.parquet", [[1], [2]])
    first = Corpus.open(path).reader.prefix
    heard: list[Progress] = []
    assert Corpus.open(path, progress=heard.append).reader.prefix == first
    assert not heard
    table(path, [[1], [3]])
    assert Corpus.open(path).reader.tokens.tolist() == [1, 3]
    assert len(list((own_cache / "corpora").iterdir())) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (pa.array([[1], None]), "rows or ids that are missing"),
        (pa.array([[1, None]]), "rows or ids that are missing"),
        (pa.array(["text"]), "is string, expected lists of whole numbers"),
        (pa.array([[0.5]]), "expected lists of whole numbers"),
        (pa.array([[-1]]), r"x\.parquet: document 0 holds token id -1"),
    ],
)
def test_a_column_that_holds_no_ids_is_refused(tmp_path: Path, values: pa.Array, message: str) -> None:
    pq.write_table(pa.table({"input_ids": values}), tmp_path / "x.parquet")
    for _ in range(2):
        with pytest.raises(DataError, match=message):
            Corpus.open(tmp_path / "x.parquet")


def test_what_is_no_corpus_is_named_with_what_is(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(
        DataError, match=r"x\.txt is no file of token ids; readable are .* `drivetrain data prepare`"
    ):
        Corpus.open(tmp_path / "x.txt")
    np.save(tmp_path / "x.npy", np.arange(3))
    with pytest.raises(DataError, match=r"x\.npy is a NumPy array; readable are"):
        Corpus.open(tmp_path / "x.npy")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="is a folder without Parquet files"):
        Corpus.open(tmp_path / "folder")
    with pytest.raises(DataError, match="no corpus at"):
        Corpus.open(tmp_path / "nowhere")


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path / "x.parquet", [[1], [2]])
    os.truncate(path, path.stat().st_size - 6)
    with pytest.raises(DataError, match=r"x\.parquet cannot be read"):
        Corpus.open(path)


def test_no_room_for_the_copy_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path / "x.parquet", [[1], [2]])
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path / "file"))
    with pytest.raises(EnvironmentFault, match=r"the ids of .*x\.parquet were not copied"):
        Corpus.open(path)


def test_ten_billion_tokens_are_mapped_and_not_read(tmp_path: Path) -> None:
    documents, length = 1_000, 10_000_000
    lengths = np.full(documents, length, dtype="<i4")
    pointers = np.arange(documents, dtype="<i8") * (2 * length)
    with (tmp_path / "c.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        file.write(lengths.tobytes() + pointers.tobytes() + np.arange(documents + 1, dtype="<i8").tobytes())
    with (tmp_path / "c.bin").open("wb") as file:
        file.truncate(2 * documents * length)
    read_before = _bytes_read()
    reader = open_tokens(tmp_path / "c")
    assert isinstance(reader, IndexedReader)
    assert reader.num_tokens == 10_000_000_000
    assert reader.document(999)[-1] == 0
    assert _bytes_read() - read_before < 10_000_000
    assert (tmp_path / "c.bin").stat().st_blocks * 512 < 10_000_000


def _bytes_read() -> int:
    """Bytes that this process has read by asking the system; pages of mapped files are not among them."""
    io = Path("/proc/self/io")
    if not io.exists():
        pytest.skip("counts bytes in /proc")
    return int(io.read_text().split("rchar:")[1].split()[0])
