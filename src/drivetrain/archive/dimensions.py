"""The five dimensions of a run: throughput, compute utilisation, communication, memory, convergence.

The one table of which figures a run is judged by; ``runs show``, ``compare`` and the end of a training run
all print these.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from drivetrain.archive.reader import Run

__all__ = [
    "DIMENSIONS",
    "Figure",
    "RunFigures",
    "figures_of",
    "figures_of_summary",
    "format_value",
]

Dimension = Literal["throughput", "compute utilisation", "communication", "memory", "convergence"]


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One row: its key (dotted where the summary nests it), label, unit, and which way is better."""

    key: str
    label: str
    dimension: Dimension
    unit: Literal["token/s", "s", "share", "byte", "nat/token", "bit/byte"]
    better: Literal["higher", "lower", "neither"]


DIMENSIONS: tuple[Figure, ...] = (
    Figure("tokens_per_second", "tokens/s", "throughput", "token/s", "higher"),
    Figure("effective_tokens_per_second", "effective tokens/s", "throughput", "token/s", "higher"),
    Figure("step_time_s.p50", "step, median", "throughput", "s", "lower"),
    Figure("step_time_s.p90", "step, 90th percentile", "throughput", "s", "lower"),
    Figure("step_time_s.max", "step, longest", "throughput", "s", "lower"),
    Figure("data_wait_frac", "waiting for data", "throughput", "share", "lower"),
    Figure("mfu", "MFU", "compute utilisation", "share", "higher"),
    Figure("hfu", "HFU", "compute utilisation", "share", "neither"),
    Figure("communication_exposed_frac", "exposed wait", "communication", "share", "lower"),
    Figure("peak_memory_bytes", "peak per process", "memory", "byte", "lower"),
    Figure("final_loss", "final loss", "convergence", "nat/token", "lower"),
    Figure("validation_loss", "validation loss", "convergence", "nat/token", "lower"),
    Figure("validation_bits_per_byte", "validation bits/byte", "convergence", "bit/byte", "lower"),
)
"""All figures in the order they are shown."""


@dataclasses.dataclass(frozen=True)
class RunFigures:
    """The figures of one run.

    Attributes:
        values: by :attr:`Figure.key`; None where unknown.
        reasons: why a value is None, where the run says so.
        source: ``summary`` (written at the end of the run) or ``metrics`` (computed from the logged steps).
        partial: the run has not finished, so its figures cover a part of it.
        tokens: tokens processed; None where unknown.
    """

    values: Mapping[str, float | None]
    reasons: Mapping[str, str]
    source: Literal["summary", "metrics"]
    partial: bool
    tokens: int | None


def figures_of(run: Run) -> RunFigures:
    """The figures of ``run``: from its summary, or as far as its logged steps give them."""
    partial = run.status() != "finished"
    summary = run.summary()
    if summary is not None:
        return dataclasses.replace(figures_of_summary(summary), partial=partial)
    evaluations = [event for event in run.events() if event["kind"] == "evaluation"]
    return _from_metrics(run.metrics(), evaluations[-1] if evaluations else {}, partial)


def figures_of_summary(summary: Mapping[str, Any]) -> RunFigures:
    """The figures in a summary document (``summary.json``, or what ``train --json`` prints)."""
    values: dict[str, float | None] = {}
    for figure in DIMENSIONS:
        value: Any = summary
        for part in figure.key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        values[figure.key] = None if value is None else float(value)
    tokens = summary.get("tokens")
    return RunFigures(
        values=MappingProxyType(values),
        reasons=MappingProxyType(dict(summary.get("reasons") or {})),
        source="summary",
        partial=summary.get("status") != "finished",
        tokens=None if tokens is None else int(tokens),
    )


def _column(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(line[key]) for line in lines if line.get(key) is not None]


def _reduced(values: Sequence[float], reduce: Callable[[Sequence[float]], float]) -> float | None:
    return reduce(values) if values else None


def _share(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Sum of the times under ``key`` over the sum of the steps' times."""
    pairs = [(line[key], line["time/step_s"]) for line in lines if line.get(key) is not None]
    whole = sum(step for _, step in pairs if step)
    return sum(part for part, _ in pairs) / whole if whole else None


def _over_time(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Mean of a rate, weighted by the steps' times: what was done over the time it took, as in a summary."""
    pairs = [
        (line[key], line["time/step_s"])
        for line in lines
        if None not in (line.get(key), line.get("time/step_s"))
    ]
    whole = sum(step for _, step in pairs)
    return sum(rate * step for rate, step in pairs) / whole if whole else None


def _percentile_90(values: Sequence[float]) -> float:
    """Interpolated linearly, as in a summary (:func:`drivetrain.measure.statistics.percentile` needs NumPy)."""
    return statistics.quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def _from_metrics(
    lines: Sequence[Mapping[str, Any]], evaluation: Mapping[str, Any], partial: bool
) -> RunFigures:
    # Steady state: without warm-up, and steps that also compiled or were profiled. A run too short for one has none.
    steady = [line for line in lines if not line.get("tags")]
    steps = _column(steady, "time/step_s")

    def last(key: str) -> float | None:
        return _reduced(_column(lines, key), lambda values: values[-1])

    peaks = _column(lines, "memory/allocated_peak_bytes") or _column(lines, "memory/process_rss_peak_bytes")
    values = {
        "tokens_per_second": _over_time(steady, "throughput/tokens_per_sec"),
        "effective_tokens_per_second": _over_time(steady, "throughput/effective_tokens_per_sec"),
        "step_time_s.p50": _reduced(steps, statistics.median),
        "step_time_s.p90": _reduced(steps, _percentile_90),
        "step_time_s.max": _reduced(steps, max),
        "data_wait_frac": _share(steady, "time/data_wait_s"),
        "mfu": _over_time(steady, "throughput/device/mfu"),
        "hfu": _over_time(steady, "throughput/device/hfu"),
        "communication_exposed_frac": _share(steady, "time/comm_exposed_s"),
        "peak_memory_bytes": _reduced(peaks, max),
        "final_loss": last("train/loss"),
        "validation_loss": evaluation.get("loss"),
        "validation_bits_per_byte": evaluation.get("bits_per_byte"),
    }
    assert values.keys() == {figure.key for figure in DIMENSIONS}
    tokens = last("progress/tokens")
    return RunFigures(
        values=MappingProxyType(values),
        reasons=MappingProxyType(
            {key: "not in the logged steps" for key, value in values.items() if value is None}
        ),
        source="metrics",
        partial=partial,
        tokens=None if tokens is None else int(tokens),
    )


def format_value(value: float | None, unit: str) -> str:
    """A figure for people: ``12,345``, ``34.5%``, ``1.23 GB``, ``231 ms``; ``-`` where unknown."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if unit == "share":
        return f"{100 * value:.1f}%"
    if unit == "byte":
        for power, word in ((12, "TB"), (9, "GB"), (6, "MB")):
            if value >= 10**power:
                return f"{value / 10**power:.2f} {word}"
        return f"{value:,.0f} B"
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"
    if unit in ("nat/token", "bit/byte"):
        return f"{value:.4f}"
    return f"{value:,.0f}"
