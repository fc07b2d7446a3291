"""Which device, how many threads, which peak. CUDA is stood in for where this machine has none."""

from pathlib import Path

import pytest
import torch

from drivetrain.config.operation import RunSectionConfig
from drivetrain.engine import devices
from drivetrain.engine.ceilings import MatmulShape, measure_matmul, store_ceiling
from drivetrain.engine.devices import Device, peak_for, select_device, set_threads, thread_count
from drivetrain.errors import EnvironmentFault
from drivetrain.measure.machine import cpu_model

CPU = RunSectionConfig(device="cpu")


def gpu(name: str) -> Device:
    return Device("cuda", name, torch.device("cuda", 0), 1)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA Example {index}")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_cpu_is_one_device_named_after_its_model() -> None:
    device = select_device(CPU, local_rank=3)
    assert (device.type, device.name, device.count) == ("cpu", cpu_model(), 1)
    assert device.torch_device == torch.device("cpu")


@pytest.mark.usefixtures("no_gpu")
def test_auto_falls_to_the_cpu_and_cuda_does_not() -> None:
    assert select_device(RunSectionConfig(device="auto")).type == "cpu"
    with pytest.raises(EnvironmentFault, match=r"run\.device=cpu"):
        select_device(RunSectionConfig(device="cuda"))


@pytest.mark.usefixtures("two_gpus")
def test_each_local_rank_has_its_own_gpu() -> None:
    first, second = (select_device(RunSectionConfig(), rank) for rank in (0, 1))
    assert (first.name, second.name) == ("NVIDIA Example 0", "NVIDIA Example 1")
    assert second.torch_device == torch.device("cuda", 1)
    assert second.count == 2
    assert select_device(CPU).type == "cpu"


@pytest.mark.usefixtures("two_gpus")
def test_more_local_processes_than_gpus_is_an_error() -> None:
    with pytest.raises(EnvironmentFault, match="at most 2 processes"):
        select_device(RunSectionConfig(), local_rank=2)


def test_threads_are_shared_out_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "usable_cores", lambda: 7)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as torchrun sets it
    assert [thread_count(CPU, processes) for processes in (1, 2, 7, 20)] == [7, 3, 1, 1]
    assert thread_count(RunSectionConfig(num_threads=5), 2) == 5


def test_set_threads_returns_what_is_in_force() -> None:
    before = torch.get_num_threads()
    try:
        settings = set_threads(before + 1)
        assert settings.compute == torch.get_num_threads() == before + 1
        assert settings.interop == torch.get_num_interop_threads()
    finally:
        torch.set_num_threads(before)


def test_a_cpu_without_a_measurement_has_no_peak_and_says_what_to_run(tmp_path: Path) -> None:
    answer = peak_for(select_device(CPU), "bf16", 2, tmp_path)
    assert answer.peak is None
    assert answer.reason is not None
    assert "drivetrain bench gemm --dtype bf16 --threads 2" in answer.reason


def test_a_cpus_peak_is_what_was_measured_with_as_many_threads(tmp_path: Path) -> None:
    device = select_device(CPU)
    measured = measure_matmul("fp32", 0.02, 1, device, shapes=[MatmulShape(32, 32, 32)])
    entry = measured.model_copy(update={"cpu_share": 1.0})
    store_ceiling(entry, tmp_path)
    peak, reason = peak_for(device, "fp32", 1, tmp_path)
    assert reason is None
    assert peak is not None
    assert peak.value == entry.value
    assert "1 thread," in peak.source
    assert peak_for(device, "fp32", 2, tmp_path).peak is None
    assert peak_for(device, "bf16", 1, tmp_path).peak is None


def test_a_gpus_peak_is_its_data_sheets() -> None:
    peak, reason = peak_for(gpu("NVIDIA H100 80GB HBM3"), "bf16", 8)
    assert reason is None
    assert peak is not None
    assert peak.value == pytest.approx(989e12, rel=0.01)
    assert "data sheet" in peak.source


@pytest.mark.parametrize(("name", "dtype"), [("NVIDIA Example 1", "bf16"), ("Tesla V100-SXM2-32GB", "bf16")])
def test_an_unknown_gpu_or_dtype_has_no_peak_but_a_reason(name: str, dtype: str) -> None:
    peak, reason = peak_for(gpu(name), dtype, 8)
    assert peak is None
    assert reason


def test_a_ceiling_measured_on_a_busy_machine_gives_no_peak_and_says_why(tmp_path: Path) -> None:
    device = select_device(CPU)
    measured = measure_matmul("fp32", 0.02, 1, device, shapes=[MatmulShape(32, 32, 32)])
    store_ceiling(measured.model_copy(update={"cpu_share": 0.5}), tmp_path, force=True)
    peak, reason = peak_for(device, "fp32", 1, tmp_path)
    assert peak is None
    assert reason is not None
    assert "50% of its cores" in reason
    assert "drivetrain bench gemm" in reason


def test_damaged_ceilings_give_no_peak_and_say_so(tmp_path: Path) -> None:
    from drivetrain.measure.ceilings import ceilings_path

    file = ceilings_path(tmp_path)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"{")
    answer = peak_for(select_device(CPU), "fp32", 1, tmp_path)
    assert answer.peak is None
    assert "damaged" in str(answer.reason)
