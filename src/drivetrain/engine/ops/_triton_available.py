"""Whether our Triton kernels can serve a call on this machine, and why not."""

import functools
import importlib.util
import os

import torch

from drivetrain.engine.ops.operator import refuse_dtypes
from drivetrain.engine.ops.signature import Signature

__all__ = ["next_power_of_two", "triton_refuses"]


def triton_refuses(signature: Signature) -> str | None:
    """Why no Triton kernel can serve a call; None where one may. Dtypes are fp32, bf16 and fp16."""
    missing: str | None = _missing(signature.device)
    if missing is not None:
        return missing
    return refuse_dtypes(signature, torch.float32, torch.bfloat16, torch.float16)


# What a machine lacks is no part of a graph: traced, the look for it would be a guard, and its cache a warning.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _missing(device: str) -> str | None:
    if not _installed():
        return "Triton is not installed (pip install triton)"
    if device not in ("cuda", "cpu"):
        return f"Triton has no kernels of ours for a device of type {device}"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "there is no CUDA device; on a CPU Triton has its interpreter alone (TRITON_INTERPRET=1, for tests)"
    return None


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below ``number``; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()
