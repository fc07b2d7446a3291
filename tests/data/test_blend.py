"""Blends: exact proportions at every length, any sample found by its number, every corpus in epochs of its own."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.config import DataConfig, ModelConfig, RunConfig
from drivetrain.config.blend import blend_problem, corpora_of, with_prefixes
from drivetrain.engine.data.blend import LONGEST_PERIOD, BlendedCorpus, BlendedSamples, Mixture
from drivetrain.engine.data.corpus import Corpus, ensure_corpus
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.data.opening import samples_of
from drivetrain.errors import DataError

WriteCorpus = Callable[..., str]
WEIGHTS = st.lists(st.integers(1, 50).map(Fraction), min_size=1, max_size=5)


@given(weights=WEIGHTS, count=st.integers(1, 700))
def test_after_any_number_of_samples_no_source_is_two_away_from_its_share(
    weights: list[Fraction], count: int
) -> None:
    mixture = Mixture(weights)
    source, _ = mixture.locate(np.arange(count))
    given_ = np.bincount(source, minlength=len(weights))
    for number, weight in enumerate(weights):
        assert abs(int(given_[number]) - count * weight / sum(weights)) < 2
    assert mixture.used(count) == given_.tolist()
    assert mixture.exact


@given(weights=WEIGHTS, start=st.integers(0, 10_000))
def test_a_sample_is_found_without_those_before_it(weights: list[Fraction], start: int) -> None:
    mixture = Mixture(weights)
    source, rank = mixture.locate(np.arange(start + 50))
    alone = mixture.locate(np.arange(start, start + 50))
    assert np.array_equal(alone[0], source[start:])
    assert np.array_equal(alone[1], rank[start:])
    for number in range(len(weights)):
        of_one = rank[source == number]
        assert of_one.tolist() == list(range(len(of_one))), (
            "each source gives its samples one after the other"
        )


def test_a_whole_period_has_exactly_the_ratio_of_the_weights() -> None:
    mixture = Mixture([Fraction("0.3"), Fraction("0.7")])
    assert (mixture.counts, mixture.period, mixture.exact) == ([3, 7], 10, True)
    assert mixture.locate(np.arange(10))[0].tolist() == [1, 0, 1, 1, 0, 1, 1, 1, 0, 1]


def test_weights_of_too_long_a_pattern_are_rounded_and_none_is_left_out() -> None:
    mixture = Mixture([Fraction("0.333333333"), Fraction("0.666666666"), Fraction("0.000000001")])
    assert not mixture.exact
    assert mixture.counts[2] == 1
    assert abs(mixture.period - LONGEST_PERIOD) <= 1
    assert mixture.counts[1] / mixture.period == pytest.approx(2 / 3, abs=1e-4)


def test_the_longest_part_without_a_repeat_is_found() -> None:
    mixture = Mixture([Fraction(1), Fraction(2)])
    for available in ([5, 100], [100, 5], [3, 6], [1, 1], [0, 9]):
        most = mixture.longest_without_repeat(available)
        assert all(used <= have for used, have in zip(mixture.used(most), available, strict=True))
        assert any(used > have for used, have in zip(mixture.used(most + 1), available, strict=True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("corpora/a", [(1, "corpora/a")]),
        ("my corpus/x", [(1, "my corpus/x")]),
        ("0.3 a 0.7 b", [(Fraction(3, 10), "a"), (Fraction(7, 10), "b")]),
        ("30  a  70  'my corpus/b'", [(30, "a"), (70, "my corpus/b")]),
        ("1e-1 a 2 b", [(Fraction(1, 10), "a"), (2, "b")]),
        ("2024", [(1, "2024")]),
    ],
)
def test_a_data_path_is_one_prefix_or_pairs(text: str, expected: list[tuple[object, str]]) -> None:
    assert [(one.weight, one.prefix) for one in corpora_of(text)] == expected
    assert blend_problem(text) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.3 a 0.7", "3 words, which are no pairs"),
        ("0.3 a b c", "'b' stands where the weight of 'c' is expected"),
        ("0 a 1 b", "'0' stands where the weight of 'a' is expected: a number above 0"),
        ("-1 a 1 b", "'-1' stands where"),
        ("1 a 1 a", "'a' stands there twice"),
        ("1 a 2 'b", "No closing quotation"),
    ],
)
def test_a_blend_that_is_none_is_named(text: str, message: str) -> None:
    assert message in (blend_problem(text) or "")


@given(st.text(max_size=30))
def test_any_text_is_corpora_or_has_a_reason(text: str) -> None:
    if blend_problem(text) is None:
        assert all(one.weight > 0 for one in corpora_of(text))


def test_prefixes_change_and_shares_stay() -> None:
    assert with_prefixes("0.30 a 0.7 'b c'", lambda prefix: prefix + ".x") == "0.30 a.x 0.7 'b c.x'"
    assert with_prefixes("a b", str.upper) == "A B"


@pytest.fixture
def two(write_corpus: WriteCorpus) -> tuple[str, int]:
    """Two corpora whose ids do not overlap: 0 to 199, and 200 to 499."""
    first = write_corpus([range(start, start + 10) for start in range(0, 200, 10)], 500, "first")
    second = write_corpus([range(start, start + 30) for start in range(200, 500, 30)], 500, "second")
    return f"1 {first} 3 {second}", 500


def model_of(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=vocab_size, seq_length=9
    )


def test_samples_of_a_blend_are_those_of_its_corpora_in_their_shares(two: tuple[str, int]) -> None:
    data = DataConfig(data_path=two[0], split="100,0")
    corpus = ensure_corpus(data, model_of(two[1]))
    assert isinstance(corpus, BlendedCorpus)
    samples = samples_of(corpus, data, "train", 9, 1)
    assert isinstance(samples, BlendedSamples)
    batch = samples.batch(np.arange(80))
    from_first = (batch.token_ids[:, 0] < 200).tolist()
    assert sum(from_first) == 20
    assert ((batch.token_ids < 200).all(dim=1) | (batch.token_ids >= 200).all(dim=1)).all()
    # One epoch of the first corpus is its 22 windows, each once, whatever the other does.
    part = samples.parts[0]
    rows = samples.batch(np.arange(4 * part.num_samples)).labels
    of_first = rows[(rows < 200).all(dim=1)].flatten().tolist()
    assert len(of_first) == len(set(of_first)) == part.num_samples * 9


def test_held_out_text_of_a_blend_is_seen_once_at_most(two: tuple[str, int]) -> None:
    data = DataConfig(data_path=two[0], split="60,40")
    corpus = ensure_corpus(data, model_of(two[1]))
    samples = samples_of(corpus, data, "validation", 9, 1)
    batch = samples.batch(np.arange(samples.num_samples + 3))
    labels = batch.labels[batch.loss_mask].tolist()
    assert len(labels) == len(set(labels)) == samples.num_samples * 9


def test_a_blend_is_served_alike_to_any_layout(two: tuple[str, int]) -> None:
    def rows(world_size: int, micro: int) -> list[tuple[int, ...]]:
        config = RunConfig.model_validate(
            {
                "model": model_of(two[1]).model_dump(),
                "training": {"micro_batch_size": micro, "global_batch_size": 12},
                "data": {"data_path": two[0], "split": "100,0"},
            }
        )
        corpus = ensure_corpus(config.data, config.model)
        loaders = [
            BatchLoader(config, corpus, "train", rank=r, world_size=world_size) for r in range(world_size)
        ]
        return [
            tuple(row)
            for _ in range(3 * loaders[0].num_microbatches)
            for loader in loaders
            for row in next(loader).token_ids.tolist()
        ]

    assert rows(1, 12) == rows(2, 3) == rows(3, 2) == rows(4, 3)


def test_the_fingerprint_of_a_blend_knows_weights_and_corpora(two: tuple[str, int]) -> None:
    def fingerprint(path: str) -> str:
        return ensure_corpus(DataConfig(data_path=path), model_of(two[1])).fingerprint

    one, other = two[0], "2" + two[0][1:]
    assert fingerprint(one) == fingerprint(one)
    assert len({fingerprint(one), fingerprint(other), fingerprint(two[0].split()[1])}) == 3


def test_corpora_of_different_tokenizers_are_no_blend(write_corpus: WriteCorpus) -> None:
    opened = [Corpus.open(write_corpus([range(20)], name=name), vocab_size=100) for name in ("a", "b")]
    for corpus, tokenizer in zip(opened, ("1" * 64, "2" * 64), strict=True):
        object.__setattr__(corpus, "meta", corpus.meta.model_copy(update={"tokenizer_sha256": tokenizer}))
    with pytest.raises(DataError, match="prepared with different tokenizers"):
        BlendedCorpus.of("1 a 1 b", opened, [Fraction(1), Fraction(1)])


@pytest.mark.parametrize("known", [(), (0,), (1, 2), (0, 1, 2)])
def test_a_blend_says_which_corpora_do_not_tell_their_tokenizer(
    write_corpus: WriteCorpus, known: tuple[int, ...]
) -> None:
    opened = [Corpus.open(write_corpus([range(20)], name=name), vocab_size=100) for name in ("a", "b", "c")]
    for number in known:
        meta = opened[number].meta.model_copy(update={"tokenizer_sha256": "1" * 64})
        object.__setattr__(opened[number], "meta", meta)
    said: list[str] = []
    BlendedCorpus.of("1 a 1 b 1 c", opened, [Fraction(1)] * 3, lambda progress: said.append(progress.phase))
    unknown = [one.prefix for number, one in enumerate(opened) if number not in known]
    assert len(said) == bool(unknown)
    assert all(repr(one.prefix) in "".join(said) for one in opened if one.prefix in unknown)
    assert not any(repr(one.prefix) in "".join(said) for one in opened if one.prefix not in unknown)


def test_the_message_about_a_blend_of_unknown_tokenizers_is_given_where_a_configuration_is_opened(
    two: tuple[str, int],
) -> None:
    said: list[str] = []
    ensure_corpus(
        DataConfig(data_path=two[0]), model_of(two[1]), lambda progress: said.append(progress.phase)
    )
    assert any("was not checked" in one for one in said)


def test_different_tokenizers_are_found_behind_a_corpus_that_tells_none(write_corpus: WriteCorpus) -> None:
    opened = [Corpus.open(write_corpus([range(20)], name=name), vocab_size=100) for name in ("a", "b", "c")]
    for corpus, tokenizer in zip(opened[1:], ("1" * 64, "2" * 64), strict=True):
        object.__setattr__(corpus, "meta", corpus.meta.model_copy(update={"tokenizer_sha256": tokenizer}))
    with pytest.raises(DataError, match="prepared with different tokenizers"):
        BlendedCorpus.of("1 a 1 b 1 c", opened, [Fraction(1)] * 3)
