"""``memory.keep_freed_memory`` where it cannot take effect, where the environment asks for the opposite, and where
nobody has asked: the run says so. And where it is in effect, training is the same to the bit."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from drivetrain.archive.reader import open_run
from runs_on_the_spot import Tiny, losses_of

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library here is not glibc")

WINDOW = ["profiler.profile=true", "profiler.profile_step_start=6", "profiler.profile_step_end=7"]
KEPT = "memory.keep_freed_memory=true"
ASKED = "memory.keep_freed_memory = true"
# Another malloc serves the process: glibc's own library for finding errors, switched on.
DEBUGGER = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "1"}
COMMAND = "from drivetrain.cli.application import main\nmain()"
SILENT = f"""
from drivetrain.engine.memory.host import HostAllocator
from drivetrain.engine.optimisations import keep_freed_memory
keep_freed_memory.keep_freed_memory = lambda: True
keep_freed_memory.look_at_allocator = lambda: HostAllocator("glibc", True)
{COMMAND}
"""


def train(tiny: Tiny, program: str, *overrides: str, environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", program, "train", str(tiny.file), *overrides, "--json"],
        cwd=tiny.folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    assert all(f"warning: {finding}" in done.stderr for finding in summary["findings"])
    return summary


def record_of(summary: dict[str, Any]) -> dict[str, Any]:
    (record,) = [one for one in summary["optimisations"] if one["name"] == "keep_freed_memory"]
    found: dict[str, Any] = record
    return found


@pytest.mark.long
def test_another_allocator_is_told_nothing_and_the_run_says_so(tiny: Tiny) -> None:
    summary = train(tiny, COMMAND, KEPT, *WINDOW, environment=DEBUGGER)
    record = record_of(summary)
    assert (record["requested"], record["active"], record["evidence"]) == (True, False, "unknown")
    (finding,) = summary["findings"]
    assert finding.startswith(
        f"{ASKED} is not in effect: tensors lie in memory of another allocator than glibc's"
    )
    assert "LD_PRELOAD=libc_malloc_debug.so.0" in finding
    assert summary["status"] == "finished"


@pytest.mark.long
def test_settings_that_were_never_made_are_found_in_the_window(tiny: Tiny) -> None:
    summary = train(tiny, SILENT, KEPT, *WINDOW, environment={})
    record = record_of(summary)
    assert (record["active"], record["evidence"]) == (True, "absent")
    (finding,) = summary["findings"]
    assert finding.startswith(f"{ASKED} shows no effect in the profiled steps")


@pytest.mark.long
def test_memory_that_the_environment_keeps_without_a_request_is_a_finding(tiny: Tiny) -> None:
    environment = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
    summary = train(tiny, COMMAND, *WINDOW, environment=environment)
    record = record_of(summary)
    assert (record["requested"], record["active"], record["evidence"]) == (False, False, "shown")
    (finding,) = summary["findings"]
    assert finding.startswith(
        "keep_freed_memory is recorded as not in effect, and yet the profiled steps show it"
    )


def test_what_the_environment_asks_for_otherwise_is_overridden_and_named(tiny: Tiny) -> None:
    environment = {"MALLOC_MMAP_MAX_": "65536", "LD_PRELOAD": ""}
    done = tiny.run("train", str(tiny.file), KEPT, *WINDOW, "--json", environment=environment)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    record = record_of(summary)
    assert (record["active"], record["evidence"]) == (True, "shown")
    (finding,) = summary["findings"]
    assert finding == f"{ASKED} is in effect, but it overrides MALLOC_MMAP_MAX_=65536 of the environment"
    assert "page faults a step before it" in record["evidence_why"], "steps before the window were counted"


def checkpoint_of(run: Path) -> dict[str, bytes]:
    """Each tensor of the last checkpoint, as bytes: weights and optimizer state."""
    (folder,) = sorted((run / "checkpoints").iterdir())[-1:]
    found = {}
    for file in sorted(folder.rglob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in list(tensors.keys()):
                found[f"{file.name}: {name}"] = tensors.get_tensor(name).tobytes()
    assert found
    return found


def test_training_is_the_same_to_the_bit(tiny: Tiny) -> None:
    kept, plain = (
        open_run(tiny.train(f"memory.keep_freed_memory={value}")["run"]) for value in ("true", "false")
    )
    assert losses_of(kept) == losses_of(plain)
    assert checkpoint_of(kept.path) == checkpoint_of(plain.path)
