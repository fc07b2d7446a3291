"""``account.json`` of a run: the accounts of its profiled windows, as the account's own document."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.archive.encoding import SCHEMA, read_document
from drivetrain.archive.profile_windows import newest_window, was_profiled
from drivetrain.archive.reader import open_run
from drivetrain.errors import RunError

__all__ = ["ACCOUNT_FILE", "UNEXPLAINED", "MeanStep", "mean_step_of", "newest_account"]

ACCOUNT_FILE = "account.json"
UNEXPLAINED = "unexplained"
_REMEDY = "remove it: the traces are in the run, and `drivetrain account` reads them"


@dataclass(frozen=True)
class MeanStep:
    """The mean step of a window: mean over its steps (the first recorded one left out where there are others) and
    then over its ranks. Classes and ``unexplained`` add up to the window."""

    first: int
    last: int
    window_ns: float
    classes: Mapping[str, float]
    name_table: str | None = None
    """Version and digest of the tables that classed the names; None where the file does not say."""


def newest_account(run_path: Path) -> dict[str, Any] | None:
    """The entry ``{first, last, name_table, account}`` of the run's newest window.

    None where the run was never profiled, or its newest window (:func:`newest_window`) has no entry: what the file
    holds is then of steps that are no longer the run's, or of an older window.

    Raises:
        RunError: the file is damaged, or of a newer version.
    """
    path = run_path / ACCOUNT_FILE
    if not path.is_file():
        return None
    document = read_document(path)
    windows = document.get("windows")
    if document.get("schema") != SCHEMA or not isinstance(windows, list) or not windows:
        raise RunError(f"{path} is damaged or of another version; {_REMEDY}")
    for entry in windows:
        if not isinstance(entry, dict):
            raise RunError(f"{path} is damaged: {entry!r} is no window; {_REMEDY}")
    return _of_newest_window(run_path, windows)


def _of_newest_window(run_path: Path, entries: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The last entry where the events tell of no window, or cannot be read: that is no fault of the account."""
    try:
        run = open_run(run_path)
        if not was_profiled(run):
            return entries[-1]
        window = newest_window(run)
    except RunError:
        return entries[-1]
    if window is None:
        return None
    steps = (window["first"], window["last"])
    return next((one for one in reversed(entries) if (one.get("first"), one.get("last")) == steps), None)


def mean_step_of(run_path: Path, steps: Collection[int] | None = None) -> MeanStep | None:
    """The mean step of the newest window; None where there is none, or it holds no steps.

    Args:
        steps: that are in the mean; None: all but the first recorded one, where there are others.

    Raises:
        RunError: the file is damaged.
    """
    entry = newest_account(run_path)
    if entry is None:
        return None
    try:
        recorded = [_steady(rank["steps"], steps) for rank in entry["account"]["ranks"]]
        ranks = [_mean(chosen) for chosen in recorded if chosen]
        first, last = int(entry["first"]), int(entry["last"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{run_path / ACCOUNT_FILE} is damaged: {error!r}; {_REMEDY}") from error
    if not ranks:
        return None
    names = list(dict.fromkeys(name for rank in ranks for name in rank))
    merged = {name: statistics.fmean(rank.get(name, 0.0) for rank in ranks) for name in names}
    table = entry.get("name_table")
    return MeanStep(first, last, merged.pop("window_ns"), merged, table if isinstance(table, str) else None)


def _steady(
    steps: Sequence[Mapping[str, Any]], chosen: Collection[int] | None
) -> Sequence[Mapping[str, Any]]:
    if chosen is None:
        return steps[1:] or steps
    return [step for step in steps if step["step"] in chosen]


def _mean(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    columns = [
        {**step["classes"], UNEXPLAINED: step["unexplained_ns"], "window_ns": step["window_ns"]}
        for step in steps
    ]
    names = list(dict.fromkeys(name for column in columns for name in column))
    return {name: statistics.fmean(column.get(name, 0) for column in columns) for name in names}
