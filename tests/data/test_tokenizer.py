"""Tokenizers: deterministic training, refused files, text that spells special tokens, bytes of each id."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from drivetrain.engine.data import tokenizer as subject
from drivetrain.engine.data.tokenizer import (
    END_OF_DOCUMENT,
    cuts_behind_line_breaks,
    encode,
    end_of_document_id,
    load_tokenizer,
    parallel_tokenizers,
    token_byte_lengths,
    tokenizer_hash,
    train_tokenizer,
    vocabulary_size,
)
from drivetrain.errors import DataError

TEXTS = [
    "def f(x):\n    return x + 1\n" * 20,
    "naïve café, 東京 🙂\n" * 5,
    "for i in range(10):\n\tprint(i)\n" * 9,
]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(TEXTS, 300)


def test_training_twice_gives_the_same_tokenizer(trained: Tokenizer) -> None:
    assert train_tokenizer(iter(TEXTS), 300).to_str() == trained.to_str()
    assert tokenizer_hash(train_tokenizer(TEXTS, 299)) != tokenizer_hash(trained)


def test_the_vocabulary_is_what_was_asked_or_what_the_text_yields(trained: Tokenizer) -> None:
    assert vocabulary_size(trained) == 300
    assert trained.token_to_id(END_OF_DOCUMENT) == 0
    assert vocabulary_size(train_tokenizer(["ab"], 4096)) == 258


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(DataError, match="smallest is 257"):
        train_tokenizer(TEXTS, 256)


@given(text=st.text(max_size=200))
@settings(max_examples=100)
def test_any_text_comes_back_and_its_bytes_are_counted_exactly(trained: Tokenizer, text: str) -> None:
    (ids,) = encode(trained, [text])
    lengths = token_byte_lengths(trained).values
    assert lengths is not None
    assert int(lengths[ids].sum()) == len(text.encode())
    assert trained.decode(ids.tolist()) == text


def test_text_that_spells_the_end_of_a_document_is_text(trained: Tokenizer) -> None:
    text = f"a {END_OF_DOCUMENT} b"
    (ids,) = encode(trained, [text])
    assert 0 not in ids
    assert trained.decode(ids.tolist()) == text
    assert trained.encode(END_OF_DOCUMENT).ids == [0]


def test_a_long_document_in_pieces_has_the_ids_of_the_whole(
    trained: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(TEXTS) + "\n\n  \nx\n)\n\n\ny;\n/z\nend without break" * 30
    whole = encode(trained, [text])[0].tolist()
    monkeypatch.setattr(subject, "PIECE_CHARACTERS", 40)
    assert len(list(subject.pieces_of(text))) > 5
    assert "".join(subject.pieces_of(text)) == text
    assert encode(trained, [text], split_long=True)[0].tolist() == whole


def test_a_document_without_line_breaks_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "PIECE_CHARACTERS", 10)
    assert list(subject.pieces_of("x" * 100)) == ["x" * 100]
    assert list(subject.pieces_of("")) == [""]


def test_a_missing_or_unreadable_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "nowhere.json")
    for content in (b"", b"{}", b"[1]", b"\xff\xfe", b'{"version": "1.0", "model": {"type": "Nonsense"}}'):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.json"):
            load_tokenizer(tmp_path / "bad.json")
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_would_truncate_or_pad_does_neither(trained: Tokenizer, tmp_path: Path) -> None:
    copy = Tokenizer.from_str(trained.to_str())
    copy.enable_truncation(4)
    copy.enable_padding(length=50)
    copy.save(str(tmp_path / "t.json"))
    loaded = load_tokenizer(tmp_path / "t.json")
    assert encode(loaded, TEXTS)[0].tolist() == encode(trained, TEXTS)[0].tolist()
    assert tokenizer_hash(loaded) == tokenizer_hash(trained)


def test_the_end_of_a_document_is_found_by_usual_names_or_given(trained: Tokenizer) -> None:
    other = Tokenizer(models.WordLevel({"hello": 0, "</s>": 5}, unk_token="hello"))
    assert end_of_document_id(other) == 5
    assert vocabulary_size(other) == 6
    assert end_of_document_id(other, "hello") == 0
    assert end_of_document_id(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))) is None
    with pytest.raises(DataError, match=r"no token '<eot>'.*<\|endoftext\|>"):
        end_of_document_id(trained, "<eot>")


def test_added_tokens_count_their_text_and_special_ones_nothing(trained: Tokenizer) -> None:
    copy = Tokenizer.from_str(trained.to_str())
    copy.add_tokens([AddedToken("é       é", normalized=False)])
    copy.add_special_tokens(["<|pad|>"])
    lengths = token_byte_lengths(copy).values
    assert lengths is not None
    assert lengths[copy.token_to_id("é       é")] == 11
    assert lengths[copy.token_to_id("<|pad|>")] == 0
    assert lengths[copy.token_to_id(END_OF_DOCUMENT)] == 0


def test_bytes_are_withheld_with_a_reason_where_ids_do_not_stand_for_bytes(trained: Tokenizer) -> None:
    normalising = Tokenizer.from_str(trained.to_str())
    normalising.normalizer = normalizers.NFKC()
    prefixing = Tokenizer.from_str(trained.to_str())
    prefixing.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    spaces = Tokenizer.from_str(trained.to_str())
    spaces.pre_tokenizer = pre_tokenizers.Metaspace()
    spaces.decoder = decoders.Metaspace()
    swallowing = Tokenizer.from_str(trained.to_str())
    swallowing.add_tokens([AddedToken("<x>", lstrip=True)])
    dropping = Tokenizer.from_str(trained.to_str())
    dropping.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    few = Tokenizer(models.BPE({"a": 0}, []))
    few.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cases = {
        "normalises": normalising,
        "space before": prefixing,
        "WordLevel": words,
        "into bytes": spaces,
        "swallows": swallowing,
        "drops": dropping,
        "some bytes": few,
    }
    for reason, tokenizer in cases.items():
        result = token_byte_lengths(tokenizer)
        assert result.values is None
        assert reason in result.reason


def test_the_users_own_choice_of_parallelism_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    with parallel_tokenizers():
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    with parallel_tokenizers():
        assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_a_vocabulary_beyond_any_model_is_refused_before_the_library_aborts() -> None:
    with pytest.raises(DataError, match="the largest is 16,777,216"):
        train_tokenizer(TEXTS, 99_999_999_999)


@pytest.mark.parametrize("use_regex", [True, False])
def test_long_texts_are_cut_only_where_no_token_goes_across(use_regex: bool) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    assert cuts_behind_line_breaks(tokenizer) == use_regex
