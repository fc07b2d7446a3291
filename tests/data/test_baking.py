"""A transform that is applied once: the same samples to the bit, and nothing stale or foreign is taken for it."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from drivetrain.catalogue import entry
from drivetrain.config import DataConfig, LaunchFacts, ModelConfig, RunConfig
from drivetrain.engine.data.baked import baked_path
from drivetrain.engine.data.baking import bake
from drivetrain.engine.data.corpus import Corpus, ensure_corpus
from drivetrain.engine.data.opening import bake_all, data_identity, samples_of
from drivetrain.engine.data.progress import Progress
from drivetrain.errors import DataError
from drivetrain.measure.corpora import baked_data_path, baked_prefix

WriteCorpus = Callable[..., str]
REVERSE = "data_transforms:reverse_in_place"
MODEL = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=100, seq_length=8)


@pytest.fixture
def prefix(write_corpus: WriteCorpus) -> str:
    return write_corpus([range(start, start + 1 + start % 7) for start in range(0, 90, 3)])


def config_of(data_path: str | None, transform: str | None = REVERSE) -> RunConfig:
    return RunConfig(model=MODEL, data=DataConfig(data_path=data_path, transform=transform))


def rows_of(config: RunConfig, heard: list[Progress] | None = None) -> np.ndarray:
    corpus = ensure_corpus(config.data, config.model, (heard if heard is not None else []).append)
    samples = samples_of(corpus, config.data, "train", 8, 1)
    assert samples.is_baked == (baked_path(corpus.prefix).exists())
    return samples.batch(np.arange(2 * samples.num_samples)).token_ids.numpy()


def moved(config: RunConfig) -> RunConfig:
    change = entry("bake_transforms").on(config, LaunchFacts())
    assert change is not None
    assert list(change) == ["data.data_path"]
    return config_of(change["data.data_path"], config.data.transform)


def test_the_move_of_the_entry_makes_the_corpus_once_and_the_samples_stay_the_same(prefix: str) -> None:
    config = config_of(prefix)
    expected = rows_of(config)
    assert not np.array_equal(expected, rows_of(config_of(prefix, None)))
    heard: list[Progress] = []
    assert np.array_equal(rows_of(moved(config), heard), expected)
    assert any(f"applying {REVERSE}" in progress.phase for progress in heard)
    heard.clear()
    assert np.array_equal(rows_of(moved(config), heard), expected)
    assert not any("applying" in progress.phase for progress in heard)


def test_the_entry_is_requested_by_the_path_and_its_off_move_leads_back(prefix: str) -> None:
    one, config = entry("bake_transforms"), config_of(prefix)
    assert not one.requested(config)
    on = moved(config)
    assert one.requested(on)
    assert one.on(on, LaunchFacts()) is None
    assert one.off(on) == {"data.data_path": prefix}
    standard = config_of(None)
    assert one.off(moved(standard)) == {"data.data_path": None}
    assert one.on(config_of(prefix, None), LaunchFacts()) is None


def test_data_is_the_same_data_whether_the_transform_is_applied_before_or_while_training(prefix: str) -> None:
    config = config_of(prefix)

    def identity(config: RunConfig) -> str:
        return data_identity(ensure_corpus(config.data, config.model), config.data)

    assert identity(moved(config)) == identity(config)
    assert identity(config_of(prefix, None)) != identity(config)
    blend = config_of(f"1 {prefix}")
    assert baked_data_path(blend) == f"1 {baked_prefix(prefix, REVERSE)}"


def test_a_corpus_of_another_transform_is_refused(prefix: str) -> None:
    path = moved(config_of(prefix)).data.data_path
    rows_of(config_of(path))
    with pytest.raises(
        DataError, match=r"was made by applying 'data_transforms:reverse_in_place', and data\.transform ="
    ):
        rows_of(config_of(path, "data_transforms:add_one"))


def test_another_version_of_the_transform_is_refused(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text("def same(ids):\n    return ids\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    baked = moved(config_of(prefix, "version:same"))
    rows_of(baked)
    (tmp_path / "version.py").write_text("def same(ids):\n    return ids * 1\n")
    with pytest.raises(DataError, match="another version of 'version:same'"):
        rows_of(baked)
    bake_all(config_of(prefix, "version:same").data, MODEL)
    rows_of(baked)


def test_a_description_of_other_files_is_refused(prefix: str) -> None:
    baked = moved(config_of(prefix))
    rows_of(baked)
    path = baked_path(str(baked.data.data_path))
    path.write_text(path.read_text().replace('"bin": "', '"bin": "0'))
    with pytest.raises(DataError, match="describes other files"):
        rows_of(baked)
    path.write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        rows_of(baked)


def test_a_transform_that_fails_leaves_no_corpus(prefix: str, tmp_path: Path) -> None:
    corpus = Corpus.open(prefix, vocab_size=100)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(DataError, match="document 0: it raised KeyError"):
        bake(corpus, DataConfig(transform="data_transforms:fail"), tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == before
    with pytest.raises(DataError, match="nothing to apply"):
        bake(corpus, DataConfig(), tmp_path / "out")


def test_corpora_of_a_blend_are_made_each(write_corpus: WriteCorpus) -> None:
    first = write_corpus([range(20)] * 3, name="first")
    second = write_corpus([range(50, 90)] * 3, name="second")
    config = config_of(f"0.25 {first} 0.75 {second}")
    assert np.array_equal(rows_of_blend(moved(config)), rows_of_blend(config))
    assert baked_path(baked_prefix(first, REVERSE)).exists()
    assert baked_path(baked_prefix(second, REVERSE)).exists()


def rows_of_blend(config: RunConfig) -> np.ndarray:
    corpus = ensure_corpus(config.data, config.model)
    return samples_of(corpus, config.data, "train", 8, 1).batch(np.arange(24)).token_ids.numpy()
