"""Measuring ceilings: the arithmetic, the state that must not change, and what is written. No time is asserted."""

import itertools
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch

from drivetrain.config.operation import RunSectionConfig
from drivetrain.engine import ceilings
from drivetrain.engine.ceilings import (
    CPU_SHAPES,
    CUDA_SHAPES,
    MatmulShape,
    Progress,
    measure_matmul,
    measure_memory,
    store_ceiling,
)
from drivetrain.engine.devices import select_device
from drivetrain.errors import DrivetrainError, EnvironmentFault
from drivetrain.measure.ceilings import CeilingEntry, load_ceilings

CPU = select_device(RunSectionConfig(device="cpu"))
SMALL = (MatmulShape(16, 16, 16), MatmulShape(24, 16, 32))


@pytest.fixture(autouse=True)
def _short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_SEARCH_SECONDS", 0.005)


def entry_of(reports: list[Progress] | None = None, sustain_s: float = 0.05) -> CeilingEntry:
    report = None if reports is None else reports.append
    return measure_matmul("fp32", sustain_s, 1, CPU, shapes=SMALL, command="drivetrain bench", report=report)


def test_the_ceiling_is_the_median_of_the_intervals_rates() -> None:
    reports: list[Progress] = []
    entry = entry_of(reports)
    rates = [report.rate for report in reports if report.phase == "sustain"]
    low, median, high = np.percentile(rates, [10, 50, 90])
    assert entry.value == median
    assert (entry.rate_p10, entry.rate_p90) == (low, high)
    assert entry.intervals == len(rates)
    assert entry.seconds >= 0.05


def test_the_fastest_candidate_is_sustained() -> None:
    reports: list[Progress] = []
    entry = entry_of(reports)
    searched = [report for report in reports if report.phase == "search"]
    assert len(searched) == 2 * len(SMALL), "each shape with both layouts"
    best = max(searched, key=lambda report: report.rate)
    assert {report.what for report in reports if report.phase == "sustain"} == {best.what}
    assert best.what == f"{entry.method}, {'x'.join(map(str, entry.shape))}"


def test_rates_are_flops_over_the_time_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_timed", lambda run, calls, device: 0.25 * calls)
    entry = measure_matmul("fp32", 2.0, 1, CPU, shapes=[MatmulShape(8, 4, 2)])
    assert entry.value == entry.rate_p10 == entry.rate_p90 == 2 * 8 * 4 * 2 / 0.25


def test_one_fast_interval_does_not_make_the_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def timed(run: object, batch: int, device: object) -> float:
        # One interval of 8 calls runs eight times as fast: the clock was up, or a neighbour idle.
        return 0.125 if 8 <= next(calls) < 16 else 1.0

    monkeypatch.setattr(ceilings, "_timed", timed)
    reports: list[Progress] = []
    entry = measure_matmul("fp32", 20.0, 1, CPU, shapes=[MatmulShape(8, 4, 2)], report=reports.append)
    assert entry.value == 2 * 8 * 4 * 2
    assert max(report.rate for report in reports) == 8 * entry.value


def test_bytes_are_counted_as_read_plus_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_timed", lambda run, calls, device: 0.5 * calls)
    entry = measure_memory(2.0, 1, CPU, array_bytes=4000)
    assert entry.method.startswith("triad"), "3 arrays in the same time beat 2"
    assert entry.value == 3 * 4000 / 0.5
    assert entry.shape == (1000,)
    assert (entry.kind, entry.dtype) == ("memory", "fp32")


def test_memory_is_really_moved() -> None:
    entry = measure_memory(0.02, 1, CPU, array_bytes=2**20)
    assert entry.value > 0
    assert entry.cpu_share is not None


def test_arrays_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "available_memory", lambda: 10_000)
    with pytest.raises(EnvironmentFault, match="3 arrays of 4,000 bytes"):
        measure_memory(1.0, 1, CPU, array_bytes=4000)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_every_dtype_can_be_measured(dtype: str) -> None:
    entry = measure_matmul(dtype, 0.02, 1, CPU, shapes=SMALL[:1])
    assert entry.dtype == dtype
    assert entry.num_threads == 1


def test_an_unknown_dtype_is_refused_with_those_that_exist() -> None:
    with pytest.raises(DrivetrainError, match="bf16, fp16, fp32"):
        measure_matmul("int3", 1.0, 1, CPU)


def test_measuring_leaves_threads_and_random_state_alone() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    entry_of()
    measure_matmul("fp32", 0.02, threads + 1, CPU, shapes=SMALL[:1])
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_are_restored_and_nothing_is_stored_after_an_interruption(tmp_path: Path) -> None:
    threads = torch.get_num_threads()

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_matmul("fp32", 1.0, threads + 1, CPU, shapes=SMALL, report=interrupt)
    assert torch.get_num_threads() == threads
    assert load_ceilings(tmp_path).entries == ()


def test_candidates_are_large_and_distinct() -> None:
    for shapes in (CPU_SHAPES, CUDA_SHAPES):
        assert len(set(shapes)) == len(shapes)
        assert min(min(shape) for shape in shapes) >= 768
    assert MatmulShape(2, 3, 5).flops == 2 * 2 * 3 * 5


def test_a_stored_ceiling_is_read_back_and_replaced_by_a_newer_one(tmp_path: Path) -> None:
    first = entry_of().model_copy(update={"cpu_share": 1.0, "rate_p10": 1.0, "rate_p90": 1.0})
    stored = store_ceiling(first, tmp_path)
    assert (stored.stored, stored.former) == (True, None)
    assert orjson.loads(stored.path.read_bytes())["schema"] == 1
    other = first.model_copy(update={"num_threads": 9})
    store_ceiling(other, tmp_path)
    newer = first.model_copy(update={"value": 7.0})
    assert store_ceiling(newer, tmp_path).former == first
    assert set(load_ceilings(tmp_path).entries) == {newer, other}


def test_a_disturbed_measurement_does_not_replace_an_undisturbed_one(tmp_path: Path) -> None:
    sound = entry_of().model_copy(update={"cpu_share": 1.0, "rate_p10": 1.0, "rate_p90": 1.0})
    disturbed = sound.model_copy(update={"cpu_share": 0.4, "value": 1.0})
    assert store_ceiling(disturbed, tmp_path).stored, "better than none"
    assert store_ceiling(sound, tmp_path).stored
    assert not store_ceiling(disturbed, tmp_path).stored
    assert load_ceilings(tmp_path).entries == (sound,)
    assert store_ceiling(disturbed, tmp_path, force=True).stored
    assert load_ceilings(tmp_path).entries == (disturbed,)


def test_a_damaged_file_is_not_overwritten(tmp_path: Path) -> None:
    entry = entry_of()
    path = store_ceiling(entry, tmp_path).path
    path.write_bytes(b"half a fi")
    with pytest.raises(EnvironmentFault, match="damaged"):
        store_ceiling(entry, tmp_path)
    assert path.read_bytes() == b"half a fi"


def test_a_cache_that_cannot_be_made_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="DRIVETRAIN_CACHE"):
        store_ceiling(entry_of(), tmp_path / "file" / "cache")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_timed_by_its_own_events() -> None:
    device = select_device(RunSectionConfig(device="cuda"))
    entry = measure_matmul("bf16", 0.2, 1, device, shapes=[MatmulShape(2048, 2048, 2048)])
    assert entry.num_threads is None
    assert entry.cpu_share is None
    assert measure_memory(0.2, 1, device, array_bytes=2**26).value > 0
