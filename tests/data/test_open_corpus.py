"""Opening a corpus for a model: ids, tokenizer and identity are checked before the first step."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pytest

from drivetrain.config import RunConfig
from drivetrain.engine.data import corpus as subject
from drivetrain.engine.data.corpus import Corpus, ensure_corpus
from drivetrain.engine.data.prepare import prepare
from drivetrain.engine.data.progress import Progress
from drivetrain.errors import DataError, EnvironmentFault

WriteCorpus = Callable[..., str]


@pytest.fixture
def prepared(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_text("some text to learn from, and more of it " * 20)
    (tmp_path / "b.txt").write_text("another document")
    prepare([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "corpus", vocab_size=270)
    return str(tmp_path / "corpus")


def test_an_id_outside_the_vocabulary_is_named_with_its_place_and_the_remedy(
    write_corpus: WriteCorpus,
) -> None:
    prefix = write_corpus([[1, 2, 3], [4, 70, 80], [5]])
    with pytest.raises(DataError) as caught:
        Corpus.open(prefix, vocab_size=70)
    message = str(caught.value)
    assert "token id 70 at position 4 (document 1)" in message
    assert "smallest vocab_size for this corpus is 81" in message
    with pytest.raises(DataError, match="token id 80 at position 5"):
        Corpus.open(prefix, vocab_size=80)
    assert Corpus.open(prefix, vocab_size=81).meta.max_id == 80


def test_the_scan_sees_every_chunk_and_is_done_once(
    write_corpus: WriteCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "SCAN_TOKENS", 7)
    prefix = write_corpus([range(20), [99], range(30)])
    heard: list[Progress] = []
    with pytest.raises(DataError, match="token id 99 at position 20"):
        Corpus.open(prefix, vocab_size=99, progress=heard.append)
    assert heard[-1].done == 51
    heard.clear()
    assert Corpus.open(prefix, vocab_size=100, progress=heard.append).meta.max_id == 99
    assert not heard


def test_a_changed_foreign_corpus_is_scanned_again(write_corpus: WriteCorpus) -> None:
    prefix = write_corpus([[1, 2, 3]])
    before = Corpus.open(prefix, vocab_size=10)
    Path(f"{prefix}.bin").write_bytes(struct.pack("<3H", 1, 50, 3))
    after = Corpus.open(prefix, vocab_size=51)
    assert (before.meta.max_id, after.meta.max_id) == (3, 50)
    assert before.fingerprint != after.fingerprint


def test_a_folder_that_cannot_be_written_costs_the_stored_scan_and_nothing_else(
    write_corpus: WriteCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(prefix: object, meta: object) -> None:
        raise EnvironmentFault("read-only file system")

    monkeypatch.setattr(subject, "write_meta", refuse)
    heard: list[Progress] = []
    corpus = Corpus.open(write_corpus([[1, 2]]), vocab_size=10, progress=heard.append)
    assert corpus.meta.max_id == 2
    assert "read-only" in heard[-1].phase


def test_a_negative_id_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 1, 2) + struct.pack("<i3q", 2, 0, 0, 1)
    )
    (tmp_path / "c.bin").write_bytes(struct.pack("<2i", 5, -7))
    with pytest.raises(DataError, match="negative token id -7 at 1"):
        Corpus.open(tmp_path / "c", vocab_size=10)


def test_a_corpus_without_tokens_is_refused(write_corpus: WriteCorpus) -> None:
    for documents in ([], [[], []]):
        with pytest.raises(DataError, match="is empty"):
            Corpus.open(write_corpus(documents), vocab_size=10)


def test_a_prepared_corpus_that_was_changed_is_refused(prepared: str) -> None:
    content = bytearray(Path(f"{prepared}.bin").read_bytes())
    content[0] ^= 1
    Path(f"{prepared}.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"corpus\.bin is not what .*meta\.json describes"):
        Corpus.open(prepared, vocab_size=270)
    content[1] = 255
    Path(f"{prepared}.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"outside model\.vocab_size = 270"):
        Corpus.open(prepared, vocab_size=270)


def test_damaged_facts_are_refused(prepared: str) -> None:
    path = Path(f"{prepared}.meta.json")
    facts = orjson.loads(path.read_bytes())
    for content in (
        b"",
        b"{",
        b"[]",
        orjson.dumps({**facts, "schema": 2}),
        orjson.dumps({**facts, "tokens": "many"}),
        orjson.dumps({"schema": 1}),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"meta\.json is damaged"):
            Corpus.open(prepared, vocab_size=270)


def test_a_missing_tokenizer_is_refused_where_it_was_promised_and_absent_where_not(
    prepared: str, write_corpus: WriteCorpus, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"no tokenizer at .*nowhere\.json"):
        Corpus.open(prepared, tmp_path / "nowhere.json", vocab_size=270)
    os.rename(f"{prepared}.tokenizer.json", tmp_path / "moved.json")
    with pytest.raises(DataError, match="tokenizer that is missing"):
        Corpus.open(prepared, vocab_size=270)
    assert Corpus.open(prepared, tmp_path / "moved.json", vocab_size=270).tokenizer is not None

    foreign = Corpus.open(write_corpus([[1, 2]], name="foreign"), vocab_size=10)
    assert foreign.tokenizer is None
    assert foreign.bytes_per_token() is None
    assert "no tokenizer" in foreign.token_byte_lengths().reason
    with pytest.raises(DataError, match=r"give data\.tokenizer_path"):
        foreign.require_tokenizer()


def test_another_tokenizer_than_the_corpus_was_made_with_is_refused(prepared: str, tmp_path: Path) -> None:
    prepare([tmp_path / "b.txt"], tmp_path / "other", vocab_size=260)
    with pytest.raises(DataError, match="is not the tokenizer"):
        Corpus.open(prepared, tmp_path / "other.tokenizer.json", vocab_size=270)


def test_a_tokenizer_in_the_folder_of_a_foreign_corpus_is_found(
    prepared: str, write_corpus: WriteCorpus, tmp_path: Path
) -> None:
    os.rename(f"{prepared}.tokenizer.json", tmp_path / "tokenizer.json")
    foreign = Corpus.open(write_corpus([[1, 2, 0]], name="foreign"), vocab_size=300)
    assert foreign.tokenizer_file == tmp_path / "tokenizer.json"
    assert foreign.eod_id == 0
    lengths = foreign.bytes_per_token()
    assert lengths is not None
    assert lengths.shape == (300,)
    beyond = Corpus.open(write_corpus([[299]], vocab_size=300, name="beyond"), vocab_size=300)
    assert beyond.bytes_per_token() is None
    assert "holds id 299, the tokenizer has 270 ids" in beyond.token_byte_lengths().reason


def test_the_model_may_have_more_rows_than_the_tokenizer_has_ids(prepared: str) -> None:
    lengths = Corpus.open(prepared, vocab_size=512).bytes_per_token()
    assert lengths is not None
    assert lengths.shape == (512,)
    assert int(lengths[270:].sum()) == 0


def test_the_fingerprint_names_content_and_tokenizer_and_not_the_place(prepared: str, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    first = Corpus.open(prepared, vocab_size=270).fingerprint
    for suffix in (".bin", ".idx", ".meta.json", ".tokenizer.json"):
        os.rename(f"{prepared}{suffix}", moved / f"renamed{suffix}")
    assert Corpus.open(moved / "renamed", vocab_size=270).fingerprint == first
    os.unlink(moved / "renamed.meta.json")
    os.unlink(moved / "renamed.tokenizer.json")
    assert Corpus.open(moved / "renamed", vocab_size=270).fingerprint != first


def test_ensure_corpus_opens_what_the_configuration_names(
    prepared: str, make_config: Callable[..., RunConfig]
) -> None:
    config = make_config(vocab_size=270, data={"data_path": prepared})
    corpus = ensure_corpus(config.data, config.model)
    assert corpus.prefix == prepared
    assert corpus.eod_id == 0
    config = make_config(vocab_size=100, data={"data_path": prepared})
    with pytest.raises(DataError, match=r"model\.vocab_size = 100"):
        ensure_corpus(config.data, config.model)


def test_tokens_of_every_integer_dtype_are_read(tmp_path: Path) -> None:
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items():
        tokens = np.array([3, 1, 100], dtype=name)
        (tmp_path / "c.idx").write_bytes(
            struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, 1, 2) + struct.pack("<i3q", 3, 0, 0, 1)
        )
        (tmp_path / "c.bin").write_bytes(tokens.tobytes())
        corpus = Corpus.open(tmp_path / "c", vocab_size=101)
        assert corpus.reader.document(0).tolist() == [3, 1, 100]
