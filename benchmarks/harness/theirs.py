"""A peer's side: its script in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.lanes import Done, Side
from harness.workload import Workload, environment
from peers.settings import MODULES

__all__ = ["peer_side"]

BENCHMARKS = Path(__file__).resolve().parents[1]


def peer_side(work: Workload, allocator: str, peer: str, label: str, settings: dict[str, Any]) -> Side:
    """``peer`` with ``settings``, which ``label`` puts in words."""
    return Side(
        name=f"{peer}, {label}",
        command=[
            *(sys.executable, "-W", "ignore", "-m", MODULES[peer]),
            str(work.folder),
            json.dumps(settings),
        ],
        environment={**environment(allocator), "PYTHONPATH": str(BENCHMARKS)},
        stamps=_stamps,
        end=_end,
        done=_done,
    )


def _stamps(folder: Path) -> list[float]:
    path = folder / "stamps"
    return [float(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    del process
    (folder / "stop").touch()


def _done(folder: Path) -> Done:
    record = json.loads((folder / "record.json").read_text())
    return Done(**record, steps=len(_stamps(folder)), hooks=[])
