"""A peer's side: its script in a process of its own."""

import json
import sys
from pathlib import Path
from typing import Any

from harness.blocks import Block, Record, measure
from harness.workload import Workload, environment
from peers.settings import MODULES

__all__ = ["run_peer"]

BENCHMARKS = Path(__file__).resolve().parents[1]


def run_peer(
    work: Workload,
    allocator: str,
    peer: str,
    settings: dict[str, Any],
    *,
    label: str,
    warmup: int,
    patience_s: float = 180.0,
) -> Block:
    """One block of ``peer`` with ``settings``."""
    command = [sys.executable, "-W", "ignore", "-m", MODULES[peer], str(work.folder), json.dumps(settings)]
    variables = {**environment(allocator), "PYTHONPATH": str(BENCHMARKS)}
    return measure(f"{peer}, {label}", command, variables, _read, warmup=warmup, patience_s=patience_s)


def _read(folder: Path) -> Record:
    record = json.loads((folder / "record.json").read_text())
    return Record(
        ended=record["ended"],
        losses=record["losses"],
        parameters=record["parameters"],
        tokens_per_step=record["tokens_per_step"],
        hooks=[],
    )
