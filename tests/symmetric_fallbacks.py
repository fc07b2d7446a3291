"""Torch's fused operators over symmetric memory for tensors on a CPU, by torch's own fallbacks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["fallbacks_on_a_cpu"]


@contextmanager
def fallbacks_on_a_cpu() -> Iterator[None]:
    """They serve the operators for CPU tensors of this process: one collective, and the products after or before it.

    Torch registers them for tensors without memory, and calls them for CUDA tensors in its test mode.
    """
    from torch.distributed import _symmetric_memory as theirs

    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    library.impl("fused_all_gather_matmul", theirs._fused_all_gather_matmul_fallback)
    library.impl("fused_matmul_reduce_scatter", theirs._fused_matmul_reduce_scatter_fallback)
    try:
        yield
    finally:
        library._destroy()
