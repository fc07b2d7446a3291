"""The archive is a folder of runs: list them, and find the one a user means."""

from collections.abc import Callable
from pathlib import Path

from drivetrain.archive.reader import Run, open_run
from drivetrain.errors import RunError

__all__ = ["list_runs", "resolve_run"]

_MOST_CANDIDATES = 8


def list_runs(runs_dir: Path | str, on_fault: Callable[[str], None] | None = None) -> list[Run]:
    """The runs in ``runs_dir``, oldest first. Other files and folders in it are none of our business.

    Args:
        runs_dir: the folder; one that does not exist holds no runs.
        on_fault: told about each run that cannot be opened (damaged, or written by a newer version), which is
            then left out. None: the first one raises.

    Raises:
        RunError: ``runs_dir`` is a file, or (without ``on_fault``) a run cannot be opened.
    """
    folder = Path(runs_dir)
    if folder.is_file():
        raise RunError(f"{folder} is a file; give the folder that holds the runs")
    runs = []
    for manifest in sorted(folder.glob("*/run.json")):
        try:
            runs.append(open_run(manifest.parent))
        except RunError as error:
            if on_fault is None:
                raise
            on_fault(str(error))
    return sorted(runs, key=lambda run: (run.manifest["created"], run.id))


def resolve_run(reference: str, runs_dir: Path | str = "runs") -> Run:
    """The run a user means: a path, ``latest``, an id, a name, or the unique start or end of an id.

    Raises:
        RunError: no run, or more than one, answers to it; names the candidates.
    """
    path = Path(reference)
    if (path / "run.json").is_file() or (path.is_dir() and len(path.parts) > 1) or path.is_absolute():
        return open_run(path)
    if (Path(runs_dir) / reference / "run.json").is_file():
        return open_run(Path(runs_dir) / reference)
    runs = list_runs(runs_dir, on_fault=lambda _: None)
    if not runs:
        raise RunError(f"no run {reference!r}: there are no runs in {runs_dir}")
    if reference == "latest":
        return runs[-1]
    ways: list[Callable[[str, Run], bool]] = [
        lambda word, run: word in (run.id, run.path.name),
        lambda word, run: word == run.name,
        lambda word, run: run.id.startswith(word) or run.path.name.startswith(word),
        lambda word, run: run.id.endswith(word) or run.path.name.endswith(word),
    ]
    for matches in ways:
        found = [run for run in runs if matches(reference, run)]
        if len(found) == 1:
            return found[0]
        if found:
            raise RunError(f"{reference!r} is ambiguous in {runs_dir}, it means any of: {_candidates(found)}")
    from drivetrain.config import nearest  # Only a wrong name pays for the schema.

    close = nearest(reference, [run.name for run in runs] + [run.id for run in runs])
    hint = f"did you mean {close!r}? " if close is not None else ""
    raise RunError(f"no run {reference!r} in {runs_dir}; {hint}the latest runs are: {_candidates(runs)}")


def _candidates(runs: list[Run]) -> str:
    newest = [run.path.name for run in reversed(runs[-_MOST_CANDIDATES:])]
    more = len(runs) - len(newest)
    return ", ".join(newest) + (f" and {more} more" if more else "")
