"""Text to a corpus: every kind of input, what is left out, what is refused."""

import builtins
import errno
import re
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drivetrain.engine.data import prepare as subject
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.partial import PartialCorpus
from drivetrain.engine.data.prepare import prepare
from drivetrain.engine.data.progress import Progress
from drivetrain.errors import DataError, EnvironmentFault

TEXTS = ["The first document.\n", "Zweites Dokument: äöü 🙂\n", "third\n\n\nwith blank lines"]


def decoded(prefix: Path) -> list[str]:
    corpus = Corpus.open(prefix)
    tokenizer = corpus.require_tokenizer()
    texts = []
    for document in corpus.reader:
        assert document[-1] == corpus.eod_id
        texts.append(tokenizer.decode(document[:-1].tolist()))
    return texts


def test_text_files_become_one_document_each_in_the_order_given(tmp_path: Path) -> None:
    paths = []
    for name, text in zip("cab", TEXTS, strict=True):
        (tmp_path / name).write_bytes(text.encode())
        paths.append(tmp_path / name)
    meta = prepare(paths, tmp_path / "out" / "corpus", vocab_size=280)
    assert decoded(tmp_path / "out" / "corpus") == TEXTS
    assert meta.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert meta.documents == 3
    assert meta.vocab_size == meta.vocab_size_requested == 280
    assert meta.max_id < 280
    lengths = Corpus.open(tmp_path / "out" / "corpus").token_byte_lengths().values
    assert lengths is not None
    assert int(lengths[Corpus.open(tmp_path / "out" / "corpus").reader.tokens].sum()) == meta.text_bytes


def test_a_folder_is_read_sorted_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for name in ("b/2.txt", "a.md", "b/1.py", "z"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (folder / "image.png").write_bytes(b"\x89PNG\0\0")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    (folder / "empty.txt").write_bytes(b"")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "loop").symlink_to(folder)
    meta = prepare([folder], tmp_path / "corpus", vocab_size=257)
    assert decoded(tmp_path / "corpus") == ["a.md", "b/1.py", "b/2.txt", "z"]
    assert meta.skipped == {
        "empty documents": 1,
        "files that are no UTF-8 text": 2,
        "hidden files and folders": 1,
        "linked folders": 1,
    }


def test_json_lines_and_parquet_are_a_document_a_line_and_a_row(tmp_path: Path) -> None:
    lines = [orjson.dumps({"content": text, "id": 1}) for text in [*TEXTS, ""]]
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines) + b"\n\n")
    pq.write_table(
        pa.table({"content": ["from parquet", None, "second"], "n": [1, 2, 3]}), tmp_path / "y.parquet"
    )
    meta = prepare(
        [tmp_path / "x.jsonl", tmp_path / "y.parquet"],
        tmp_path / "corpus",
        vocab_size=257,
        json_key="content",
    )
    assert decoded(tmp_path / "corpus") == [*TEXTS, "from parquet", "second"]
    assert meta.skipped == {"empty documents": 2}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "no JSON"),
        (b'["a"]', "expected an object, found list"),
        (b'{"txt": "a"}', "no key 'text'; its keys: 'txt'"),
        (b'{"text": 3}', "'text' is int, expected a string"),
        (b'\xff{"text": "a"}', "no JSON"),
    ],
)
def test_a_malformed_json_line_is_named_by_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"x\.jsonl:3: .*{message}"):
        prepare([tmp_path / "x.jsonl"], tmp_path / "corpus", vocab_size=257, strict=True)
    assert not list(tmp_path.glob("corpus*"))
    meta = prepare([tmp_path / "x.jsonl"], tmp_path / "corpus", vocab_size=257)
    assert (meta.documents, meta.skipped) == (1, {"broken JSON lines": 1})
    assert len(meta.broken_lines) == 1
    assert re.search(rf"x\.jsonl:3: .*{message}", meta.broken_lines[0])


def test_an_input_of_broken_lines_alone_is_empty_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"body": "a"}\n' * 3)
    with pytest.raises(
        DataError,
        match=r"left out: 3 broken JSON lines; the first broken line is .*x\.jsonl:1: no key 'text'",
    ):
        prepare([tmp_path / "x.jsonl"], tmp_path / "c", vocab_size=257)


def test_parquet_without_the_column_or_damaged_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["a"], "text": [1]}), tmp_path / "y.parquet")
    with pytest.raises(DataError, match="no column 'content'; its columns: body, text"):
        prepare([tmp_path / "y.parquet"], tmp_path / "c", vocab_size=257, json_key="content")
    with pytest.raises(DataError, match="is int64, expected strings"):
        prepare([tmp_path / "y.parquet"], tmp_path / "c", vocab_size=257)
    (tmp_path / "y.parquet").write_bytes((tmp_path / "y.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        prepare([tmp_path / "y.parquet"], tmp_path / "c", vocab_size=257)


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "y.parquet").write_bytes(b"PAR1")
    genuine = builtins.__import__

    def without_pyarrow(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return genuine(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(EnvironmentFault, match="pyarrow"):
        prepare([tmp_path / "y.parquet"], tmp_path / "c", vocab_size=257)


def test_an_empty_corpus_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for content in (None, b"", b"\0\1"):
        if content is not None:
            (tmp_path / "in" / "x").write_bytes(content)
        with pytest.raises(DataError, match="the corpus is empty"):
            prepare([tmp_path / "in"], tmp_path / "corpus", vocab_size=257)
    assert not list(tmp_path.glob("corpus*"))


def test_inputs_that_are_missing_or_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    with pytest.raises(DataError, match=r"image\.png is no UTF-8 text"):
        prepare([tmp_path / "image.png"], tmp_path / "c", vocab_size=257)
    with pytest.raises(DataError, match="nowhere' does not exist"):
        prepare([tmp_path / "nowhere"], tmp_path / "c", vocab_size=257)
    with pytest.raises(DataError, match="no input"):
        prepare([], tmp_path / "c", vocab_size=257)
    with pytest.raises(DataError, match="not both"):
        prepare([tmp_path], tmp_path / "c", vocab_size=257, tokenizer_path="t.json")
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(DataError, match="the output is a prefix"):
        prepare([tmp_path / "x.txt"], tmp_path / "c.bin", vocab_size=257)
    for folder in (f"{tmp_path}/", ".", f"{tmp_path}/.."):
        with pytest.raises(DataError, match="is a folder; add a name"):
            prepare([tmp_path / "x.txt"], folder, vocab_size=257)
    with pytest.raises(DataError, match="a byte-level vocabulary of 0"):
        prepare([tmp_path / "x.txt"], tmp_path / "c", vocab_size=0)
    with pytest.raises(DataError, match="no tokenizer at"):
        prepare([tmp_path / "x.txt"], tmp_path / "c", tokenizer_path=tmp_path / "t.json")


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("some text to learn from " * 50)
    for name in ("one", "two"):
        prepare([tmp_path / "x.txt"], tmp_path / name, vocab_size=300)
    for suffix in (".bin", ".idx", ".tokenizer.json", ".meta.json"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_a_given_tokenizer_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("some text to learn from " * 50)
    first = prepare([tmp_path / "x.txt"], tmp_path / "one", vocab_size=270)
    (tmp_path / "y.txt").write_text("other text")
    second = prepare([tmp_path / "y.txt"], tmp_path / "two", tokenizer_path=tmp_path / "one.tokenizer.json")
    assert second.tokenizer_sha256 == first.tokenizer_sha256
    assert (second.vocab_size, second.vocab_size_requested) == (270, None)
    assert decoded(tmp_path / "two") == ["other text"]


def test_a_text_that_yields_fewer_ids_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("abab")
    meta = prepare([tmp_path / "x.txt"], tmp_path / "c", vocab_size=100_000)
    assert meta.vocab_size_requested == 100_000
    assert meta.vocab_size is not None
    assert meta.vocab_size < 300


def test_a_tokenizer_of_a_large_corpus_learns_from_a_sample_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "TOKENIZER_TEXT_BYTES", 500)
    (tmp_path / "x.jsonl").write_bytes(b"".join(orjson.dumps({"text": f"d {n}"}) + b"\n" for n in range(500)))
    meta = prepare([tmp_path / "x.jsonl"], tmp_path / "c", vocab_size=257)
    assert meta.tokenizer_text_share == pytest.approx(500 / (tmp_path / "x.jsonl").stat().st_size)
    assert meta.documents == 500


def test_progress_ends_at_the_total_of_each_phase(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("some text " * 100)
    heard: list[Progress] = []
    prepare([tmp_path / "x.txt"], tmp_path / "c", vocab_size=257, progress=heard.append)
    last = {progress.phase: progress for progress in heard}
    assert set(last) == {"learning the tokenizer", "encoding"}
    assert all(progress.done == progress.total == 1000 for progress in last.values())


def test_a_full_disk_keeps_the_old_corpus_and_leaves_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.txt").write_text("old")
    prepare([tmp_path / "x.txt"], tmp_path / "c", vocab_size=257)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("c.*")}

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PartialCorpus, "append", no_room)
    (tmp_path / "x.txt").write_text("new and longer")
    with pytest.raises(EnvironmentFault, match="No space left"):
        prepare([tmp_path / "x.txt"], tmp_path / "c", vocab_size=257)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("c.*")} == before
