"""What torch.compile is doing behind the loop's back.

Recompilations, and code that it gave up on, are in the records that it keeps of each compilation. Where a graph breaks
only its log ``graph_breaks`` tells: a handler listens to that, without a line of it being printed.
"""

import logging
import math
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from drivetrain.engine.compile_report import (
    CompileReport,
    LeftEager,
    graph_break_of,
    place_of,
    recompilation_of,
)

__all__ = ["CompilationWatch", "graphs_compiled"]

_LOGS = ("torch._dynamo.symbolic_convert", "torch._dynamo.convert_frame")
"""Modules that say in the log ``graph_breaks`` where a graph broke."""


def graphs_compiled() -> int:
    """Graphs that torch.compile has built in this process so far; a step that adds one is tagged ``compile``."""
    return _counter("stats", "unique_graphs")


class CompilationWatch:
    """Watches what this process compiles, while it is entered.

    Attributes:
        report: what was seen so far, by :meth:`look`.
    """

    def __init__(self) -> None:
        self.report = CompileReport()
        self._listener = _Listener()
        self._quiet: list[tuple[logging.Logger, int, bool]] = []
        self._looked_at = 0
        self._graphs_before = 0
        self._newest: Any = None
        self._functions: dict[str, tuple[str, str, int]] = {}

    def __enter__(self) -> Self:
        for module in _LOGS:
            logger = logging.getLogger(f"{module}.__graph_breaks")
            self._quiet.append((logger, logger.level, logger.propagate))
            if not logger.isEnabledFor(logging.DEBUG):
                # Nobody asked for these lines on the terminal: they are made for the handler alone.
                logger.setLevel(logging.DEBUG)
                logger.propagate = False
            logger.addHandler(self._listener)
        self._looked_at = _attempts()
        self._graphs_before = graphs_compiled()
        records = _records()
        self._newest = records[-1] if records else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._quiet:
            logger, level, propagate = self._quiet.pop()
            logger.removeHandler(self._listener)
            logger.setLevel(level)
            logger.propagate = propagate

    def look(self) -> bool:
        """Take in what was compiled since the last look. Cheap where nothing was.

        Returns:
            Whether there is a place or a reason among it that was not there before.
        """
        attempts = _attempts()
        if attempts == self._looked_at:
            return False
        self._looked_at = attempts
        report = self.report
        before = (len(report.breaks), len(report.recompilations), len(report.left_eager), report.incomplete)
        report.graphs = graphs_compiled() - self._graphs_before
        messages, self._listener.messages = self._listener.messages, []
        report.breaks.update(map(graph_break_of, messages))
        for record in self._new_records():
            self._take(record)
        return before != (
            len(report.breaks),
            len(report.recompilations),
            len(report.left_eager),
            report.incomplete,
        )

    def _new_records(self) -> Sequence[Any]:
        records = _records()
        known = next((place for place, one in enumerate(records) if one is self._newest), None)
        # Of as many as torch keeps none may be what came first.
        if known is None and (self._newest is not None or len(records) >= _most_records()):
            self.report.incomplete = True
        if records:
            self._newest = records[-1]
        return records if known is None else records[known + 1 :]

    def _take(self, record: Any) -> None:
        """One compilation of a function; those of backward graphs are part of it, and have records without a name."""
        function = self._function_of(record)
        if function is None:
            return
        name, file, line = function
        if record.recompile_reason is not None and record.fail_type is None:
            self.report.recompilations[recompilation_of(name, file, line, record.recompile_reason)] += 1
        if record.fail_type is not None:
            place = place_of(file, line)
            if record.fail_user_frame_filename is not None and record.fail_user_frame_lineno is not None:
                place = place_of(record.fail_user_frame_filename, record.fail_user_frame_lineno)
            lines = (record.fail_reason or "").strip().splitlines()
            why = lines[0].strip() if lines else str(record.fail_type)
            self.report.left_eager[LeftEager(name, place, why)] += 1

    def _function_of(self, record: Any) -> tuple[str, str, int] | None:
        """Name, file and line; of a record without them those of an earlier one of the same function."""
        number = str(record.compile_id).partition("/")[0]
        if record.co_name is not None and record.co_filename is not None:
            self._functions[number] = (record.co_name, record.co_filename, record.co_firstlineno or 0)
        elif record.fail_type is None:
            return None
        return self._functions.get(number, ("a function", "unknown", 0))


_RECORDS_KEPT = 64


class _Listener(logging.Handler):
    """Keeps the lines of a log."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Called by the logger, in whatever thread compiles."""
        self.messages.append(record.getMessage())


def _attempts() -> int:
    return _counter("frames", "total")


def _records() -> Sequence[Any]:
    utilities = sys.modules.get("torch._dynamo.utils")
    return [] if utilities is None else list(utilities.get_compilation_metrics())


def _most_records() -> float:
    # A private name: where a version of torch has another, what 2.11 to 2.13 keep by default counts.
    kept = getattr(sys.modules.get("torch._dynamo.utils"), "_compilation_metrics", None)
    if kept is None:
        return _RECORDS_KEPT
    return math.inf if kept.maxlen is None else int(kept.maxlen)


def _counter(group: str, name: str) -> int:
    # Only asked when dynamo is there already: importing it costs seconds and an eager run never needs it.
    utilities = sys.modules.get("torch._dynamo.utils")
    if utilities is None:
        return 0
    return int(utilities.counters[group][name])
