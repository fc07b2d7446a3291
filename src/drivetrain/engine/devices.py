"""The device a run trains on, how many threads it gets, and the peak its MFU is counted against."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from drivetrain.config.operation import RunSectionConfig
from drivetrain.errors import DrivetrainError, EnvironmentFault
from drivetrain.measure.ceilings import load_ceilings
from drivetrain.measure.machine import cpu_model, usable_cores
from drivetrain.measure.peaks import Peak, find_by_torch_name, peak_flops, why_unknown

__all__ = [
    "Device",
    "PeakAnswer",
    "ThreadSettings",
    "peak_for",
    "select_device",
    "set_threads",
    "thread_count",
    "usable_cores",
]


@dataclass(frozen=True, slots=True)
class Device:
    """What one process computes on."""

    type: Literal["cpu", "cuda"]
    name: str
    """Model name: the processor's, or the GPU's as torch reports it."""
    torch_device: torch.device
    count: int
    """Devices of this type this process can see. A CPU is one device, whatever its cores."""


def select_device(run: RunSectionConfig, local_rank: int = 0) -> Device:
    """The device of this process. Does not make it torch's current device: that is the loop's to do.

    Args:
        run: ``run.device`` decides; ``auto`` is cuda where there is one.
        local_rank: index of the process on its machine; on cuda also the index of its device.

    Raises:
        EnvironmentFault: ``run.device=cuda`` without a usable device, or more local processes than devices.
    """
    if run.device == "cpu" or (run.device == "auto" and not torch.cuda.is_available()):
        return Device("cpu", cpu_model(), torch.device("cpu"), 1)
    if not torch.cuda.is_available():
        raise EnvironmentFault(
            f"run.device=cuda, but {_why_no_cuda()}; set run.device=cpu or run.device=auto"
        )
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise EnvironmentFault(
            f"local rank {local_rank} has no device: this machine shows {count} CUDA device(s); "
            f"start at most {count} processes here, or set run.device=cpu"
        )
    return Device("cuda", torch.cuda.get_device_name(local_rank), torch.device("cuda", local_rank), count)


def _why_no_cuda() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU build"
    return "torch sees no CUDA device (driver not loaded, or CUDA_VISIBLE_DEVICES hides all)"


def thread_count(run: RunSectionConfig, local_world_size: int) -> int:
    """Compute threads of each of `local_world_size` processes on this machine.

    ``run.num_threads`` where given. Otherwise the usable physical cores, shared out. OMP_NUM_THREADS is not
    consulted: torchrun sets it to 1 when the user did not, which would leave the other cores idle.
    """
    if run.num_threads is not None:
        return run.num_threads
    return max(1, usable_cores() // local_world_size)


class ThreadSettings(NamedTuple):
    """Threads in force."""

    compute: int
    """Threads inside an operator."""
    interop: int
    """Operators that may run at once. 1 is right for a training step, which is one chain of operators."""


def set_threads(num_threads: int) -> ThreadSettings:
    """Set the threads of this process and return what is in force.

    torch accepts the number of inter-operator threads only once and before the first parallel work; later
    it stays as it is, which costs nothing but idle threads. The result says so.
    """
    torch.set_num_threads(num_threads)
    if torch.get_num_interop_threads() != 1:
        try:
            torch.set_num_interop_threads(1)
        except RuntimeError:
            return ThreadSettings(torch.get_num_threads(), torch.get_num_interop_threads())
    return ThreadSettings(torch.get_num_threads(), torch.get_num_interop_threads())


class PeakAnswer(NamedTuple):
    """A peak, or why there is none. Exactly one of the two is None."""

    peak: Peak | None
    reason: str | None


def peak_for(device: Device, dtype: str, num_threads: int, cache_dir: Path | str | None = None) -> PeakAnswer:
    """The FLOP/s that MFU on `device` is counted against; never a default.

    A GPU: the dense figure of its data sheet. A CPU: what was measured here with `num_threads` threads.

    Args:
        device: see :func:`select_device`.
        dtype: of the operands: ``bf16``, ``fp16``, ``fp32``.
        num_threads: compute threads of the process; ignored on a GPU.
        cache_dir: where measured ceilings are kept, for tests.

    """
    if device.type == "cpu":
        return _measured_peak(device.name, dtype, num_threads, cache_dir)
    found = find_by_torch_name(device.name)
    if found is None:
        return PeakAnswer(None, why_unknown(device.name))
    try:
        return PeakAnswer(peak_flops(found, dtype), None)
    except DrivetrainError as error:
        return PeakAnswer(None, str(error))


def _measured_peak(name: str, dtype: str, num_threads: int, cache_dir: Path | str | None) -> PeakAnswer:
    try:
        ceilings = load_ceilings(cache_dir)
    except EnvironmentFault as error:
        # Training needs no peak, only MFU does.
        return PeakAnswer(None, str(error))
    peak = ceilings.matmul_flops(name, dtype, num_threads)
    if peak is not None:
        return PeakAnswer(peak, None)
    command = f"drivetrain bench gemm --dtype {dtype} --threads {num_threads}"
    entry = ceilings.find("matmul", name, dtype, num_threads)
    if entry is not None:
        return PeakAnswer(
            None,
            f"no data-sheet peak for a CPU ({name}), and the one measured here is not to be trusted "
            f"({'; '.join(entry.doubts)}); on an idle machine run: {command}",
        )
    threads = f"{num_threads} thread{'s' if num_threads != 1 else ''}"
    return PeakAnswer(
        None,
        f"no data-sheet peak for a CPU ({name}), and none was measured here for {dtype} with {threads}; "
        f"run: {command}",
    )
