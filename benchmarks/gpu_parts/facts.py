"""The device and the versions that figures belong to; whether there is a device at all."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

__all__ = ["LIBRARIES", "facts", "why_no_cuda"]

LIBRARIES = ("triton", "liger_kernel", "flash_attn", "transformer_engine", "quack_kernels")
"""Those with operators of their own."""


def why_no_cuda() -> str | None:
    """Why there is no CUDA device; None where there is one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    return f"torch {torch.__version__} sees none: no driver, or CUDA_VISIBLE_DEVICES hides all"


def facts(dry: bool) -> dict[str, Any]:
    """As JSON."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "device": "cpu",
    }
    if dry:
        return found
    properties = torch.cuda.get_device_properties(0)
    return {
        **found,
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
