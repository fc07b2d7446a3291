"""Building batches: by a thread, in order; timed by operation, so that the slow one has a name; batch transforms."""

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from test_batch_loader import equal, take

from drivetrain.config import RunConfig
from drivetrain.engine.data.ahead import Ahead
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.data.timing import OperationTimes
from drivetrain.engine.data_report import DataReport
from drivetrain.errors import DataError

MakeConfig = Callable[..., RunConfig]
SLEEPS = "data_transforms:sleep_a_little"
PLAIN = "data_transforms:to_32_bits"


@pytest.fixture
def config(make_config: MakeConfig, numbered_corpus: Corpus) -> MakeConfig:
    def make(**data: object) -> RunConfig:
        training = {"micro_batch_size": 3, "global_batch_size": 12}
        return make_config(vocab_size=numbered_corpus.vocab_size, training=training, data=data)

    return make


def test_a_thread_gives_the_same_batches_in_order_and_is_gone_after_closing(
    config: MakeConfig, numbered_corpus: Corpus
) -> None:
    expected = take(BatchLoader(config(), numbered_corpus, "train", start_sample=24), 40)
    before = threading.active_count()
    with BatchLoader(config(), numbered_corpus, "train", start_sample=24, prefetch_batches=3) as loader:
        assert loader.prefetches
        assert threading.active_count() == before + 1
        assert all(map(equal, take(loader, 40), expected))
        assert loader.building.batches == 40
    assert threading.active_count() == before
    loader.close()


def test_a_thread_builds_as_many_ahead_as_asked_and_no_more() -> None:
    built: list[int] = []
    enough = threading.Event()

    def items() -> Iterator[int]:
        for number in range(100):
            built.append(number)
            if number >= 3:
                enough.set()
            yield number

    ahead = Ahead(items(), 3)
    assert enough.wait(60), "three wait in line, and the fourth is at hand"
    time.sleep(0.05)
    assert len(built) == 4
    assert [next(ahead) for _ in range(5)] == list(range(5))
    ahead.close()
    assert not ahead.alive


def test_the_thread_takes_one_core_and_leaves_the_computation_its_own() -> None:
    def items() -> Iterator[int]:
        yield torch.get_num_threads()

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert list(Ahead(items(), 1)) == [1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_what_the_thread_raises_is_raised_where_the_batch_is_asked_for() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("no such thing")

    ahead = Ahead(items(), 2)
    assert next(ahead) == 1
    with pytest.raises(KeyError, match="no such thing"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)
    assert list(Ahead(iter(range(7)), 2)) == list(range(7))


def test_a_transforms_fault_in_the_thread_is_one_message(config: MakeConfig, numbered_corpus: Corpus) -> None:
    made = config(transform="data_transforms:fail")
    with (
        BatchLoader(made, numbered_corpus, "train", prefetch_batches=2) as loader,
        pytest.raises(DataError, match="it raised KeyError"),
    ):
        next(loader)


def test_a_number_of_samples_ends_a_loader_with_a_thread(config: MakeConfig, numbered_corpus: Corpus) -> None:
    with BatchLoader(config(), numbered_corpus, "train", num_samples=24, prefetch_batches=2) as loader:
        assert len(list(loader)) == 8


@pytest.mark.parametrize("how", [{}, {"prefetch_batches": 2}, {"num_workers": 1}])
def test_the_slow_operation_is_found_by_its_name(
    config: MakeConfig, numbered_corpus: Corpus, how: dict[str, int]
) -> None:
    made = config(transform=f"{PLAIN},{SLEEPS}")
    with BatchLoader(made, numbered_corpus, "train", **how) as loader:
        take(loader, 12)
        building = loader.building
    assert set(building.seconds) == {"read", "collate", PLAIN, SLEEPS}
    assert building.slowest == SLEEPS
    # 10 ms a document, which no clock makes less: no row is built of fewer than one that was not kept.
    assert building.seconds[SLEEPS] >= 36 * 0.01
    assert (building.batches, building.built_rows) == (12, 36)


def test_operations_inside_an_operation_are_taken_off() -> None:
    times = OperationTimes()
    with times.of("outer"):
        time.sleep(0.002)
        times.add("inner", 0.0015)
        with times.of("nested"):
            time.sleep(0.001)
    found = times.take()
    assert set(found) == {"outer", "inner", "nested"}
    assert found["nested"] >= 0.001
    assert found["inner"] == 0.0015
    assert times.take() == {}


def test_a_report_names_the_slow_operation_once_steps_wait_for_it(
    config: MakeConfig, numbered_corpus: Corpus
) -> None:
    made = config(transform=SLEEPS)
    with BatchLoader(made, numbered_corpus, "train") as loader:
        report = DataReport(loader, made.data, 0)
        take(loader, 4)
        metrics = report.metrics(2, 0.5, 1.0, ["warmup"])
        assert report.data_wait_frac is None, "the first steps are no steady state"
        assert metrics["data/transform_s"] == pytest.approx(loader.building.seconds[SLEEPS] / 2)
        assert metrics["data/build_s"] == pytest.approx(sum(loader.building.seconds.values()) / 2)
        assert report.metrics(2, 0.01, 1.0, ())["data/build_s"] == 0.0
        assert report.finding() is None, "1% is nothing to speak of"
        report.metrics(10, 0.7, 1.0, ())
        text = report.news()
        assert text is not None
        assert text.startswith(
            "36% of a step is waiting for batches; the slowest operation of building them is"
        )
        assert f"{SLEEPS} of data.transform: " in text
        assert report.news() is None, "said once"
        event = report.at_end()
        assert event["slowest"] == SLEEPS
        assert next(iter(event["operations"])) == SLEEPS
        assert sum(one["share"] for one in event["operations"].values()) == pytest.approx(1)


def test_transforms_in_a_row_are_applied_in_order(config: MakeConfig, numbered_corpus: Corpus) -> None:
    two = "data_transforms:double_small,data_transforms:add_one_small"
    for row, plain in zip(
        next(BatchLoader(config(transform=two), numbered_corpus, "train")).token_ids.flatten().tolist(),
        next(BatchLoader(config(), numbered_corpus, "train")).token_ids.flatten().tolist(),
        strict=True,
    ):
        assert row == (plain % 100) * 2 + 1


def test_a_batch_transform_sees_whole_sequences_and_leaves_padding_alone(
    config: MakeConfig, numbered_corpus: Corpus
) -> None:
    plain = next(BatchLoader(config(packing="pad"), numbered_corpus, "train"))
    made = config(packing="pad", batch_transform="data_transforms:reverse_rows_of_batch")
    changed = next(BatchLoader(made, numbered_corpus, "train"))
    assert changed.num_valid_tokens == plain.num_valid_tokens
    assert np.array_equal(changed.cu_seqlens, plain.cu_seqlens)
    assert not np.array_equal(changed.token_ids, plain.token_ids)
    padded = ~plain.loss_mask
    padded[:, 0] = False
    assert np.array_equal(changed.token_ids[:, 1:][padded[:, :-1]], plain.token_ids[:, 1:][padded[:, :-1]])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("first_row", r"samples 0 to 2: it returned shape \(1, 9\), expected \(3, 9\)"),
        ("fail", "samples 0 to 2: it raised KeyError"),
        ("beyond", "outside model.vocab_size"),
    ],
)
def test_a_batch_transform_that_breaks_its_contract_is_named(
    config: MakeConfig, numbered_corpus: Corpus, name: str, message: str
) -> None:
    made = config(batch_transform=f"data_transforms:{name}")
    with pytest.raises(
        DataError, match=rf"data\.batch_transform = 'data_transforms:{name}', .*{message}|{message}"
    ):
        next(BatchLoader(made, numbered_corpus, "train"))
