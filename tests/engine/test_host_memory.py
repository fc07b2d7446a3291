"""Freed host memory: whether it is kept, and having it kept.

What malloc was told holds for a process to its end: whatever tells it anything runs in a process of its own.
"""

import json
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.engine.capabilities import capability
from drivetrain.engine.devices import Device
from drivetrain.engine.memory import host
from drivetrain.engine.memory.host import (
    HostAllocator,
    PlainPageFaults,
    contrary_variables,
    keep_freed_memory,
    look_at_allocator,
    page_faults,
)
from drivetrain.engine.optimisations import keep_freed_memory as implementation
from drivetrain.engine.optimisations.implementation import Building
from forkserver import CONTEXT

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library here is not glibc")

CPU = Device("cpu", "a processor", torch.device("cpu"), 1)
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
DEBUGGER = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "1"}
"""glibc's own library for finding errors: loaded and switched on, another malloc serves the process."""

LOOK = """
import json
from drivetrain.engine.memory.host import keep_freed_memory, look_at_allocator
assert {told} is False or keep_freed_memory()
print(json.dumps([[one.name, one.keeps_freed, one.reason] for one in (look_at_allocator() for _ in range(3))]))
"""
Found = TypeVar("Found")
Looks = list[tuple[str | None, bool | None, str | None]]


def looks(told: bool) -> Looks:
    assert not told or keep_freed_memory()
    found = [look_at_allocator() for _ in range(3)]
    return [(one.name, one.keeps_freed, one.reason) for one in found]


def page_faults_of_an_operator(told: bool) -> list[int]:
    """Of eight times the same, whose result of 48 MiB is freed at once."""
    torch.set_num_threads(1)
    assert not told or keep_freed_memory()
    source, counts = torch.ones(12 * 2**20), []
    for _ in range(8):
        before = page_faults()
        result = source + 1
        counts.append(page_faults() - before)
        del result
    return counts


def in_a_process(function: Callable[[bool], list[Found]], told: bool) -> list[Found]:
    if any(name.startswith(("MALLOC_", "GLIBC_")) for name in os.environ):
        pytest.skip("the environment has settings of malloc")
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        return pool.submit(function, told).result(timeout=300)


def looks_in_python_anew(told: bool, environment: Mapping[str, str]) -> Looks:
    """What the environment says is read when a process begins."""
    without = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", LOOK.format(told=told)],
        env={**without, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(name, keeps, reason) for name, keeps, reason in json.loads(done.stdout)]


@pytest.mark.parametrize("told", [False, True])
def test_freed_memory_is_kept_where_malloc_was_told_and_a_look_changes_nothing(told: bool) -> None:
    found = in_a_process(looks, told)
    assert found == [(" ".join(platform.libc_ver()), told, None)] * 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("told", "environment", "kept"),
    [
        (False, KEPT, True),
        (False, {"MALLOC_MMAP_MAX_": "0"}, False),
        (True, {"MALLOC_MMAP_MAX_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}, True),
    ],
    ids=["by the environment", "by half of the environment", "told otherwise before"],
)
def test_what_the_environment_says_is_seen_and_overridden(
    told: bool, environment: dict[str, str], kept: bool
) -> None:
    assert [keeps for _, keeps, _ in looks_in_python_anew(told, environment)] == [kept] * 3


@pytest.mark.long
@pytest.mark.parametrize("told", [False, True])
def test_another_allocator_is_seen_and_what_it_keeps_is_not_known(told: bool) -> None:
    (name, keeps, reason), *_ = looks_in_python_anew(told, DEBUGGER)
    assert (name, keeps) == ("other", None)
    assert reason is not None
    assert "LD_PRELOAD=libc_malloc_debug.so.0" in reason


def test_a_large_operator_that_repeats_meets_no_page_faults_where_memory_is_kept() -> None:
    pages = 12 * 2**20 * 4 // os.sysconf("SC_PAGE_SIZE")
    if min(in_a_process(page_faults_of_an_operator, False)) < pages:
        pytest.skip("the system maps pages of another size")
    assert min(in_a_process(page_faults_of_an_operator, True)) < pages // 100


def test_page_faults_of_a_range_of_steps_are_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([1_000, 1_600, 9_000])
    monkeypatch.setattr(host, "page_faults", lambda: next(counts))
    faults = PlainPageFaults(3, 6)
    for step in range(1, 10):
        assert (faults.per_step is None) == (step <= 6)
        faults.before_step(step)
    assert faults.per_step == 200
    nothing = PlainPageFaults(6, 6)
    nothing.before_step(6)
    assert nothing.per_step is None, "no step, no mean"


def test_page_faults_grow_with_memory_that_is_written_to() -> None:
    before = page_faults()
    # Mapped anew: malloc may hold pages that an earlier test has touched.
    with mmap.mmap(-1, 64 * 2**20) as held:
        for place in range(0, len(held), mmap.PAGESIZE):
            held[place] = 1
        assert page_faults() > before


@pytest.mark.parametrize(
    ("environment", "contrary"),
    [
        ({}, ()),
        (KEPT, ()),
        ({"MALLOC_MMAP_MAX_": "7", "MALLOC_ARENA_MAX": "1"}, ("MALLOC_MMAP_MAX_=7",)),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, ("MALLOC_TRIM_THRESHOLD_=131072",)),
        ({"MALLOC_MMAP_THRESHOLD_": "131072"}, ()),
        (
            {
                "GLIBC_TUNABLES": "glibc.malloc.mmap_max=9:glibc.malloc.tcache_count=3:glibc.malloc.trim_threshold=1"
            },
            ("glibc.malloc.mmap_max=9", "glibc.malloc.trim_threshold=1"),
        ),
    ],
)
def test_what_the_environment_asks_for_otherwise_is_named(
    environment: dict[str, str], contrary: tuple[str, ...]
) -> None:
    assert contrary_variables(environment) == contrary


@given(st.text())
def test_any_tunables_are_read_without_a_fault(text: str) -> None:
    assert all("=" in one for one in contrary_variables({"GLIBC_TUNABLES": text}))


def building(device: Device = CPU) -> Building:
    # Nothing of the configuration is looked at.
    return Building(config=None, device=device, num_ranks=1)  # type: ignore[arg-type]


def test_there_is_nothing_to_keep_on_another_device() -> None:
    cuda = Device("cuda", "a card", torch.device("cuda", 0), 1)
    assert not capability("glibc_malloc", cuda).available
    status = implementation.IMPLEMENTATION.prepare(building(cuda))
    assert not status.active
    assert "cuda" in (status.reason or "")


@pytest.mark.parametrize(
    ("takes", "keeps", "active", "reason"),
    [
        (True, True, True, None),
        (False, False, False, "glibc's malloc refuses the settings"),
        (True, False, False, "gave a freed block back all the same"),
        (True, None, True, "cannot be seen: too old"),
    ],
)
def test_settings_are_in_effect_only_where_a_look_says_so(
    monkeypatch: pytest.MonkeyPatch, takes: bool, keeps: bool | None, active: bool, reason: str | None
) -> None:
    for name in ("GLIBC_TUNABLES", *KEPT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(implementation, "keep_freed_memory", lambda: takes)
    seen = HostAllocator("glibc 2.36", keeps, "too old" if keeps is None else None)
    monkeypatch.setattr(implementation, "look_at_allocator", lambda: seen)
    status = implementation.IMPLEMENTATION.prepare(building())
    assert status.active == active
    assert (status.reason is None) == (reason is None)
    assert (reason or "") in (status.reason or "")


def test_settings_of_the_environment_that_are_overridden_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "65536")
    monkeypatch.setattr(implementation, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(implementation, "look_at_allocator", lambda: HostAllocator("glibc 2.36", True))
    status = implementation.IMPLEMENTATION.prepare(building())
    assert status.active
    assert status.reason == "it overrides MALLOC_MMAP_MAX_=65536 of the environment"
