"""Killing ranks of a run that trains, as a machine that goes away would: which processes, at which moment."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from drivetrain.engine.checkpoint.manifest import damage

__all__ = ["Kill", "RunEndedEarly", "kill_one", "leftovers", "ranks_of", "whole_checkpoints"]

LOOK_EVERY_S = 0.01
PATIENCE_S = 300.0
"""For a start of all ranks, or a checkpoint, on a busy machine."""
MOST_STEPS = 9
MOST_SECONDS = 0.3


class RunEndedEarly(Exception):
    """The run ended, or did not come to a checkpoint, before the next kill."""


@dataclass(frozen=True)
class Kill:
    """One SIGKILL.

    Attributes:
        rank: that was killed.
        start: which start of the ranks it was, counted from 0.
        logged: steps of that start that were in the metrics by then.
        while_saving: a checkpoint was being written.
        damaged: what was wrong with the newest checkpoint right after, in words; None: it was sound.
    """

    rank: int
    start: int
    logged: int
    while_saving: bool
    damaged: str | None


def ranks_of(run: Path) -> dict[int, int]:
    """Process of each rank that trains ``run`` now; not those that the ranks started themselves."""
    found: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended, or is somebody else's
            continue
        if str(run).encode() in command and b"drivetrain" in command:
            rank = next((one for one in environment if one.startswith(b"RANK=")), None)
            if rank is not None:
                found[int(entry.name)] = (int(rank[5:]), parent)
    return {rank: process for process, (rank, parent) in found.items() if parent not in found}


def whole_checkpoints(run: Path) -> list[Path]:
    """Checkpoints under their final names, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def leftovers(run: Path) -> list[str]:
    """Files and folders that something left half-written or half-removed, relative to the run."""
    names = (".tmp-", ".old-", "damaged-")
    return sorted(
        str(path.relative_to(run))
        for path in run.rglob("*")
        if path.name.startswith(names) or path.name.endswith(".tmp")
    )


def kill_one(run: Path, process: "subprocess.Popen[bytes]", draw: random.Random, start: int) -> Kill:
    """SIGKILL to a random rank at a random moment, after the first checkpoint that start number ``start`` has written.

    The moment is up to :data:`MOST_STEPS` logged steps and :data:`MOST_SECONDS` later, so that it falls into any part
    of a step or a save.

    Args:
        process: the launcher.

    Raises:
        RunEndedEarly: there was nobody to kill.
    """
    metrics = run / "segments" / f"{start:04d}" / "metrics.jsonl"

    def wait_for(what: str, has_come: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not has_come():
            if process.poll() is not None:
                raise RunEndedEarly(
                    f"the run ended before {what} of start {start}; its code is {process.poll()}"
                )
            if time.monotonic() > deadline:
                raise RunEndedEarly(f"{what} of start {start} did not come in {PATIENCE_S:g} s")
            time.sleep(LOOK_EVERY_S)

    wait_for("the first step", lambda: _logged(metrics) > 0)
    # Whatever is there now may still be of the ranks that were killed.
    old = set(whole_checkpoints(run))
    wait_for("a checkpoint", lambda: not set(whole_checkpoints(run)) <= old)
    enough = _logged(metrics) + draw.randint(0, MOST_STEPS)
    wait_for(f"step {enough}", lambda: _logged(metrics) >= enough)
    time.sleep(draw.uniform(0, MOST_SECONDS))
    ranks = ranks_of(run)
    if not ranks:
        raise RunEndedEarly(f"the run ended during start {start}; it needs more steps")
    rank = draw.choice(sorted(ranks))
    saving = any((run / "checkpoints").glob(".tmp-step-*"))
    os.kill(ranks[rank], signal.SIGKILL)
    return Kill(rank, start, _logged(metrics), saving, damage(whole_checkpoints(run)[-1]))


def _logged(metrics: Path) -> int:
    """Steps in a file of metrics, whose first line is a header."""
    return metrics.read_bytes().count(b"\n") - 1 if metrics.exists() else -1
