"""The table of peaks: every device, no default, no conflicting figure made one."""

import csv
import re
from pathlib import Path

import pytest

from drivetrain.errors import DrivetrainError
from drivetrain.measure.peaks import (
    DTYPES,
    device_names,
    find_by_torch_name,
    find_device,
    peak_flops,
    supplied_peak,
    why_unknown,
)

FACTS = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "hardware.csv"


@pytest.fixture
def facts() -> list[dict[str, str]]:
    if not FACTS.exists():
        pytest.skip("the shared fact tables are not here")
    with FACTS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_all_devices_of_the_facts_are_there_under_their_names(facts: list[dict[str, str]]) -> None:
    assert list(device_names()) == [row["device"] for row in facts]
    for row in facts:
        assert find_device(row["device"]).name == row["device"]
        assert find_device(row["device"].upper()).name == row["device"]


def test_each_figure_is_that_of_the_facts_or_missing_with_a_note(facts: list[dict[str, str]]) -> None:
    for row in facts:
        device = find_device(row["device"])
        for dtype in ("bf16", "fp16", "fp8", "fp4"):
            printed = row[f"peak_{dtype}_dense_TFLOPs"]
            if dtype in device.flops:
                leading = re.match(r"[\d.]+", printed)
                assert leading is not None
                assert device.flops[dtype] == float(leading.group()) * 1e12
                assert printed == leading.group() or device.note, f"{device.name}: remark on {dtype} is lost"
            else:
                assert not printed or device.note, f"{device.name}: {dtype} is gone without a reason"


def test_conflicting_figures_must_be_supplied_by_the_user(facts: list[dict[str, str]]) -> None:
    conflicting = [
        row["device"]
        for row in facts
        if "conflicting" in row["confidence"]
        or "uncertain" in row["confidence"]
        or "~" in row["peak_bf16_dense_TFLOPs"]
        or "/" in row["peak_bf16_dense_TFLOPs"]
    ]
    assert len(conflicting) == 4
    for name in [*conflicting, "Ascend 910C (2 dies)", "Ascend 950DT", "L4/L40/others"]:
        for dtype in DTYPES:
            with pytest.raises(DrivetrainError, match="--peak-flops"):
                peak_flops(find_device(name), dtype)


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("H100-SXM-80GB", "bf16", 989),
        ("H100-SXM-80GB", "fp8", 1979),
        ("H100-PCIe-80GB", "bf16", 756),
        ("A100-SXM-80GB", "bf16", 312),
        ("A100-SXM-80GB", "fp32", 156),
        ("V100-SXM2-32GB", "fp16", 125),
        ("V100-SXM2-32GB", "fp32", 15.7),
        ("MI300X", "bf16", 1307),
        ("MI355X", "bf16", 2500),
        ("RTX 4090", "fp16", 165),
        ("B200-SXM-180GB", "bf16", 2250),
        ("GB200 (per GPU)", "bf16", 2500),
        ("TPU v5p", "bf16", 459),
    ],
)
def test_peaks_are_dense_and_of_the_form_factor(name: str, dtype: str, tflops: float) -> None:
    assert peak_flops(find_device(name), dtype).value == tflops * 1e12


def test_the_source_says_which_figure_it_is() -> None:
    assert "tf32" in peak_flops(find_device("A100-SXM-80GB"), "fp32").source
    assert "tf32" not in peak_flops(find_device("V100-SXM2-32GB"), "fp32").source
    assert peak_flops(find_device("H100-SXM-80GB"), "bf16").source.startswith("H100-SXM-80GB bf16, dense")
    assert "2300" in peak_flops(find_device("MI355X"), "bf16").source
    assert "recalled" in peak_flops(find_device("A800-80GB"), "bf16").source


def test_a_dtype_the_device_has_not_is_an_error_with_those_it_has() -> None:
    with pytest.raises(DrivetrainError, match=r"no trusted bf16 peak of V100.*fp16"):
        peak_flops(find_device("V100"), "bf16")
    with pytest.raises(DrivetrainError, match="one of: bf16"):
        peak_flops(find_device("V100"), "int8")


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("h100-sxm", "H100-SXM-80GB"),
        ("H100 SXM", "H100-SXM-80GB"),
        ("H200", "H200-141GB"),
        ("B200", "B200-SXM-180GB"),
        ("GB200", "GB200 (per GPU)"),
        ("4090", "RTX 4090"),
        ("L40S", "L40S"),
        (" mi300x ", "MI300X"),
    ],
)
def test_whole_words_that_fit_one_device_are_enough(wanted: str, found: str) -> None:
    assert find_device(wanted).name == found


@pytest.mark.parametrize(
    ("wanted", "candidates"),
    [
        ("H100", ["H100-SXM-80GB", "H100-PCIe-80GB"]),
        ("A100", ["A100-SXM-40GB", "A100-SXM-80GB", "A100-PCIe-80GB"]),
        ("A100-SXM", ["A100-SXM-40GB", "A100-SXM-80GB"]),
        ("L40", ["L40S", "L4/L40/others"]),
        ("Ascend 910B", ["Ascend 910B1", "Ascend 910B (as in MindSpeed/verl)", "Ascend 910B3/B4"]),
        ("910B", ["Ascend 910B1", "Ascend 910B3/B4"]),
        ("TPU v5", ["TPU v5e", "TPU v5p"]),
        ("MI300", ["MI300X"]),
        ("H200 NVL", ["H200-141GB"]),
        ("warp drive", ["A100-SXM-80GB", "TPU v4"]),
        ("", ["A100-SXM-80GB", "TPU v4"]),
    ],
)
def test_an_ambiguous_or_unknown_name_gives_the_candidates(wanted: str, candidates: list[str]) -> None:
    with pytest.raises(DrivetrainError) as caught:
        find_device(wanted)
    assert all(candidate in str(caught.value) for candidate in candidates)


@pytest.mark.parametrize(
    ("torch_name", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA H200", "H200-141GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_torch_names_find_their_row(torch_name: str, found: str) -> None:
    device = find_by_torch_name(torch_name)
    assert device is not None
    assert device.name == found


@pytest.mark.parametrize(
    ("torch_name", "reason"),
    [
        ("NVIDIA H100", "SXM or the PCIe"),
        ("NVIDIA H100 NVL", "NVL"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "not in the table"),
        ("NVIDIA GeForce RTX 4090 D", "not in the table"),
        ("AMD Instinct MI250X", "half a package"),
        ("Ascend910B3", "conflict"),
        ("", "not in the table"),
        ("NVIDIA Graphics Device", "not in the table"),
    ],
)
def test_an_undecided_torch_name_has_no_peak_and_a_reason(torch_name: str, reason: str) -> None:
    # "Unknown GPU: assume an A100" gave public MFU figures of 105%, 152% and 563%.
    assert find_by_torch_name(torch_name) is None
    assert reason in why_unknown(torch_name)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_supplied_peak_must_be_a_positive_number(value: float) -> None:
    with pytest.raises(DrivetrainError, match="positive number"):
        supplied_peak(value)
