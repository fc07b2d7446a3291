"""Documents on stdout, progress on stderr."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.engine.data.progress import ProgressCallback

__all__ = ["progress_on_stderr", "show_document"]


def show_document(document: Mapping[str, Any]) -> None:
    """Print one JSON document on stdout. What is not finite is null: JSON has no word for it."""
    import orjson

    print(
        orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY).decode(), flush=True
    )


@contextmanager
def progress_on_stderr() -> "Iterator[ProgressCallback]":
    """A callback for long work: a live bar on a terminal, a line for each new phase elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def line(moment: Any) -> None:
            if moment.phase not in seen:
                seen.add(moment.phase)
                print(moment.phase, file=sys.stderr, flush=True)

        yield line
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bars:
        tasks: dict[str, Any] = {}

        def bar(moment: Any) -> None:
            if moment.phase not in tasks:
                tasks[moment.phase] = bars.add_task(moment.phase, total=moment.total)
            bars.update(tasks[moment.phase], completed=moment.done, total=moment.total)

        yield bar
