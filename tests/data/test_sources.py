"""Every kind of input: cut anywhere it gives the same documents; damaged it is refused by name."""

import gzip
import tempfile
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preparation import byte_tokenizer

from drivetrain.engine.data.duplicates import digest
from drivetrain.engine.data.sources.discovery import discover
from drivetrain.engine.data.sources.reading import blocks_of, texts_of
from drivetrain.engine.data.sources.source import START, Fragment, Position, Reading, Report, Source
from drivetrain.engine.data.tokenizer import pieces_of
from drivetrain.errors import DataError

PLAIN = Reading()
TEXTS = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=30)
LINES = st.lists(
    st.one_of(
        TEXTS.map(lambda text: orjson.dumps({"text": text})),
        st.sampled_from([b"", b"  ", b"{", b"[1]", b'{"other": 1}', b'{"text": null}', b"\xff\xfe", b"\r"]),
        st.binary(max_size=8).map(lambda data: data.replace(b"\n", b"")),
    ),
    max_size=25,
)


def write_stream(path: Path, batches: list[list[str | None]], name: str = "text") -> None:
    schema = pa.schema([("id", pa.int64()), (name, pa.string())])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in batches:
            writer.write_batch(
                pa.record_batch(
                    [pa.array(range(len(batch)), pa.int64()), pa.array(batch, pa.string())], schema=schema
                )
            )


def saved(folder: Path, batches: list[list[str | None]]) -> Path:
    """A folder as ``datasets.Dataset.save_to_disk`` writes it."""
    folder.mkdir(parents=True)
    names = []
    for number, batch in enumerate(batches):
        names.append(f"data-{number:05}-of-{len(batches):05}.arrow")
        write_stream(folder / names[-1], [batch])
    (folder / "state.json").write_bytes(orjson.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_bytes(orjson.dumps({"features": {"text": {"dtype": "string"}}}))
    return folder


def read(inputs: list[Path], reading: Reading = PLAIN, start: Position = START) -> tuple[list[str], Report]:
    """All texts behind ``start``, fragments joined; and what was left out."""
    sources, _ = discover(inputs)
    report, found, open_text = Report(), [], ""
    for block in blocks_of(sources, reading, start):
        texts = list(texts_of(block.content, reading, report))
        if isinstance(block.content, Fragment):
            open_text += "".join(texts)
            if block.content.last:
                found.append(open_text)
                assert digest(open_text.encode()) == block.content.digest or start.offset
                open_text = ""
        else:
            found += texts
    assert not open_text
    return found, report


def positions(inputs: list[Path], reading: Reading) -> list[Position]:
    sources, _ = discover(inputs)
    return [Position(), *(block.after for block in blocks_of(sources, reading))]


def expected_of(lines: list[bytes]) -> tuple[list[str], list[int]]:
    """Texts, and numbers of broken lines, by reading line by line."""
    texts, broken = [], []
    for number, line in enumerate(lines, start=1):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if not line.strip():
            continue
        try:
            texts.append(orjson.loads(line)["text"] + "")
        except (ValueError, TypeError, KeyError):
            broken.append(number)
    return texts, broken


@given(lines=LINES, block=st.integers(1, 200), ending=st.sampled_from([b"", b"\n"]), compress=st.booleans())
@settings(max_examples=150, deadline=None)
def test_json_lines_are_the_same_however_they_are_cut_and_broken_ones_are_numbered(
    lines: list[bytes], block: int, ending: bytes, compress: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = b"\n".join(lines) + ending
        path = Path(folder) / ("x.jsonl.gz" if compress else "x.jsonl")
        path.write_bytes(gzip.compress(data) if compress else data)
        reading = Reading(block_bytes=block)
        texts, report = read([path], reading)
        expected, broken = expected_of(lines)
        assert texts == expected
        assert report.skipped["broken JSON lines"] == len(broken)
        assert [int(place.removeprefix(f"{path}:").split(":")[0]) for place in report.broken] == broken[:20]
        for position in positions([path], reading)[::7]:
            rest, _ = read([path], reading, position)
            assert texts[len(texts) - len(rest) :] == rest


def test_a_strict_reader_stops_at_the_first_broken_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n\n{"text": 3}\n{')
    with pytest.raises(DataError, match=r"x\.jsonl:3: 'text' is int, expected a string"):
        read([tmp_path / "x.jsonl"], Reading(strict=True))


def test_a_byte_order_mark_is_no_broken_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n')
    texts, report = read([tmp_path / "x.jsonl"])
    assert texts == ["a", "b"]
    assert not report.broken


def compressed(kind: str, data: bytes) -> bytes:
    if kind == "gz":
        return gzip.compress(data)
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_json_lines_of_several_members_are_read_whole(tmp_path: Path, kind: str) -> None:
    halves = [b'{"text": "one"}\n{"text": "t', b'wo"}\n']
    path = tmp_path / f"x.jsonl.{kind}"
    path.write_bytes(b"".join(compressed(kind, half) for half in halves))
    assert read([path])[0] == ["one", "two"]
    assert read([path], Reading(), Position(0, 16, 1))[0] == ["two"]


@pytest.mark.parametrize("kind", ["gz", "zst"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_compressed_file_that_is_cut_off_is_refused(kind: str, data: st.DataObject) -> None:
    whole = compressed(kind, b"".join(orjson.dumps({"text": f"{number}"}) + b"\n" for number in range(300)))
    size = data.draw(st.integers(4, len(whole) - 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"x.jsonl.{kind}"
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"x\.jsonl\.\w+ is damaged or cut off"):
            read([path])


def test_a_gzip_file_with_a_damaged_byte_is_refused(tmp_path: Path) -> None:
    lines = (orjson.dumps({"text": f"{number} {number * 7919}"}) for number in range(300))
    whole = compressed("gz", b"\n".join(lines))
    path = tmp_path / "x.jsonl.gz"
    for at in range(10, len(whole) - 8, 7):
        path.write_bytes(whole[:at] + bytes((whole[at] ^ 0xFF,)) + whole[at + 1 :])
        with pytest.raises(DataError, match=r"x\.jsonl\.gz is damaged or cut off"):
            read([path])


def test_zstandard_that_begins_with_a_frame_to_be_skipped_is_decompressed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.zst"
    skipped = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + bytes(4)
    path.write_bytes(skipped + compressed("zst", b'{"text": "one"}\n'))
    assert read([path])[0] == ["one"]


def test_a_file_that_only_its_name_calls_compressed_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl.gz").write_bytes(b'{"text": "plain"}\n')
    assert read([tmp_path / "x.jsonl.gz"])[0] == ["plain"]


LONG = st.lists(
    st.sampled_from(["word", "A", " ", "\n", "\n\n", "é", "\u3000", ".", "7", "🙂", "\r\n", "\t", "x\ny"]),
    min_size=1,
    max_size=300,
).map("".join)


@given(text=LONG, block=st.integers(4, 60))
@settings(max_examples=150, deadline=None)
def test_a_long_text_in_fragments_has_the_ids_of_the_whole(text: str, block: int) -> None:
    tokenizer = byte_tokenizer()

    def cuts(part: str) -> list[str]:
        return [found for found, _ in tokenizer.pre_tokenizer.pre_tokenize_str(part)]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.txt"
        path.write_bytes(text.encode())
        reading = Reading(split_long=True, block_bytes=block)
        assert read([path], reading)[0] == [text]
        parts = [
            block.content.data.decode()
            for block in blocks_of(discover([path])[0], reading)
            if isinstance(block.content, Fragment)
        ]
        assert [cut for part in parts for cut in cuts(part)] == (cuts(text) if parts else [])
        for position in positions([path], reading)[:-1]:
            assert read([path], reading, position)[0] == [text.encode()[position.offset :].decode()]


def test_a_long_file_that_is_no_text_is_left_out_or_refused_before_any_of_it_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"Some text.\nMore.\n" * 50 + b"\xff")
    (folder / "b.txt").write_bytes(b"Some text.\nMore.\n" * 50 + b"\0")
    (folder / "c.txt").write_bytes(b"short")
    reading = Reading(split_long=True, block_bytes=50)
    texts, report = read([folder], reading)
    assert texts == ["short"]
    assert report.skipped == {"files that are no UTF-8 text": 2}
    with pytest.raises(DataError, match=r"b\.txt is no UTF-8 text: it holds zero bytes"):
        read([folder / "b.txt"], reading)


def test_pieces_of_a_text_are_the_text() -> None:
    text = "Line of text.\n" * 100_000
    assert "".join(pieces_of(text)) == text
    assert len(list(pieces_of(text))) > 2


ROWS: list[str | None] = [f"row {number} " * (number % 4) or None for number in range(40)]


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_rows_of_a_table_are_the_same_however_they_are_cut(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("x.parquet" if kind == "parquet" else "x.arrow")
    if kind == "parquet":
        pq.write_table(pa.table({"text": ROWS, "n": range(40)}), path, row_group_size=7)
    elif kind == "stream":
        write_stream(path, [ROWS[:11], ROWS[11:12], [], ROWS[12:]])
    else:
        table = pa.table({"n": range(40), "text": ROWS})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    expected = [row or "" for row in ROWS]
    for block in (1, 30, 10_000):
        reading = Reading(block_bytes=block)
        assert read([path], reading)[0] == expected
        for position in positions([path], reading):
            assert read([path], reading, position)[0] == expected[position.offset :]


def test_a_saved_data_set_is_read_in_the_order_of_its_files(tmp_path: Path) -> None:
    folder = saved(tmp_path / "set", [["one", "two"], ["three"]])
    (folder / "cache-1.arrow").write_bytes(b"left by a computation")
    assert read([folder])[0] == ["one", "two", "three"]
    assert read([tmp_path])[0] == ["one", "two", "three"]


def test_a_saved_data_set_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "set", [["one", "two"], ["three"]])
    (folder / "data-00001-of-00002.arrow").rename(tmp_path / "away")
    with pytest.raises(DataError, match=r"names data-00001-of-00002\.arrow, which is not there"):
        discover([folder])
    (folder / "state.json").write_bytes(b"{}")
    with pytest.raises(DataError, match="names no _data_files"):
        discover([folder])
    (folder / "state.json").write_bytes(b"{")
    with pytest.raises(DataError, match=r"state\.json cannot be read"):
        discover([folder])
    (folder / "dataset_dict.json").write_bytes(orjson.dumps({"splits": ["train", "test"]}))
    with pytest.raises(DataError, match=r"several splits; give one of them: .*train, .*test"):
        discover([folder])


def test_an_arrow_stream_cut_anywhere_is_refused(tmp_path: Path) -> None:
    write_stream(tmp_path / "x.arrow", [["some text"] * 4, ["more"] * 3])
    whole = (tmp_path / "x.arrow").read_bytes()
    for size in range(0, len(whole), 5):
        (tmp_path / "x.arrow").write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"x\.arrow (cannot be read as Arrow|is truncated)"):
            read([tmp_path / "x.arrow"])


def test_an_arrow_stream_with_a_damaged_offset_is_refused(tmp_path: Path) -> None:
    write_stream(tmp_path / "x.arrow", [["four"] * 5])
    whole = (tmp_path / "x.arrow").read_bytes()
    offsets = b"".join(number.to_bytes(4, "little") for number in range(0, 24, 4))
    assert whole.count(offsets) == 1
    # Near enough that reading there, unverified, gives other text instead of ending the process.
    (tmp_path / "x.arrow").write_bytes(whole.replace(offsets, offsets[:-4] + (24).to_bytes(4, "little")))
    with pytest.raises(DataError, match=r"x\.arrow cannot be read as Arrow: .*[Oo]ffset"):
        read([tmp_path / "x.arrow"])


@pytest.mark.parametrize(
    ("column", "message"),
    [("body", "no column 'body'; its columns: id, text"), ("id", "is int64, expected strings")],
)
def test_a_table_without_the_column_is_refused(tmp_path: Path, column: str, message: str) -> None:
    write_stream(tmp_path / "x.arrow", [["a"]])
    with pytest.raises(DataError, match=message):
        read([tmp_path / "x.arrow"], Reading(column))


def test_a_table_of_token_ids_says_how_to_train_on_it(tmp_path: Path) -> None:
    pq.write_table(pa.table({"input_ids": [[1, 2]]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"input_ids are tokens: train on it as data\.data_path"):
        read([tmp_path / "x.parquet"])


def test_kinds_go_by_the_name_before_the_compression(tmp_path: Path) -> None:
    for name in ("a.JSONL", "b.ndjson.gz", "c.json.zst", "d.json", "e.txt", "f.parquet", "g.arrow"):
        (tmp_path / name).write_bytes(b"")
    named, _ = discover(sorted(tmp_path.iterdir()))
    assert [source.kind for source in named] == [
        "jsonl",
        "jsonl",
        "jsonl",
        "jsonl",
        "text",
        "parquet",
        "arrow",
    ]
    found, _ = discover([tmp_path])
    assert [source.kind for source in found] == ["jsonl", "jsonl", "text", "text", "text", "parquet", "arrow"]
    assert found[0] == Source(tmp_path / "a.JSONL", "jsonl", named=False, size=0)
