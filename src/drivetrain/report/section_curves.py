"""Loss with gradient norm, and step time, over the steps of a run."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drivetrain.report.blocks import Block, Bullets, Cell, Figure, Paragraph
from drivetrain.report.panels import Panel, Points, Series, panels_svg
from drivetrain.report.run_records import RunRecords

__all__ = ["loss_section", "step_time_section"]

_LOSS, _SMOOTH, _NORM, _EVALUATION = "#7fb3d5", "#0072b2", "#009e73", "#d55e00"
_STEP, _DATA, _EXPOSED, _PARENT = "#0072b2", "#d55e00", "#e69f00", "#999999"
_OFF_SCALE = 3.0
"""A tagged step (it compiled, it was profiled) that took so many times the longest plain one sets no scale."""


def _column(lines: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float | None]]:
    """Steps and values of a metric, of the lines that have it."""
    pairs = [
        (line["step"], line[key])
        for line in lines
        if isinstance(line.get(key), int | float) and not isinstance(line[key], bool)
    ]
    return [float(step) for step, _ in pairs], [float(value) for _, value in pairs]


def loss_section(records: RunRecords) -> list[Block]:
    """A panel of loss with its smoothed curve, evaluations and the parent's; a panel of the gradient norm."""
    if not records.lines:
        return [Paragraph("No step has been logged.", "muted")]
    lines = records.lines
    curves = [
        Series("loss", *_column(lines, "train/loss"), _LOSS, 1.2),
        Series("smoothed", *_column(lines, "train/loss_ema"), _SMOOTH, 2, marked=False),
    ]
    if records.parent is not None and records.parent.lines:
        parent = _column(records.parent.lines, "train/loss_ema")
        curves.insert(0, Series("parent, smoothed", *parent, _PARENT, 1.5, "5 3", marked=False))
    evaluations = [
        (step, float(event["loss"]))
        for step, event in records.evaluations()
        if isinstance(event.get("loss"), int | float)
    ]
    points = (
        Points(
            "held-out loss", [step for step, _ in evaluations], [loss for _, loss in evaluations], _EVALUATION
        ),
    )
    panels = [
        Panel("loss, nat/token", 250, tuple(curves), points if evaluations else ()),
        Panel(
            "gradient norm before clipping",
            120,
            (Series("gradient norm", *_column(lines, "train/grad_norm"), _NORM, 1.2),),
        ),
    ]
    facts = [*_course(records, "train/loss", "loss"), *_course(records, "train/grad_norm", "gradient norm")]
    facts += [f"held-out loss at step {step}: {loss:.4f}" for step, loss in evaluations]
    svg = panels_svg(
        panels,
        tagged=_tagged(records),
        restarts=_restarts(records),
        words=f"Loss and gradient norm by step: {'; '.join(facts[:4])}",
    )
    return [*_alarms(records), Figure(svg, "\n".join([*facts, *_tag_words(records)]), _caption(records))]


def step_time_section(records: RunRecords) -> list[Block]:
    """A panel of the steps' wall time and what of it was waiting."""
    steps, times = _column(records.lines, "time/step_s")
    finite = [value for value in times if value is not None and math.isfinite(value)]
    if not finite:
        return [Paragraph("No step time has been logged.", "muted")]
    plain = [
        float(line["time/step_s"])
        for line in records.lines
        if not line.get("tags")
        and isinstance(line.get("time/step_s"), int | float)
        and math.isfinite(line["time/step_s"])
    ]
    limit = max(plain) * 1.15 if plain and max(finite) > _OFF_SCALE * max(plain) else None
    curves = [Series("step", steps, times, _STEP, 1.4)]
    for label, key, colour in (
        ("waiting for data", "time/data_wait_s", _DATA),
        ("exposed communication", "time/comm_exposed_s", _EXPOSED),
    ):
        column = _column(records.lines, key)
        if column[0]:
            curves.append(Series(label, *column, colour, 1.2))
    facts = list(_course(records, "time/step_s", "step time, s"))
    if plain:
        facts.append(f"median of {len(plain)} steps without a tag: {statistics.median(plain):.4g} s")
    panel = Panel("wall time of a step, s", 200, tuple(curves), from_zero=True, limit=limit)
    svg = panels_svg(
        [panel],
        tagged=_tagged(records),
        restarts=_restarts(records),
        words=f"Wall time of each step: {'; '.join(facts)}",
    )
    caption = "Steps with a tag (the rows below the curve) are no part of the steady state."
    interval = _log_interval(records)
    if interval != 1:
        caption += f" Each is the mean of the steps since the one before (every {interval})."
    if limit is not None:
        caption += " Triangles: steps beyond the scale, which is that of the steps without a tag."
    return [Figure(svg, "\n".join([*facts, *_tag_words(records)]), caption)]


def _tagged(records: RunRecords) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for line in records.lines:
        for tag in line.get("tags") or ():
            found.setdefault(str(tag), []).append(line["step"])
    for event in records.events:
        if event["kind"] == "checkpoint" and isinstance(event.get("step"), int):
            found.setdefault("checkpoint", []).append(event["step"])
    return {tag: sorted(set(steps)) for tag, steps in found.items()}


def _tag_words(records: RunRecords) -> Iterator[str]:
    for tag, steps in _tagged(records).items():
        shown = ", ".join(map(str, steps[:8])) + (f" and {len(steps) - 8} more" if len(steps) > 8 else "")
        yield f"{tag}: step{'s' if len(steps) > 1 else ''} {shown}"


def _restarts(records: RunRecords) -> list[int]:
    starts = [segment.start_step for segment in records.segments[1:] if segment.start_step is not None]
    if not records.lines:
        return []
    # A start between two logged steps is one as well: not every step is logged.
    first, last = records.lines[0]["step"], records.lines[-1]["step"]
    return [step for step in starts if first <= step <= last]


def _course(records: RunRecords, key: str, label: str) -> Iterator[str]:
    """First, least, greatest and last finite value, as Markdown and screen readers have it."""
    steps, values = _column(records.lines, key)
    finite = [
        (value, step)
        for step, value in zip(steps, values, strict=True)
        if value is not None and math.isfinite(value)
    ]
    if not finite:
        yield f"{label}: {'no finite value' if values else 'not logged'}"
        return
    (first, first_step), (last, last_step) = finite[0], finite[-1]
    (least, least_step), (greatest, greatest_step) = min(finite), max(finite)
    yield (
        f"{label}: {first:.4f} at step {first_step:g}, {last:.4f} at step {last_step:g}, "
        f"least {least:.4f} at step {least_step:g}, greatest {greatest:.4f} at step {greatest_step:g}"
    )


def _alarms(records: RunRecords) -> list[Block]:
    items = []
    for key, label in (("train/loss", "loss"), ("train/grad_norm", "gradient norm")):
        found = records.not_finite(key)
        if found:
            step, value = found[0]
            logged = f"{len(found)} of {len(records.lines)} logged steps"
            name = "NaN" if math.isnan(value) else "infinite"
            items.append(
                Cell(f"The {label} is not finite at {logged}, first at step {step} ({name}).", "bad")
            )
    return [Bullets(items)] if items else []


def _log_interval(records: RunRecords) -> Any:
    return records.group("monitor").get("log_interval", 1)


def _caption(records: RunRecords) -> str:
    interval = _log_interval(records)
    one = (
        f" Each is of that one step (every {interval}); the steps between were not logged."
        if interval != 1
        else ""
    )
    return (
        f"{len(records.lines):,} logged steps.{one} Of each column of pixels the first, least, greatest and last "
        "value are drawn: no spike is lost. Red triangles: not finite."
    )
