"""Host memory behind CPU tensors: whose allocator serves it, whether it keeps what is freed, and telling it to.

glibc's malloc maps each large block anew and unmaps it when it is freed, and gives the end of its heap back: the next
operator then pays a page fault for every 4 KiB that it writes. Two of its settings end that while the process runs:
M_MMAP_MAX = 0, blocks come from the heap, and M_TRIM_THRESHOLD = -1, the heap does not shrink (mallopt(3)). They hold
for the whole process until it ends; glibc has no way back to its own adaptive thresholds.
"""

import ctypes
import os
import platform
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "HostAllocator",
    "PlainPageFaults",
    "contrary_variables",
    "keep_freed_memory",
    "look_at_allocator",
    "page_faults",
]

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of mallopt, ``malloc.h``."""
_NEVER = -1
"""A trim threshold that no heap reaches."""
_MARGIN_BYTES = 64 * 2**20
"""glibc raises its own thresholds while it runs, to 32 MiB at most; a larger block is always mapped by default."""
_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_TUNABLES = ("glibc.malloc.mmap_max", "glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold")
_AS_WANTED = {"MALLOC_MMAP_MAX_": "0", "glibc.malloc.mmap_max": "0"}


@dataclass(frozen=True)
class HostAllocator:
    """What a look at the allocator showed.

    Attributes:
        name: ``glibc 2.36`` where its malloc serves CPU tensors; ``other`` where it does not; None: not known.
        keeps_freed: whether a large block that was freed stayed with the process; None: not known.
        reason: why something is not known, or which allocator it is instead; None otherwise.
    """

    name: str | None
    keeps_freed: bool | None
    reason: str | None = None


_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
    "keepcost",
)


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of ``malloc.h``, of all arenas: bytes, but for the numbers of blocks and chunks."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


class _Glibc:
    """The functions of glibc itself, whatever else was loaded before it."""

    def __init__(self, version: str) -> None:
        self.version = version
        self._library = ctypes.CDLL("libc.so.6")

    def state(self) -> dict[str, int] | None:
        """The allocator's figures by name; None before glibc 2.33."""
        found = self._figures()
        return None if found is None else {name: int(getattr(found, name)) for name in _FIELDS}

    def _figures(self) -> Any:
        function = getattr(self._library, "mallinfo2", None)
        if function is None:
            return None
        function.restype = _Mallinfo2
        function.argtypes = []
        return function()

    def keeps_freed_block(self) -> bool | None:
        """Whether a large block stays with the process when it is freed; None: there was none to be had.

        Nothing is allocated behind the block while it lives, or the heap could not be trimmed down to it.
        """
        allocate, free = self._library.malloc, self._library.free
        allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        free.restype, free.argtypes = None, [ctypes.c_void_p]
        before = self.state()
        assert before is not None
        block = allocate(_larger_than_what_is_free(before))
        held = self._figures()
        free(block)
        after = self.state()
        assert held is not None
        assert after is not None
        if block is None:
            return None
        # A mapped block is unmapped when it is freed; one at the heap's end stays unless the heap is trimmed.
        return held.hblks == before["hblks"] and after["arena"] >= before["arena"] + _MARGIN_BYTES

    def set(self, parameter: int, value: int) -> bool:
        """Whether malloc took the setting."""
        function = self._library.mallopt
        function.restype = ctypes.c_int
        function.argtypes = [ctypes.c_int, ctypes.c_int]
        return bool(function(parameter, value) == 1)


def _glibc() -> _Glibc | None:
    """None where another C library is underneath."""
    name, version = platform.libc_ver()
    return _Glibc(version) if name == "glibc" else None


def look_at_allocator() -> HostAllocator:
    """Allocate large blocks, free them, and see what glibc makes of it.

    The blocks are larger than anything that is free, and are not written to: they cost address space and a few system
    calls, no memory.
    """
    glibc = _glibc()
    if glibc is None:
        return HostAllocator(None, None, f"the C library is {platform.libc_ver()[0] or 'not glibc'}")
    before = glibc.state()
    if before is None:
        return HostAllocator(None, None, f"glibc {glibc.version} does not tell (2.33 or newer does)")
    if (failure := _why_not_of_tensors(glibc, before)) is not None:
        return failure
    keeps = glibc.keeps_freed_block()
    reason = "there was no large block to look at" if keeps is None else None
    return HostAllocator(f"glibc {glibc.version}", keeps, reason)


def _why_not_of_tensors(glibc: _Glibc, before: Mapping[str, int]) -> HostAllocator | None:
    """Where a block that is allocated as tensors do it does not show in glibc's figures."""
    size = _larger_than_what_is_free(before)
    try:
        # Not a tensor: under deterministic algorithms a new one is written to.
        block = torch.UntypedStorage(size)
    except RuntimeError as error:
        return HostAllocator(
            None, None, f"no block of {size:,} bytes to look at: {str(error).splitlines()[0]}"
        )
    held = glibc.state()
    del block
    assert held is not None
    if _in_use(held) - _in_use(before) >= size:
        return None
    return HostAllocator("other", None, f"tensors lie in memory of {_other_allocator(os.environ)}")


def _larger_than_what_is_free(state: Mapping[str, int]) -> int:
    return state["fordblks"] + _MARGIN_BYTES


def _in_use(state: Mapping[str, int]) -> int:
    return state["uordblks"] + state["hblkhd"]


def _other_allocator(environment: Mapping[str, str]) -> str:
    preloaded = environment.get("LD_PRELOAD")
    return "another allocator than glibc's" + (f" (LD_PRELOAD={preloaded})" if preloaded else "")


def keep_freed_memory() -> bool:
    """Have glibc keep freed memory from now on, for the whole process; whether it took both settings. To be called
    before what is to be kept is allocated; where glibc is not the C library, False."""
    glibc = _glibc()
    if glibc is None:
        return False
    return glibc.set(_M_MMAP_MAX, 0) and glibc.set(_M_TRIM_THRESHOLD, _NEVER)


def contrary_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Settings of the environment that :func:`keep_freed_memory` overrides, as ``NAME=value``.

    A trim threshold is contrary only where it is below that of ``drivetrain doctor``'s advice, 1e11 bytes.
    """
    given = {name: environment[name] for name in _VARIABLES if environment.get(name)}
    tunables = re.findall(r"([\w.]+)=([^:]*)", environment.get("GLIBC_TUNABLES", ""))
    given |= {name: value for name, value in tunables if name in _TUNABLES}
    return tuple(f"{name}={value}" for name, value in given.items() if not _is_as_wanted(name, value))


def _is_as_wanted(name: str, value: str) -> bool:
    if name in _AS_WANTED:
        return value == _AS_WANTED[name]
    # With no block mapped, from which size on blocks are mapped decides nothing.
    return "mmap_threshold" in name.lower() or (value.isdecimal() and int(value) >= 10**11)


def page_faults() -> int:
    """Pages that the system has given to this process without reading a disk, all threads, since it began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class PlainPageFaults:
    """Page faults of a range of steps.

    Args:
        first, end: steps from ``first`` up to and without ``end`` are counted, with what the run does between them.
    """

    def __init__(self, first: int, end: int) -> None:
        self._first, self._end = first, end
        self._at_first: int | None = None
        self.per_step: float | None = None
        """The mean, once ``end`` is about to begin; None before, and where the range is empty."""

    def before_step(self, step: int) -> None:
        """To be called before each step."""
        if step == self._first:
            self._at_first = page_faults()
        elif step == self._end and self._at_first is not None:
            self.per_step = (page_faults() - self._at_first) / (self._end - self._first)
