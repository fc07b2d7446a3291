"""Our side: the real ``drivetrain train`` command, logging at every step; times come from its metrics."""

import json
import sys
from pathlib import Path

from drivetrain.archive.reader import open_run
from drivetrain.measure.parameters import parameter_count
from harness.blocks import Block, Record, measure
from harness.workload import Workload, environment

__all__ = ["run_ours"]


def run_ours(
    work: Workload, allocator: str, *, compiled: bool, warmup: int, patience_s: float = 180.0
) -> Block:
    """One block of ``drivetrain train``."""
    command = [sys.executable, "-m", "drivetrain", "train", work.preset, *work.overrides()]
    command += [f"fusion.compile={json.dumps(compiled)}", "--json"]
    side = f"drivetrain, fusion.compile={json.dumps(compiled)}"
    return measure(side, command, environment(allocator), _read, warmup=warmup, patience_s=patience_s)


def _read(folder: Path) -> Record:
    """The records of the run in ``folder``.

    A step's record is written while the next step is handed in, so the time between two records is one whole
    period of the loop, logging and all. The last is written after the loop and is left out.
    """
    summary = json.loads((folder / "stdout").read_text())
    run = open_run(folder / summary["run"])
    records = run.metrics()
    config = run.config()
    return Record(
        ended=[record["time"] for record in records[:-1]],
        losses=[record["train/loss"] for record in records],
        parameters=parameter_count(config.model).total,
        tokens_per_step=config.training.global_batch_size * config.model.seq_length,
        hooks=[record["time/hooks_s"] / record["time/step_s"] for record in records[:-1]],
    )
