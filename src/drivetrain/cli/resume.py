"""``train --resume``: go on with the run that an earlier start of the same job has made."""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.archive.listing import list_runs
from drivetrain.archive.reader import Run, open_run
from drivetrain.config import LoadedConfig, differing_leaves
from drivetrain.config.serialise import value_text
from drivetrain.errors import DrivetrainError, RunError

__all__ = ["finished_summary", "refuse_beside_resume", "run_of_this_name"]

_SHOWN_DIFFERENCES = 4
_TIME = len("20261129-141503")
"""With what the names of runs begin: the time at which they were made, to the second."""


def refuse_beside_resume(source: str, given: Mapping[str, bool]) -> None:
    """Raise DrivetrainError where ``source`` or one of the options ``given`` leaves ``--resume`` nothing to do."""
    for name, is_given in given.items():
        if is_given:
            raise DrivetrainError(f"--resume may go on with a run, and {name} cannot; give one of them")
    if (Path(source) / "run.json").is_file():
        raise DrivetrainError(f"{source} is a run, and naming it continues it; drop --resume")


def run_of_this_name(loaded: LoadedConfig) -> Run | None:
    """The newest run named ``run.name`` in ``run.runs_dir``; None where there is none yet.

    Raises:
        DrivetrainError: ``run.name`` is not set.
        RunError: it has another configuration: what is asked for is not what would go on. Or none of that name can be
            read: a new run would begin in its place. Where a newer one cannot be read, the newest that can goes on, and
            stderr says so.
    """
    config = loaded.config
    if config.run.name is None:
        raise DrivetrainError("--resume finds a run by its name, and run.name is not set; give run.name=...")
    if not Path(config.run.runs_dir).is_dir():
        return None
    runs = list_runs(config.run.runs_dir, on_fault=_say)
    run = next((run for run in reversed(runs) if run.name == config.run.name), None)
    unreadable = _unreadable(runs, Path(config.run.runs_dir), config.run.name)
    if run is None:
        if unreadable:
            raise RunError(
                f"--resume: {unreadable[-1]} has the name {config.run.name} and cannot be read (the reason is above), "
                "so that nothing goes on and nothing begins anew; put its run.json back, move it away, or give another "
                "run.name"
            )
        return None
    differing = differing_leaves(run.config(), config)
    if differing:
        shown = [
            f"{field} is {value_text(theirs)} there and {value_text(ours)} here"
            for field, (theirs, ours) in list(differing.items())[:_SHOWN_DIFFERENCES]
        ]
        more = f", and {len(differing) - len(shown)} more" if len(differing) > len(shown) else ""
        raise RunError(
            f"--resume: {run.path} has the name {run.name} and another configuration ({'; '.join(shown)}{more}); "
            f"give another run.name, or continue that run with: drivetrain train {run.path}"
        )
    if unreadable and unreadable[-1].name[:_TIME] >= run.path.name[:_TIME]:
        _say(
            f"--resume passes over {unreadable[-1]}, which has the name {run.name} and cannot be read (the reason is "
            f"above), and goes on with {run.path}"
        )
    return run


def _unreadable(runs: Sequence[Run], runs_dir: Path, name: str) -> list[Path]:
    """Folders of runs of that name which are not among ``runs``, because they cannot be read; the newest last."""
    of_this_name = re.compile(rf"[0-9]{{8}}-[0-9]{{6}}-{re.escape(name)}-[0-9a-f]{{4}}")
    read = {run.path.name for run in runs}
    folders = sorted(manifest.parent for manifest in runs_dir.glob("*/run.json"))
    return [path for path in folders if path.name not in read and of_this_name.fullmatch(path.name)]


def finished_summary(path: Path) -> dict[str, Any] | None:
    """The summary of the run at ``path`` if it has finished, so that nothing is left to do; else None."""
    run = open_run(path)
    if run.status() != "finished":
        return None
    return {key: value for key, value in (run.summary() or {}).items() if key not in ("schema", "segment")}


def _say(fault: str) -> None:
    print(f"note: {fault}", file=sys.stderr)
