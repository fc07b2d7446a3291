"""What a measured choice depends on beside the call: the machine, the libraries, and how they are set."""

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from drivetrain.config.operation import RunSectionConfig
from drivetrain.engine.devices import Device, select_device
from drivetrain.engine.memory.host import HostAllocator, look_at_allocator
from drivetrain.measure.machine import usable_cores

__all__ = ["allocator_text", "differences", "environment_here"]

_LIBRARIES = ("triton", "liger-kernel", "flash-attn", "transformer-engine", "torch-npu")
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
ABSENT = "none"


def environment_here(device: Device | None = None, threads: int | None = None) -> dict[str, str]:
    """The fingerprint of this process, everything as text.

    The host's name is no part of it: what was tuned on one of many equal machines holds on all of them.

    Args:
        device: what is computed on; absent: what a run takes by default.
        threads: compute threads; absent: those of this process. Ignored on a GPU.
    """
    from drivetrain import __version__

    device = device or select_device(RunSectionConfig())
    found = {
        "device": device.name,
        "drivetrain": __version__,
        "torch": str(torch.__version__),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        **{name: _version(name) for name in _LIBRARIES},
    }
    if device.type == "cuda":
        found |= _of_gpu(device)
    else:
        found |= {
            "cores": str(usable_cores()),
            "memory_gib": _memory_gib(),
            "threads": str(torch.get_num_threads() if threads is None else threads),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "compiler": _compiler(),
            "allocator": allocator_text(look_at_allocator(), os.environ),
        }
    return dict(sorted(found.items()))


def differences(stored: Mapping[str, str], here: Mapping[str, str]) -> tuple[str, ...]:
    """What differs, one line each: ``torch: 2.12.0 there, 2.13.0 here``."""
    names = sorted({*stored, *here})
    return tuple(
        f"{name}: {stored.get(name, ABSENT)} there, {here.get(name, ABSENT)} here"
        for name in names
        if stored.get(name, ABSENT) != here.get(name, ABSENT)
    )


def _of_gpu(device: Device) -> dict[str, str]:
    properties = torch.cuda.get_device_properties(device.torch_device)
    return {
        # Of a part of a divided GPU these are the part's own.
        "cores": str(properties.multi_processor_count),
        "memory_gib": str(round(properties.total_memory / 2**30)),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": str(torch.version.cuda or torch.version.hip),
        "driver": _driver(),
        "tf32": str(torch.backends.cuda.matmul.allow_tf32).lower(),
    }


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ABSENT
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", text)
    return found.group(1) if found else ABSENT


def _version(distribution: str) -> str:
    if importlib.util.find_spec(distribution.replace("-", "_")) is None:
        return ABSENT
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _memory_gib() -> str:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return ABSENT
    found = re.search(r"^MemTotal:\s*(\d+) kB$", text, re.MULTILINE)
    return str(round(int(found.group(1)) / 2**20)) if found else ABSENT


def _compiler() -> str:
    """Of Inductor's C++, without its path."""
    from drivetrain.engine.capabilities import cpp_compiler

    found = cpp_compiler()
    return ABSENT if found is None else f"{Path(found[0]).name} {found[1]}"


def allocator_text(seen: HostAllocator, environment: Mapping[str, str]) -> str:
    """Which malloc serves tensors, and whether it keeps what is freed: large temporaries cost a multiple otherwise.

    What was seen, however it came to be: by the environment, by the configuration, or by another allocator.
    """
    preloaded = [name for name in _ALLOCATORS if name in environment.get("LD_PRELOAD", "")]
    name = preloaded[0] if preloaded else seen.name or "unknown"
    return f"{name}, keeps freed memory" if seen.keeps_freed else name
