"""MDS and WebDataset: their samples are documents, or token ids; pickles and damage are refused."""

import gzip
import hashlib
import io
import json
import pickle
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from preparation import decoded, make

from drivetrain.config import DataConfig, ModelConfig
from drivetrain.engine.data.formats.opening import open_tokens
from drivetrain.engine.data.opening import open_data
from drivetrain.engine.data.sources.discovery import discover
from drivetrain.engine.data.sources.mds_shards import integer_array
from drivetrain.engine.data.sources.reading import blocks_of, texts_of
from drivetrain.engine.data.sources.source import START, Position, Reading, Report
from drivetrain.errors import DataError

PLAIN = Reading()


@pytest.fixture(autouse=True)
def _nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)


def read(
    inputs: Sequence[Path], reading: Reading = PLAIN, start: Position = START
) -> tuple[list[str], Report]:
    sources, _ = discover(inputs)
    report = Report()
    texts = [
        text
        for block in blocks_of(sources, reading, start)
        for text in texts_of(block.content, reading, report)
    ]
    return texts, report


def as_array(values: Any) -> bytes:
    """As the encoding ``ndarray`` writes it."""
    array = np.asarray(values)
    code = {"uint16": 16, "int32": 33, "float32": 34}[array.dtype.name]
    return bytes([code, array.ndim << 2 | 1]) + np.array(array.shape, "<u2").tobytes() + array.tobytes()


def mds_shard(columns: dict[str, tuple[str, int | None]], rows: Sequence[dict[str, bytes]]) -> bytes:
    """A shard by the format's documentation."""
    config = {
        "column_encodings": [encoding for encoding, _ in columns.values()],
        "column_names": list(columns),
        "column_sizes": [size for _, size in columns.values()],
        "format": "mds",
        "version": 2,
    }
    header = json.dumps(config, sort_keys=True).encode()
    samples = [
        b"".join(len(row[name]).to_bytes(4, "little") for name, (_, size) in columns.items() if size is None)
        + b"".join(row[name] for name in columns)
        for row in rows
    ]
    first = 4 * (len(rows) + 2) + len(header)
    offsets = np.cumsum([first, *map(len, samples)]).astype("<u4")
    return len(rows).to_bytes(4, "little") + offsets.tobytes() + header + b"".join(samples)


def mds(
    folder: Path, columns: dict[str, tuple[str, int | None]], shards: Sequence[Sequence[dict[str, bytes]]]
) -> Path:
    folder.mkdir(parents=True)
    entries = []
    for number, rows in enumerate(shards):
        data, name = mds_shard(columns, rows), f"shard.{number:05}.mds"
        (folder / name).write_bytes(data)
        entries.append(
            {
                "column_encodings": [encoding for encoding, _ in columns.values()],
                "column_names": list(columns),
                "column_sizes": [size for _, size in columns.values()],
                "compression": None,
                "format": "mds",
                "hashes": ["sha1"],
                "raw_data": {
                    "basename": name,
                    "bytes": len(data),
                    "hashes": {"sha1": hashlib.sha1(data).hexdigest()},
                },
                "samples": len(rows),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"shards": entries, "version": 2}))
    return folder


def change_index(folder: Path, change: Any) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index["shards"][0])
    path.write_text(json.dumps(index))


TEXT_COLUMNS: dict[str, tuple[str, int | None]] = {
    "id": ("int", 8),
    "raw": ("bytes", None),
    "text": ("str", None),
}


def row(number: int) -> dict[str, bytes]:
    return {"id": number.to_bytes(8, "little"), "raw": b"\xff", "text": f"dökument {number}".encode()}


def texts_folder(folder: Path) -> Path:
    return mds(folder, TEXT_COLUMNS, [[row(0), row(1), row(2)], [row(3)]])


def archive(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


MEMBERS = [
    ("__meta__", b"{}"),
    ("__meta__/0.txt", b"no sample"),
    ("a/0.jpg", b"\xff"),
    ("a/0.txt", b"first"),
    ("a/0.json", b'{"text": "not this"}'),
    ("a/1.JSON", '{"text": "zwöi", "n": 1}'.encode()),
    ("README", b"no suffix"),
    ("b/1.txt", b"third"),
    ("b/1.cls", b"3"),
    ("b/2.cls", b"4"),
    ("b/3.json", b'{"other": 1}'),
    ("b/4.txt", b"\xff"),
    ("b/5.txt", b"last"),
]
OF_MEMBERS = ["first", "zwöi", "third", "last"]


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_samples_of_mds_are_documents_in_the_order_of_the_index_from_any_sample_on(
    tmp_path: Path, block_bytes: int
) -> None:
    folder = texts_folder(tmp_path / "in" / "train")
    reading = Reading(block_bytes=block_bytes)
    expected = [f"dökument {number}" for number in range(4)]
    assert read([folder], reading)[0] == expected
    assert read([tmp_path / "in"], reading)[0] == expected
    assert read([folder], reading, Position(0, 2))[0] == expected[2:]
    assert read([folder / "shard.00001.mds"], reading)[0] == expected[3:]
    assert make([folder], tmp_path / "made").documents == 4
    assert decoded(tmp_path / "made") == expected


def test_columns_of_mds_may_be_bytes_or_json(tmp_path: Path) -> None:
    columns: dict[str, tuple[str, int | None]] = {"j": ("json", None), "b": ("bytes", None)}
    rows = [{"j": b'"of json"', "b": b"of bytes"}, {"j": b"[1]", "b": b"\xff"}]
    folder = mds(tmp_path / "in", columns, [rows])
    assert read([folder], Reading(json_key="b"))[0] == ["of bytes"]
    texts, report = read([folder], Reading(json_key="j"))
    assert texts == ["of json"]
    assert report.skipped == {"samples without text": 1}
    assert report.broken == [f"{folder}/shard.00000.mds: sample 1: 'j' is list, expected a string"]
    with pytest.raises(DataError, match="sample 1: 'j' is list"):
        read([folder], Reading(json_key="j", strict=True))


@pytest.mark.parametrize("compression", ["gz", "zstd"])
def test_compressed_shards_are_read(tmp_path: Path, compression: str) -> None:
    folder = texts_folder(tmp_path / "in")
    raw = folder / "shard.00000.mds"
    data = raw.read_bytes()
    small = gzip.compress(data) if compression == "gz" else pa.compress(data, "zstd", asbytes=True)
    (folder / f"shard.00000.mds.{compression}").write_bytes(small)
    raw.unlink()
    zipped = {"basename": f"shard.00000.mds.{compression}", "bytes": len(small), "hashes": {}}
    change_index(folder, lambda shard: shard.update(zip_data=zipped))
    assert len(read([folder])[0]) == 4


@pytest.mark.parametrize(
    ("encoding", "value"),
    [
        ("ndarray", as_array(np.array([3, 1, 4], np.uint16))),
        ("ndarray:int32", bytes([1 << 2, 3]) + np.array([3, 1, 4], "<i4").tobytes()),
        ("ndarray:uint16:3", np.array([3, 1, 4], "<u2").tobytes()),
        ("ndarray:int64:1,3", np.array([3, 1, 4], "<i8").tobytes()),
    ],
)
def test_token_ids_of_mds_are_opened_as_they_are_for_training(
    tmp_path: Path, encoding: str, value: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path / "home"))
    folder = mds(
        tmp_path / "in", {"tokens": (encoding, None)}, [[{"tokens": value}] * 3, [{"tokens": value}]]
    )
    for _ in range(2):
        reader = open_tokens(folder)
        assert reader.num_documents == 4
        assert reader.tokens.tolist() == [3, 1, 4] * 4
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=5, seq_length=2)
    assert open_data(DataConfig(data_path=str(folder)), model).reader.num_tokens == 12


def test_values_that_are_no_integers_are_refused() -> None:
    for encoding, value, message in [
        ("ndarray:float32", b"", "expected ndarray of integers"),
        ("ndarray", as_array(np.array([1.5], np.float32)), "no array of integers"),
        ("ndarray", b"", "no array of integers"),
        ("ndarray:int32", b"", "cut off"),
        ("ndarray:int32", bytes([4, 200]), "whose shape says 200"),
        ("int", bytes(8), "expected ndarray"),
    ]:
        with pytest.raises(ValueError, match=message):
            integer_array(encoding, value)


def test_what_mds_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path / "home"))
    pickled = mds(tmp_path / "p", {"text": ("pkl", None)}, [[{"text": pickle.dumps("x")}]])
    with pytest.raises(DataError, match="'text' is pickled, and nothing is unpickled here"):
        read([pickled])
    with pytest.raises(DataError, match="'text' is pickled"):
        read([pickled / "shard.00000.mds"])
    ids = mds(tmp_path / "i", {"tokens": ("bytes", None)}, [[{"tokens": b"ab"}]])
    with pytest.raises(
        DataError, match=r"no column 'text'; its columns: tokens; tokens are tokens: train on"
    ):
        read([ids])
    with pytest.raises(DataError, match="bytes, which do not say how wide an id is"):
        open_tokens(ids)
    folder = texts_folder(tmp_path / "in")
    with pytest.raises(DataError, match="no column 'input_ids' or 'tokens'"):
        open_tokens(folder)
    with pytest.raises(DataError, match="column 'id' is int, expected str, bytes, json"):
        read([folder], Reading(json_key="id"))
    for change, message in [
        ({"format": "json"}, "of format 'json'"),
        ({"version": 1}, "version 2 is readable"),
        ({"raw_data": {"basename": "../x", "bytes": 1}}, "outside of its folder"),
        ({"raw_data": {"basename": "x.mds", "bytes": 1}}, r"x\.mds is not there"),
        ({"raw_data": {"basename": "shard.00001.mds", "bytes": 1}}, "longer than its index says"),
        ({"raw_data": {"basename": "x" * 5000, "bytes": 1}}, "cannot be looked up: File name too long"),
        ({"raw_data": {"basename": "a\0b", "bytes": 1}}, "is not there"),
        ({"raw_data": {"basename": "/etc/passwd", "bytes": 1}}, "outside of its folder"),
        ({"raw_data": None}, "its file is not there"),
        ({"column_names": [["a"]], "column_encodings": ["pkl"]}, r"column \['a'\] is pickled"),
    ]:
        before = (folder / "index.json").read_text()
        change_index(folder, lambda shard, change=change: shard.update(change))
        with pytest.raises(DataError, match=message):
            read([folder])
        (folder / "index.json").write_text(before)


def test_sizes_of_columns_that_no_shard_holds_are_refused(tmp_path: Path) -> None:
    # The first has no integer of numpy; the sum of the others would be 0 in 64 bits.
    for sizes in ([1 << 70], [1 << 63, 1 << 63], [1 << 62] * 4):
        columns: dict[str, tuple[str, int | None]] = {
            str(number): ("bytes", size) for number, size in enumerate(sizes)
        }
        path = tmp_path / "a.mds"
        path.write_bytes(mds_shard(columns, [dict.fromkeys(columns, b"")]))
        with pytest.raises(DataError, match="its header does not name its columns"):
            read([path], Reading(json_key="0"))


def test_an_index_without_shards_hides_no_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "index.json").write_text('{"shards": []}')
    assert "a text" in read([tmp_path])[0]
    (tmp_path / "index.json").write_text('{"shards": [], "version": 2}')
    with pytest.raises(DataError, match="names no shards"):
        read([tmp_path])


def test_a_damaged_shard_is_refused_wherever_it_is_damaged(tmp_path: Path) -> None:
    folder = texts_folder(tmp_path / "in")
    shard = folder / "shard.00000.mds"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + b"!")
    with pytest.raises(DataError, match=r"its sha1 is .*, and its index says"):
        read([folder])
    # Without the index, by the structure alone.
    for cut in range(len(data)):
        shard.write_bytes(data[:cut])
        with pytest.raises(DataError, match="damaged, or no MDS shard"):
            read([shard])
    at = data.index("dökument 0".encode()) - 13
    shard.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    with pytest.raises(DataError, match="columns of sample 0 do not fill it"):
        read([shard])


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_samples_of_a_tar_archive_are_documents_from_any_sample_on(
    tmp_path: Path, block_bytes: int, suffix: str
) -> None:
    path = archive(tmp_path / "a.tar", MEMBERS)
    if suffix == ".tar.gz":
        small = gzip.compress(path.read_bytes())
        path = tmp_path / f"a{suffix}"
        path.write_bytes(small)
    reading = Reading(block_bytes=block_bytes)
    texts, report = read([path], reading)
    assert texts == OF_MEMBERS
    assert report.skipped == {"samples without text": 3}
    assert "b/2: no .txt and no .json; it has .cls" in report.broken[0]
    assert "b/3: no key 'text' in its .json; its keys: 'other'" in report.broken[1]
    for skip, left in ((1, OF_MEMBERS[1:]), (3, OF_MEMBERS[3:]), (6, ["last"]), (7, [])):
        assert read([path], reading, Position(0, skip))[0] == left
    assert make([path], tmp_path / "made").documents == 4
    assert decoded(tmp_path / "made") == OF_MEMBERS


@pytest.mark.parametrize("name", ["a.pyd", "a.PKL", "a.pickle", "a.pth", "a.pt", "a.meta.pkl", "a.pkl.gz"])
def test_an_archive_with_pickles_is_refused(tmp_path: Path, name: str) -> None:
    path = archive(tmp_path / "a.tar", [("a.txt", b"text"), (name, pickle.dumps("x"))])
    with pytest.raises(DataError, match=r"is pickled, and nothing is unpickled here"):
        read([path])


def test_a_damaged_archive_is_refused_where_the_tar_reader_would_end_in_silence(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", [(f"{number}.txt", b"x" * 600) for number in range(4)])
    data = path.read_bytes()
    for cut in (0, 100, 512, 1000, 1536, 1536 * 2 + 5, 1536 * 4):
        path.write_bytes(data[:cut])
        with pytest.raises(DataError, match="damaged, cut off, or no tar archive"):
            read([path])
    path.write_bytes(data[:1536] + b"\xee" * 512 + data[2048:])
    with tarfile.open(path) as tar:
        assert len(tar.getnames()) == 1, "it takes the damage for the end"
    with pytest.raises(DataError, match="where a member or the end mark is expected"):
        read([path])
    path.write_bytes(data + data)
    with pytest.raises(DataError, match="behind its end mark"):
        read([path])
    archive(path, [("a.txt", b"1"), ("a.TXT", b"2")])
    with pytest.raises(DataError, match=r"two members of the name 'a\.TXT'"):
        read([path])


def header(name: str, size: int, kind: bytes = b"0") -> bytes:
    """A tar header that says anything."""
    data = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    # Base 256, as GNU has it.
    data[124:136] = bytes([0xFF if size < 0 else 0x80]) + size.to_bytes(11, "big", signed=True)
    data[156:157] = kind
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data)
    return bytes(data)


def with_facts(facts: dict[str, str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("a.txt")
        info.size, info.pax_headers = 5, facts
        tar.addfile(info, io.BytesIO(b"hello"))
    return made.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        header("a.jpg", 2**62) + bytes(2048),
        header("a.txt", 2**62) + bytes(2048),
        header("a.txt", -512) + b"x" * 512,
        header("a.txt", 2**62, b"L") + bytes(2048),
        header("a.txt", 1, b"S") + bytes(2048),
        with_facts({"size": "99999999999999999999"}),
        with_facts({"GNU.sparse.map": "x,y", "GNU.sparse.size": "5"}),
        with_facts({"GNU.sparse.map": "0,1", "GNU.sparse.size": "99999999999999"}),
        with_facts({"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
        (header("x", 5, b"L") + b"abcd".ljust(512, b"\0")) * 3000 + header("a.txt", 0) + bytes(1024),
    ],
    ids=[
        "skipped for years",
        "read without end",
        "negative",
        "long name",
        "old holes",
        "size",
        "map",
        "holes",
        "no map",
        "nested",
    ],
)
@pytest.mark.parametrize("second", [False, True])
def test_a_header_that_was_made_up_is_damage(tmp_path: Path, data: bytes, second: bool) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes((header("0.txt", 0) if second else b"") + data)
    with pytest.raises(DataError, match="damaged, cut off, or no tar archive"):
        read([path])


def test_names_in_another_encoding_are_shown_with_escapes(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        for name, content in (("ü.txt", b"text"), ("v.ü", b"?"), ("wü.txt", b"\xff")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    texts, report = read([path])
    assert texts == ["text"]
    assert "v: no .txt and no .json; it has .\\xfc" in report.broken[0]
    assert r"w\xfc: " in report.broken[1]
    "".join(report.broken).encode()


@pytest.mark.filterwarnings("ignore")
def test_samples_are_those_of_the_library(tmp_path: Path) -> None:
    tariterators = pytest.importorskip("webdataset.tariterators", reason="webdataset is not installed")
    path = archive(tmp_path / "a.tar", MEMBERS)
    with path.open("rb") as stream:
        samples = list(
            tariterators.group_by_keys(tariterators.tar_file_expander([{"url": "a", "stream": stream}]))
        )
    found = []
    for sample in samples:
        text = sample.get("txt") or (
            json.loads(sample["json"]).get("text", "").encode() if "json" in sample else b""
        )
        if text and text != b"\xff":
            found.append(text.decode())
    assert found == read([path])[0]
