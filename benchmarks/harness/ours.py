"""Our side: the real ``drivetrain train`` command, logging at every step; times come from its metrics."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import orjson

from drivetrain.archive.reader import open_run
from drivetrain.measure.parameters import parameter_count
from harness.lanes import Done, Side
from harness.workload import Workload, environment

__all__ = ["our_side"]

INTERRUPTED = 130


def our_side(work: Workload, allocator: str, settings: Sequence[str] = ()) -> Side:
    """``drivetrain train`` on the workload, with ``settings`` (``section.field=value``)."""
    return Side(
        name=f"drivetrain, {' '.join(settings) or 'defaults'}",
        command=[
            *(sys.executable, "-m", "drivetrain", "train", work.preset),
            *work.overrides(),
            *settings,
            "--json",
        ],
        environment=environment(allocator),
        stamps=_stamps,
        end=_end,
        done=_done,
        exit_codes=(INTERRUPTED,),
    )


def _stamps(folder: Path) -> list[float]:
    """When each record was written.

    A step's record is written while the next step is handed in, so the time between two records is one whole
    period of the loop, logging and all.
    """
    found = sorted(folder.glob("runs/*/segments/0000/metrics.jsonl"))
    if not found:
        return []
    lines = found[0].read_bytes().split(b"\n")[:-1]
    return [record["time"] for record in map(orjson.loads, lines) if "step" in record]


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    del folder
    process.send_signal(signal.SIGINT)


def _done(folder: Path) -> Done:
    run = open_run(next(folder.glob("runs/*")))
    records, config = run.metrics(), run.config()
    return Done(
        parameters=parameter_count(config.model).total,
        tokens_per_step=config.training.global_batch_size * config.model.seq_length,
        losses=[record["train/loss"] for record in records],
        steps=len(records),
        hooks=[record["time/hooks_s"] / record["time/step_s"] for record in records],
    )
