"""The sample cache: the same batches to the bit, bounded, whole or not there, and never of other data."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_batch_loader import equal, take

from drivetrain.config import RunConfig
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.data.sample_cache import SampleCache, make_room
from drivetrain.engine.data.sequences import Sequences
from drivetrain.errors import EnvironmentFault

MakeConfig = Callable[..., RunConfig]
ROW = 9
SLOT = 4 * ROW + 2 + 8
PLENTY = 1 << 20


def cache_of(folder: Path, identity: str = "a" * 64, rows: int = 10, num_bytes: int = PLENTY) -> SampleCache:
    return SampleCache(folder, identity, ROW, rows, num_bytes=num_bytes)


def row_of(number: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.arange(ROW, dtype=np.int64) + 100 * number
    tokens[-2:] = -1
    return tokens, np.arange(ROW) % 3 == 0


def read(cache: SampleCache, row: int) -> tuple[np.ndarray, np.ndarray] | None:
    tokens, starts = np.zeros(ROW, np.int64), np.zeros(ROW, bool)
    return (tokens, starts) if cache.get(row, tokens, starts) else None


def test_a_row_comes_back_as_it_was_padding_included(tmp_path: Path) -> None:
    cache = cache_of(tmp_path / "deep" / "folder")
    assert read(cache, 3) is None
    cache.put(3, *row_of(3))
    for reader in (cache, cache_of(tmp_path / "deep" / "folder"), pickle.loads(pickle.dumps(cache))):  # noqa: S301
        found = read(reader, 3)
        assert found is not None
        assert np.array_equal(found[0], row_of(3)[0])
        assert np.array_equal(found[1], row_of(3)[1])
        assert read(reader, 2) is None, "a hole of the file is no row"
        assert read(reader, 4) is None


@pytest.mark.parametrize("at", [0, 20, 4 * ROW, SLOT - 8, SLOT - 1])
def test_a_slot_that_is_half_there_or_changed_is_no_row(tmp_path: Path, at: int) -> None:
    cache = cache_of(tmp_path)
    for row in range(3):
        cache.put(row, *row_of(row))
    content = bytearray(cache.path.read_bytes())
    content[SLOT + at] ^= 1
    cache.path.write_bytes(content)
    assert read(cache_of(tmp_path), 1) is None
    assert read(cache_of(tmp_path), 0) is not None
    os.truncate(cache.path, 2 * SLOT + at)
    assert read(cache_of(tmp_path), 2) is None


def test_a_row_in_another_rows_place_is_no_row(tmp_path: Path) -> None:
    cache = cache_of(tmp_path)
    cache.put(0, *row_of(0))
    content = cache.path.read_bytes()
    cache.path.write_bytes(content + content)
    assert read(cache_of(tmp_path), 0) is not None
    assert read(cache_of(tmp_path), 1) is None


def test_it_is_bounded_and_the_first_rows_are_those_it_takes(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, num_bytes=4 * SLOT + 5)
    assert cache.num_slots == 4
    for row in range(10):
        cache.put(row, *row_of(row))
    assert [row for row in range(10) if read(cache, row) is not None] == [0, 1, 2, 3]
    assert cache.path.stat().st_size == cache.num_bytes == 4 * SLOT


def test_other_caches_make_room_the_least_recently_used_first(tmp_path: Path) -> None:
    caches = {name: cache_of(tmp_path, name * 64) for name in "abc"}
    for age, cache in enumerate(caches.values()):
        cache.put(0, *row_of(0))
        os.utime(cache.path, (1000 + age, 1000 + age))
    block = caches["a"].path.stat().st_blocks * 512
    own = cache_of(tmp_path, "d" * 64)
    make_room(tmp_path, [own], own.num_bytes + 2 * block)
    assert sorted(path.name[0] for path in tmp_path.glob("*.rows")) == ["b", "c", "d"]
    make_room(tmp_path, [own], own.num_bytes)
    assert [path.name[0] for path in tmp_path.glob("*.rows")] == ["d"]
    assert read(caches["b"], 0) is not None, "who has it open goes on with it"


def test_a_disk_without_room_ends_the_keeping_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    cache.put(1, *row_of(1))
    assert "No space left on device; the sample cache takes no more rows" in str(cache.fault)
    assert read(cache, 1) is None


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="file"):
        cache_of(tmp_path / "file" / "samples")


@pytest.fixture
def config(make_config: MakeConfig, numbered_corpus: Corpus) -> MakeConfig:
    def make(**data: object) -> RunConfig:
        training = {"micro_batch_size": 4, "global_batch_size": 12}
        return make_config(vocab_size=numbered_corpus.vocab_size, training=training, data=data)

    return make


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_batches_are_the_same_to_the_bit_and_the_second_epoch_builds_none(
    config: MakeConfig, numbered_corpus: Corpus, tmp_path: Path, packing: str, num_workers: int
) -> None:
    made = config(packing=packing, transform="data_transforms:reverse_in_place", num_workers=num_workers)
    plain = BatchLoader(made, numbered_corpus, "train", num_workers=0)
    epoch = -(-plain.samples_per_epoch // 4)
    expected = take(plain, 2 * epoch)
    with BatchLoader(made, numbered_corpus, "train", sample_cache=(tmp_path, PLENTY)) as loader:
        assert all(map(equal, take(loader, 2 * epoch), expected))
        assert loader.cache_fault is None
        assert loader.building.built_rows == plain.samples_per_epoch
        assert loader.building.cached_rows == 8 * epoch - plain.samples_per_epoch
    with BatchLoader(made, numbered_corpus, "train", sample_cache=(tmp_path, PLENTY)) as again:
        assert all(map(equal, take(again, epoch), expected))
        assert again.building.built_rows == 0


def test_a_run_on_other_data_reads_nothing_of_it(
    config: MakeConfig, numbered_corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def path_of(seed: int = 1, seq_length: int = 8, corpus: Corpus = numbered_corpus, **data: object) -> Path:
        sequences = Sequences(corpus, config(**data).data, "train", seq_length, seed)
        sequences.use_cache(tmp_path, PLENTY)
        (cache,) = sequences.caches
        return cache.path

    other = Corpus.open(numbered_corpus.prefix, vocab_size=numbered_corpus.vocab_size)
    object.__setattr__(other, "fingerprint", "f" * 64)
    paths = [
        path_of(),
        path_of(seed=2),
        path_of(seq_length=9),
        path_of(corpus=other),
        path_of(packing="best_fit"),
        path_of(split="80,20"),
        path_of(transform="data_transforms:add_one"),
        path_of(transform="data_transforms:reverse_in_place"),
    ]
    assert len(set(paths)) == len(paths)
    assert path_of(num_workers=3, reset_attention_mask=False) == path_of(), "what changes no row"
    (tmp_path / "changing.py").write_text("def same(ids):\n    return ids\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = path_of(transform="changing:same")
    (tmp_path / "changing.py").write_text("def same(ids):\n    return ids + 0\n")
    assert path_of(transform="changing:same") != before, "the file of the callable has changed"


def test_a_folder_that_cannot_be_written_costs_the_cache_and_not_the_batches(
    config: MakeConfig, numbered_corpus: Corpus, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    loader = BatchLoader(config(), numbered_corpus, "train", sample_cache=(tmp_path / "file" / "x", PLENTY))
    assert loader.cache_fault is not None
    assert next(loader).token_ids.shape == (4, 8)
