"""The profiled windows of a run, as its events tell of them."""

from collections.abc import Mapping
from typing import Any

from drivetrain.archive.reader import Run
from drivetrain.errors import RunError

__all__ = ["newest_window", "was_profiled"]


def newest_window(run: Run) -> Mapping[str, Any] | None:
    """The event of the newest profile window that left traces and none of whose steps a later segment repeats.

    Its ``path``, within the run, is the folder of its traces. None where there is no such window.

    Raises:
        RunError: the events or the segments are damaged.
    """
    starts = {
        segment.index: segment.start_step for segment in run.segments() if segment.start_step is not None
    }
    windows = [
        event
        for event in run.events()
        if _is_profile(event) and event.get("file_bytes") and not _is_shadowed(run, event, starts)
    ]
    return windows[-1] if windows else None


def was_profiled(run: Run) -> bool:
    """Whether the events tell of any profile window, whatever became of it.

    Raises:
        RunError: the events are damaged.
    """
    return any(_is_profile(event) for event in run.events())


def _is_profile(event: Mapping[str, Any]) -> bool:
    return (event["kind"], event.get("what")) == ("window", "profile")


def _is_shadowed(run: Run, event: Mapping[str, Any], starts: Mapping[int, int]) -> bool:
    segment, last = event["segment"], event.get("last")
    is_whole = isinstance(event.get("first"), int) and isinstance(event.get("path"), str)
    if (
        not is_whole
        or not isinstance(segment, int)
        or not isinstance(last, int)
        or not isinstance(event["file_bytes"], dict)
    ):
        raise RunError(
            f"{run.path / 'events.jsonl'} is damaged: a profile window without its steps or its files"
        )
    return any(index > segment and start <= last for index, start in starts.items())
