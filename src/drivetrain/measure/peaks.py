"""Dense peaks of devices, from data sheets. There is no default: an unknown device has no peak.

The table is ``peaks.csv`` beside this file: TFLOP/s without sparsity, memory in GB and bandwidth in GB/s
as printed, where the figure was read, how sure it is. A figure on which the published sources conflict is
left empty and the note says why, so that it can only be supplied by the user and never be guessed.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from drivetrain.errors import DrivetrainError

__all__ = [
    "DTYPES",
    "DevicePeaks",
    "Peak",
    "device_names",
    "find_by_torch_name",
    "find_device",
    "peak_flops",
    "supplied_peak",
    "why_unknown",
]

DTYPES = ("bf16", "fp16", "fp8", "fp4", "tf32", "fp32")
"""Dtypes of the table."""


@dataclass(frozen=True, slots=True)
class Peak:
    """A denominator of MFU, and where it comes from."""

    value: float
    """FLOP/s of one device, dense."""
    source: str
    """For example ``H100-SXM-80GB bf16, dense, data sheet``."""


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    """One row of the table."""

    name: str
    """The device, exactly as in the table."""
    vendor: str
    flops: Mapping[str, float]
    """Dense FLOP/s by dtype; a dtype without a firm figure is absent."""
    memory_bytes: float | None
    """Printed GB x 1e9. Makers often print GiB as GB, so up to 7% more may be there."""
    memory_bandwidth: float | None
    """Bytes per second."""
    confidence: str
    """How the figures were obtained: read, recalled, uncertain."""
    source: str
    note: str
    """Traps, and why a figure is missing."""


@cache
def _table() -> tuple[DevicePeaks, ...]:
    text = resources.files("drivetrain.measure").joinpath("peaks.csv").read_text(encoding="utf-8")
    return tuple(_device(row) for row in csv.DictReader(text.splitlines()))


def _device(row: Mapping[str, str]) -> DevicePeaks:
    def scaled(column: str, factor: float) -> float | None:
        return float(row[column]) * factor if row[column] else None

    return DevicePeaks(
        name=row["device"],
        vendor=row["vendor"],
        flops={dtype: float(row[dtype]) * 1e12 for dtype in DTYPES if row[dtype]},
        memory_bytes=scaled("memory_gb", 1e9),
        memory_bandwidth=scaled("bandwidth_gb_per_s", 1e9),
        confidence=row["confidence"],
        source=row["source"],
        note=row["note"],
    )


def device_names() -> tuple[str, ...]:
    """All devices of the table, in its order."""
    return tuple(device.name for device in _table())


def find_device(name: str) -> DevicePeaks:
    """The row called `name`.

    The full name in any case wins. Otherwise the words at its start or in it will do where they fit one
    row only: ``H100-SXM`` finds ``H100-SXM-80GB``; ``H100`` fits two rows and finds neither.

    Raises:
        DrivetrainError: unknown or ambiguous; the message names the candidates.
    """
    wanted = _plain(name)
    by_name = {_plain(device.name): device for device in _table()}
    if wanted in by_name:
        return by_name[wanted]
    starting = [full for full in by_name if wanted and full.startswith(wanted)]
    containing = [full for full in by_name if wanted and wanted in full]
    for candidates in (starting, containing):
        # Whole words only: "L40" must not become "L40S", which is twice as fast.
        if len(candidates) == 1 and re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", candidates[0]):
            return by_name[candidates[0]]
        if len(candidates) > 1:
            names = ", ".join(by_name[full].name for full in candidates)
            raise DrivetrainError(f"device {name!r} is ambiguous; it may be one of: {names}")
    raise DrivetrainError(f"no device {name!r} in the table of peaks; candidates: {', '.join(_near(wanted))}")


def _plain(name: str) -> str:
    """Case, spaces and dashes do not tell devices apart."""
    return re.sub(r"[\s_-]+", "-", name.strip()).casefold()


def _near(wanted: str) -> list[str]:
    """Names that share most word beginnings with `wanted`; all names where none shares any."""
    words = [word[:4] for word in re.split(r"[\W_]+", wanted) if len(word) >= 3 and word != "nvidia"]

    def shared(device: DevicePeaks) -> int:
        own = re.split(r"[\W_]+", device.name.casefold())
        return sum(any(other.startswith(word) for other in own) for word in words)

    best = max(shared(device) for device in _table())
    return [device.name for device in _table() if shared(device) == best]


def peak_flops(device: DevicePeaks, dtype: str) -> Peak:
    """Dense peak of `device` for matrix products in `dtype`.

    ``fp32`` takes the table's fp32 figure, or where there is only a tf32 figure that one; the source says
    which.

    Raises:
        DrivetrainError: unknown dtype, or no firm figure: the user must supply one.
    """
    if dtype not in DTYPES:
        raise DrivetrainError(f"no dtype {dtype!r} in the table of peaks; one of: {', '.join(DTYPES)}")
    found = dtype
    if dtype == "fp32" and dtype not in device.flops:
        found = "tf32"
    value = device.flops.get(found)
    if value is None:
        known = ", ".join(device.flops) or "none"
        why = f" ({device.note})" if device.note else ""
        raise DrivetrainError(
            f"no trusted {dtype} peak of {device.name}{why}; dtypes with a figure: {known}. "
            "Supply the peak of one device in FLOP/s: --peak-flops, for example 312e12"
        )
    shown = dtype if found == dtype else "tf32 (fp32 operands, products rounded to tf32)"
    doubt = "" if device.confidence == "read" else f", {device.confidence}"
    note = f"; {device.note}" if device.note else ""
    return Peak(value, f"{device.name} {shown}, dense, data sheet{doubt}{note}")


def supplied_peak(value: float) -> Peak:
    """A peak given by the user, in FLOP/s of one device."""
    if not 1 <= value <= 1e24:
        raise DrivetrainError(
            f"a peak of {value} FLOP/s: it must be a positive number from 1 to 1e24, for example 312e12"
        )
    return Peak(value, "supplied by the user")


# What torch.cuda.get_device_name says, specific before general. None with a reason: the name does not tell.
_TORCH_NAMES: tuple[tuple[str, str | None, str], ...] = (
    (r"Tesla V100-SXM2-32GB", "V100-SXM2-32GB", ""),
    (r"(NVIDIA )?A100-SXM4-40GB", "A100-SXM-40GB", ""),
    (r"(NVIDIA )?A100-SXM4-80GB", "A100-SXM-80GB", ""),
    (r"(NVIDIA )?A100[ -]80GB PCIe", "A100-PCIe-80GB", ""),
    (r"NVIDIA A800-SXM4-80GB", "A800-80GB", ""),
    (r"NVIDIA H100 80GB HBM3", "H100-SXM-80GB", ""),
    (r"NVIDIA H100 PCIe", "H100-PCIe-80GB", ""),
    (r"NVIDIA H100 NVL", None, "the NVL card has a peak of its own that is not in the table"),
    (r"NVIDIA H100", None, "the name does not say whether it is the SXM or the PCIe card (989 or 756 bf16)"),
    (r"NVIDIA H200 NVL", None, "the NVL card has a peak of its own that is not in the table"),
    (r"NVIDIA H200", "H200-141GB", ""),
    (r"NVIDIA H800 PCIe", None, "the PCIe card has a peak of its own that is not in the table"),
    (r"NVIDIA H800", "H800-80GB", ""),
    (r"NVIDIA H20", "H20-96GB", ""),
    (r"NVIDIA GH200 (480GB|96GB)", "GH200-96GB", ""),
    (r"NVIDIA GB200", "GB200 (per GPU)", ""),
    (r"NVIDIA B200", "B200-SXM-180GB", ""),
    (r"NVIDIA GB300", "GB300 (per GPU)", ""),
    (r"NVIDIA B300( SXM6)?( AC)?", "B300-SXM-288GB", ""),
    (r"NVIDIA L40S", "L40S", ""),
    (r"NVIDIA GeForce RTX 4090", "RTX 4090", ""),
    (r"AMD Instinct MI250X.*", None, "one torch device is half a package; the table has the package's peak"),
    (r"AMD Instinct MI300X", "MI300X", ""),
    (r"AMD Instinct MI325X", "MI325X", ""),
    (r"AMD Instinct MI355X", "MI355X", ""),
    (r"Ascend.*", None, "the published peaks of Ascend devices conflict"),
)


def _torch_row(torch_name: str) -> tuple[str | None, str]:
    for pattern, name, reason in _TORCH_NAMES:
        if re.fullmatch(pattern, torch_name.strip()):
            return name, reason
    return None, "it is not in the table of peaks"


def find_by_torch_name(torch_name: str) -> DevicePeaks | None:
    """The row of a device as ``torch.cuda.get_device_name`` names it (``NVIDIA H100 80GB HBM3``).

    None where the name is unknown or does not decide the peak; `why_unknown` has the reason. Names are
    compared whole, so a variant that nobody entered (a laptop part, an export part) is unknown.
    """
    name, _ = _torch_row(torch_name)
    return None if name is None else find_device(name)


def why_unknown(torch_name: str) -> str:
    """Why `find_by_torch_name` found nothing, as a sentence for the log."""
    _, reason = _torch_row(torch_name)
    return f"no peak for {torch_name!r}: {reason}; without one there is no MFU"
