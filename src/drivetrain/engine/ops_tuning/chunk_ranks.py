"""The processes that tune chunks: one for each rank of the run, started here or by whoever has started this one."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO

import torch

from drivetrain.config import RunConfig
from drivetrain.config.layout import layout_of
from drivetrain.engine.devices import select_device, set_threads, thread_count
from drivetrain.engine.memory.host import keep_freed_memory
from drivetrain.engine.ops_tuning.chunks import tune_chunks
from drivetrain.engine.ops_tuning.session import Report
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parent import end_with_parent
from drivetrain.errors import EnvironmentFault

__all__ = ["tune_as_rank", "tune_on_ranks"]

_PARENT = "DRIVETRAIN_TUNING_PARENT"
"""Process that a rank was started by, and ends with."""
_LOOK_S = 0.1
_END_S = 10.0


def tune_as_rank(
    config: RunConfig, path: Path, *, budget_s: float, fresh: bool, progress: Callable[[str], None]
) -> Report | None:
    """Tune as one of the ranks that the environment names; the report on rank 0, else None. Collective.

    Raises:
        DrivetrainError: see :func:`drivetrain.engine.ops_tuning.chunks.tune_chunks`.
    """
    if _PARENT in os.environ:
        end_with_parent(int(os.environ[_PARENT]), signal.SIGTERM)
    ranks = Ranks.from_environment()
    device = select_device(config.run, ranks.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device.torch_device)
    set_threads(thread_count(config.run, ranks.local_world_size))
    if config.memory.keep_freed_memory:
        keep_freed_memory()
    minutes = config.parallelism.distributed_timeout_minutes
    with join(ranks, device.type, minutes) as group:
        mesh = Mesh.form(layout_of(config, group.size), ranks.rank, device.type, timedelta(minutes=minutes))
        report = tune_chunks(
            config,
            group,
            mesh,
            device,
            path,
            budget_s=budget_s,
            fresh=fresh,
            progress=progress if group.is_main else lambda _: None,
        )
    return report if ranks.rank == 0 else None


def tune_on_ranks(arguments: Sequence[str], num_processes: int) -> int:
    """Run ``drivetrain`` with ``arguments`` as ``num_processes`` ranks on this machine; the exit code of rank 0.

    What rank 0 prints is this process's; the others' words are kept for the case that they fail.

    Raises:
        EnvironmentFault: another rank failed; the message has its last line.
    """
    with tempfile.TemporaryFile() as errors:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            port = str(_free_port())
            for rank in range(num_processes):
                processes.append(_started(arguments, rank, num_processes, port, errors))
            return _ended(processes, errors)
        finally:
            _end(processes)


def _started(
    arguments: Sequence[str], rank: int, count: int, port: str, errors: IO[bytes]
) -> "subprocess.Popen[bytes]":
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        _PARENT: str(os.getpid()),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "drivetrain", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if rank == 0 else subprocess.DEVNULL,
        stderr=None if rank == 0 else errors,
        # A terminal's Ctrl-C reaches this process alone, which ends the ranks itself.
        start_new_session=True,
    )


def _ended(processes: "Sequence[subprocess.Popen[bytes]]", errors: IO[bytes]) -> int:
    """Wait until rank 0 has ended, or another rank has failed."""
    while processes[0].poll() is None:
        failed = [rank for rank, one in enumerate(processes) if one.poll() not in (None, 0)]
        if failed:
            # Rank 0 meets the same mistake, most likely, and says so itself.
            _wait(processes[:1], _END_S)
            break
        time.sleep(_LOOK_S)
    if processes[0].poll() is not None:
        code = processes[0].returncode
        return code if code >= 0 else 128 - code
    errors.seek(0)
    lines = [line for line in errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
    said = lines[-1].strip() if lines else f"exit code {processes[failed[0]].returncode}"
    raise EnvironmentFault(f"rank {failed[0]} of the tune has failed: {said}")


def _end(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    for one in processes:
        if one.poll() is None:
            one.terminate()
    _wait(processes, _END_S)
    for one in processes:
        if one.poll() is None:
            one.kill()
            one.wait()


def _wait(processes: "Sequence[subprocess.Popen[bytes]]", seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(one.poll() is None for one in processes):
        time.sleep(_LOOK_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
