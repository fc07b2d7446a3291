"""Pictures of a ladder: the step time rung by rung, and which classes of the account it was taken from."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.measure.account import CLASSES
from drivetrain.report.ladder_rows import change_in_words
from drivetrain.report.palette import colour_of, group_of
from drivetrain.report.svg import GRID, document, legend, line, rectangle, text

__all__ = ["Rung", "class_rungs", "classes_svg", "classes_text", "rungs_svg", "rungs_text", "step_time_rungs"]

_PLOT, _VALUE, _ROW, _TOP = 500, 270, 30, 40
_LONGEST = 46
FINAL = "final configuration"
_BASELINE, _KEPT, _FINAL = "#8c96a0", "#56b4e9", "#0072b2"


@dataclass(frozen=True)
class Rung:
    """A configuration of the ladder and its step time; ``note`` is the ratio that was measured, in words."""

    label: str
    step_s: float
    note: str = ""


def step_time_rungs(tune: Mapping[str, Any]) -> list[Rung]:
    """Baseline, each kept change, final configuration, as far as their step times are in the document.

    A kept change's time is the geometric mean of the medians of its own blocks (side B) in its trial.
    """
    rungs: list[Rung] = []
    baseline, final = tune.get("baseline") or {}, tune.get("final") or {}
    if _is_time(baseline.get("step_s")):
        rungs.append(Rung("baseline", float(baseline["step_s"])))
    for step in tune.get("steps") or ():
        if step.get("kept"):
            times = [
                float(block["step_s"])
                for block in step.get("blocks") or ()
                if block.get("side") == "B" and _is_time(block.get("step_s"))
            ]
            if times:
                label = f"+ {change_in_words(step.get('change') or {})}"
                rungs.append(
                    Rung(
                        label,
                        statistics.geometric_mean(times),
                        _times(step.get("measured"), "its parent's speed"),
                    )
                )
    if _is_time(final.get("step_s")):
        note = _times(tune.get("speed_up"), "the baseline's")
        rungs.append(Rung(FINAL, float(final["step_s"]), note))
    return rungs


def _times(measured: Mapping[str, Any] | None, of_what: str) -> str:
    if not measured or measured.get("ratio") is None:
        return ""
    return f"{float(measured['ratio']):.3f}x {of_what}"


def rungs_svg(rungs: Sequence[Rung]) -> str:
    """A bar each, from zero, with its time and the ratio that was measured."""
    longest = max(rung.step_s for rung in rungs)
    left = _label_width([rung.label for rung in rungs])
    elements = [text(16, 24, "Step time, rung by rung", size=16)]
    for index, rung in enumerate(rungs):
        y = _TOP + index * _ROW
        colour = _BASELINE if index == 0 else _FINAL if rung.label == FINAL else _KEPT
        elements.append(text(left - 10, y + 19, _short(rung.label), anchor="end"))
        width = _PLOT * rung.step_s / longest
        tip = f"{rung.label}: {rung.step_s * 1e3:.2f} ms"
        elements.append(rectangle(left, y + 5, width, _ROW - 10, colour, tip))
        elements.append(text(left + width + 8, y + 19, _time_words(rung), size=12))
    words = "Step time: " + "; ".join(f"{rung.label} {_time_words(rung)}" for rung in rungs)
    return document(left + _PLOT + _VALUE, _TOP + _ROW * len(rungs) + 14, words, elements)


def rungs_text(rungs: Sequence[Rung]) -> str:
    """The same in words, a line each."""
    width = max(len(rung.label) for rung in rungs)
    return "\n".join(f"{rung.label:<{width}}  {_time_words(rung)}" for rung in rungs)


def _time_words(rung: Rung) -> str:
    return f"{rung.step_s * 1e3:,.1f} ms" + (f", {rung.note}" if rung.note else "")


def class_rungs(tune: Mapping[str, Any]) -> list[tuple[str, Mapping[str, float]]]:
    """Configuration and its classes (ns of a profiled step), of the rungs that were profiled."""
    rungs: list[tuple[str, Mapping[str, float]]] = []
    named: list[tuple[str, Any]] = [("baseline", (tune.get("baseline") or {}).get("classes"))]
    for step in tune.get("steps") or ():
        if step.get("kept"):
            named.append((f"+ {change_in_words(step.get('change') or {})}", step.get("classes_after")))
    named.append((FINAL, (tune.get("final") or {}).get("classes")))
    for label, classes in named:
        if isinstance(classes, dict):
            numbers = {
                name: float(value) for name, value in classes.items() if _is_number(value) and value > 0
            }
            if numbers:
                rungs.append((label, numbers))
    return rungs


def classes_svg(rungs: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """A stacked bar each, all on one scale; the classes in their order."""
    longest = max(sum(classes.values()) for _, classes in rungs)
    groups = list(dict.fromkeys(group_of(name) for _, classes in rungs for name in _ordered(classes)))
    left = _label_width([label for label, _ in rungs])
    entries, used = legend(
        [(colour_of("class", group), group) for group in groups], 16, 40, left + _PLOT + _VALUE, size=12
    )
    elements = [text(16, 24, "Where a profiled step went, rung by rung", size=16), *entries]
    top = _TOP + used
    for index, (label, classes) in enumerate(rungs):
        y = top + index * _ROW
        elements.append(text(left - 10, y + 19, _short(label), anchor="end"))
        x = float(left)
        for name in _ordered(classes):
            width = _PLOT * classes[name] / longest
            tip = f"{label}, {name}: {classes[name] / 1e6:.3f} ms"
            elements.append(rectangle(x, y + 5, width, _ROW - 10, colour_of("class", name), tip))
            x += width
        elements.append(text(x + 8, y + 19, f"{sum(classes.values()) / 1e6:,.1f} ms", size=12))
    bottom = top + _ROW * len(rungs)
    elements.append(line(left, top, left, bottom, GRID))
    words = "Classes of a profiled step: " + "; ".join(
        f"{label} {sum(classes.values()) / 1e6:.1f} ms" for label, classes in rungs
    )
    return document(left + _PLOT + _VALUE, bottom + 14, words, elements)


def classes_text(rungs: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """The same in words, a line each: milliseconds of each group of classes."""
    lines = []
    for label, classes in rungs:
        groups: dict[str, float] = {}
        for name in _ordered(classes):
            groups[group_of(name)] = groups.get(group_of(name), 0.0) + classes[name]
        parts = ", ".join(f"{group} {ns / 1e6:,.1f} ms" for group, ns in groups.items())
        lines.append(f"{label}: {sum(classes.values()) / 1e6:,.1f} ms ({parts})")
    return "\n".join(lines)


def _ordered(classes: Mapping[str, float]) -> list[str]:
    return [name for name in CLASSES if name in classes] + [name for name in classes if name not in CLASSES]


def _label_width(labels: Sequence[str]) -> float:
    return 36 + 6.8 * max(len(_short(label)) for label in labels)


def _short(label: str) -> str:
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"


def _is_time(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and value == value
        and abs(value) < 1e300
    )
