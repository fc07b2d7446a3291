"""One run of ``drivetrain train`` over two hosts with a profiled window: what it says of its own waits, and what the
account of the very same steps says."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.archive.listing import list_runs
from drivetrain.errors import DrivetrainError
from drivetrain.lab import Lab

__all__ = ["Exposed", "exposed_by_both"]

_FIRST, _STEPS = 8, 6


@dataclass(frozen=True)
class Exposed:
    """Communication that nothing covered, as a share of the profiled steps of rank 0.

    Attributes:
        engine: from the run's own metrics, which need no profiler.
        account: from the trace.
        overlap: share of communication under computation, by the account; None: it has no figure.
    """

    engine: float
    account: float
    overlap: float | None


def exposed_by_both(folder: Path, rate: str, overrides: list[str]) -> Exposed:
    """Train and compare.

    Raises:
        DrivetrainError: the run did not finish, or logged nothing of its waits.
    """
    runs = folder / "runs"
    command = [
        *(sys.executable, "-m", "drivetrain", "train", *overrides),
        f"training.train_iters={_FIRST + _STEPS + 4}",
        "profiler.profile=true",
        f"profiler.profile_step_start={_FIRST}",
        f"profiler.profile_step_end={_FIRST + _STEPS}",
        "profiler.profile_ranks=all",
        f"run.runs_dir={runs}",
        "training.micro_batch_size=4",
        "training.global_batch_size=8",
        "training.eval_iters=0",
        "lr_schedule.lr_warmup_tokens=1000",
        "run.device=cpu",
        "run.num_threads=1",
        # Whatever the processor computes bf16 with: what is compared are waits.
        "precision.params_dtype=fp32",
    ]
    with Lab(2, 1, rate) as lab:
        lab.run(
            command,
            environment={"OMP_WAIT_POLICY": "PASSIVE"},
            time_limit_s=1200.0,
            on_line=lambda rank, _stream, line: print(f"  [train {rank}] {line}", file=sys.stderr),
        ).check()
    (run,) = list_runs(runs)
    steps = [line for line in run.metrics() if _FIRST <= int(line["step"]) < _FIRST + _STEPS]
    waits = [line.get("time/comm_exposed_s") for line in steps]
    if len(steps) != _STEPS or None in waits:
        raise DrivetrainError(f"{run.path} did not log its waits for the profiled steps: {waits}")
    engine = sum(float(wait) for wait in waits) / sum(float(line["time/step_s"]) for line in steps)
    made = subprocess.run(
        [sys.executable, "-m", "drivetrain", "account", str(run.path), "--json"],
        stdout=subprocess.PIPE,
        check=True,
    )
    document: dict[str, Any] = json.loads(made.stdout)
    window = next(rank["whole"] for rank in document["ranks"] if rank["rank"] == 0)
    exposed = window["exposed_communication_ns"]
    if exposed is None:
        raise DrivetrainError(f"the account of {run.path} withholds what was exposed: {document['health']}")
    hidden, total = window["overlapped_communication_ns"], window["communication_ns"]
    overlap = hidden / total if total else None
    return Exposed(engine, exposed / window["window_ns"], overlap)
