"""``memory.device_memory_limit_bytes`` on CUDA: the caching allocator enforces it.

Never run on a CUDA device by our tests, which replace the two torch calls.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from drivetrain.errors import ConfigurationError, OutOfMemory

__all__ = ["apply_cuda_limit", "translate_out_of_memory"]

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def apply_cuda_limit(limit_bytes: int, device: torch.device) -> float:
    """Let this process use at most ``limit_bytes`` of ``device``'s memory; returns the fraction that was set.

    The allocator counts what it has reserved, which is a little more than the live tensors.

    Raises:
        ConfigurationError: the device has less than that, so the limit would not be one.
    """
    total = int(torch.cuda.get_device_properties(device).total_memory)
    if limit_bytes > total:
        raise ConfigurationError(
            f"memory.device_memory_limit_bytes = {limit_bytes:,} exceeds the memory of {device}; "
            f"the most is {total:,}"
        )
    fraction = limit_bytes / total
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    return fraction


@contextmanager
def translate_out_of_memory(limit_bytes: int | None, device: torch.device) -> Iterator[None]:
    """Turn torch's out-of-memory error in the block into ours; without a limit (None) it is left as it is.

    The allocator knows no categories: that of the error is ``unknown``.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if limit_bytes is None:
            raise
        found = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", str(error))
        requested = int(float(found[1]) * _UNITS[found[2]]) if found else 0
        description = (
            f"a request for {found[1]} {found[2]} on {device}" if found else f"a request on {device}"
        )
        live_bytes = torch.cuda.memory_allocated(device) + requested
        raise OutOfMemory("unknown", description, live_bytes, limit_bytes) from error
