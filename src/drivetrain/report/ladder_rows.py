"""The steps of a ladder as rows of text, for the terminal, the page and Markdown alike.

Everything here turns one piece of the document of ``tune.json`` into words: :func:`ladder_rows` a step into a row
(:func:`removal_rows` one of ``leave_one_out``), :func:`change_in_words` a change, :func:`ratio_in_words` a measured
ratio with its interval, :func:`gate_in_words` a gate's verdict, :func:`totals` what the ladder cost and brought,
:func:`prediction_in_words` how far predictions were off. A
document that is still being written lacks pieces: what is not there is a dash, never a guess. Ratios above 1 are
faster.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "LADDER_HEADINGS",
    "LadderRow",
    "Tone",
    "change_in_words",
    "duration_in_words",
    "gate_in_words",
    "ladder_rows",
    "percent_in_words",
    "prediction_in_words",
    "ratio_in_words",
    "removal_rows",
    "totals",
    "value_in_words",
    "verdict_word",
]

Tone = Literal["good", "bad", "doubtful", "plain"]
"""How a row's verdict is coloured; the word says the same."""

NOTHING = "-"

LADDER_HEADINGS: tuple[str, ...] = (
    "#",
    "change",
    "treats",
    "predicted",
    "measured [95%]",
    "off by",
    "memory vs parent",
    "gate",
    "verdict",
)
"""Headings of :attr:`LadderRow.cells`."""

_OUTCOMES = {
    "diverged": "diverged",
    "out_of_memory": "out of memory",
    "crash": "crashed",
    "hang": "hung",
    "refused": "refused",
    "interrupted": "interrupted",
}

_REMOVALS: Mapping[str, tuple[str, Tone]] = {
    "kept": ("stays", "good"),
    "discarded": ("dropped", "doubtful"),
}
"""What the verdict on a removal means for the change it took away."""


@dataclass(frozen=True)
class LadderRow:
    """One step of a ladder, in words."""

    index: str
    change: str
    entry: str
    treats: str
    predicted: str
    """Expected ratio with its model's range; a dash where nothing was expected."""
    predicted_why: str
    """How it was computed, or why there is none; empty where the document does not say."""
    measured: str
    error: str
    """Saved share of a step, predicted less measured, relative to what was measured."""
    memory: str
    """Peak of the candidate's process less its parent's, with its sign."""
    gate: str
    verdict: str
    why: str
    """Why it was kept or not; empty where the document does not say."""
    gate_why: str
    """Why the gate said so; empty where no gate was held, or the step's own ``why`` says the same."""
    cost: str
    """Device time that the step took."""
    kept: bool
    tone: Tone

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of a table under :data:`LADDER_HEADINGS`; ``why`` and ``cost`` are left to the caller."""
        return (
            self.index,
            self.change,
            self.treats,
            self.predicted,
            self.measured,
            self.error,
            self.memory,
            self.gate,
            self.verdict,
        )


def ladder_rows(steps: Sequence[Mapping[str, Any]]) -> tuple[LadderRow, ...]:
    """The rows of ``steps`` of a tune's document, in their order."""
    return tuple(_row(position, step) for position, step in enumerate(steps, start=1))


def removal_rows(steps: Sequence[Mapping[str, Any]]) -> tuple[LadderRow, ...]:
    """The rows of ``leave_one_out``: there ``kept`` says that the change stays."""
    return tuple(
        dataclasses.replace(row, verdict=_REMOVALS[row.verdict][0], tone=_REMOVALS[row.verdict][1])
        if row.verdict in _REMOVALS
        else row
        for row in ladder_rows(steps)
    )


def _row(position: int, step: Mapping[str, Any]) -> LadderRow:
    index = step.get("index")
    verdict, tone = verdict_word(step)
    seconds = step.get("device_seconds")
    why = str(step.get("why") or "")
    gate_why = str((step.get("gate") or {}).get("why") or "")
    return LadderRow(
        index=str(position if index is None else index),
        change=change_in_words(step.get("change") or {}),
        entry=str(step.get("entry") or NOTHING),
        treats=" ".join(map(str, step.get("treats") or ())) or NOTHING,
        predicted=ratio_in_words(step.get("predicted")),
        predicted_why=_predicted_why(step),
        error=_error(step.get("prediction_score")),
        measured=ratio_in_words(step.get("measured")),
        memory=_memory(step.get("memory_bytes")),
        gate=gate_in_words(step.get("gate")),
        verdict=verdict,
        why=why,
        gate_why="" if gate_why in why else gate_why,
        cost=NOTHING if seconds is None else duration_in_words(float(seconds)),
        kept=bool(step.get("kept")),
        tone=tone,
    )


def verdict_word(step: Mapping[str, Any]) -> tuple[str, Tone]:
    """``kept``, ``discarded``, or what became of a trial that has no figure (``out of memory``); and its tone."""
    outcome = step.get("outcome")
    if step.get("kept"):
        return "kept", "good"
    if outcome in _OUTCOMES:
        return _OUTCOMES[outcome], "bad"
    if outcome is None:
        return "not finished", "plain"
    if outcome != "finished":
        return str(outcome), "bad"
    gate = (step.get("gate") or {}).get("verdict")
    return "discarded", "bad" if gate in ("fail", "suspicious") else "doubtful"


def change_in_words(change: Mapping[str, Any]) -> str:
    """``fusion.compile=true``, as it is written on the command line; several leaves with spaces between them."""
    return " ".join(f"{leaf}={value_in_words(value)}" for leaf, value in change.items()) or NOTHING


def value_in_words(value: Any) -> str:
    """A leaf's value as TOML has it: ``true``, ``0.003``, ``bf16``; ``-`` for none."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_in_words, value))}]" if value else NOTHING
    return str(value)


def ratio_in_words(measured: Mapping[str, Any] | None) -> str:
    """``1.182x [1.165, 1.199]``; the interval is left out where there is none."""
    if not measured or measured.get("ratio") is None:
        return NOTHING
    low, high = measured.get("low"), measured.get("high")
    interval = "" if low is None or high is None else f" [{float(low):.3f}, {float(high):.3f}]"
    return f"{float(measured['ratio']):.3f}x{interval}"


def _memory(difference: float | None) -> str:
    if difference is None:
        return NOTHING
    if not difference:
        return "same"
    size, unit = (1e9, "GB") if abs(difference) >= 1e9 else (1e6, "MB")
    return f"{difference / size:+,.2f} {unit}"


def _predicted_why(step: Mapping[str, Any]) -> str:
    if step.get("no_prediction"):
        return f"not predicted: {step['no_prediction']}"
    return str((step.get("predicted") or {}).get("rule") or "")


def _error(score: Mapping[str, Any] | None) -> str:
    return NOTHING if not score or score.get("error") is None else percent_in_words(float(score["error"]))


def percent_in_words(share: float) -> str:
    """``23%``; what is more than tenfold as ``> 1000%``, which says as much."""
    return f"{share:.0%}" if share <= 10 else "> 1000%"


def gate_in_words(gate: Mapping[str, Any] | None) -> str:
    """``round-off: pass``; a dash where no gate was held."""
    if not gate or gate.get("verdict") is None:
        return NOTHING
    tier = gate.get("tier")
    return f"{tier}: {gate['verdict']}" if tier is not None else str(gate["verdict"])


def duration_in_words(seconds: float) -> str:
    """``0.8 s``, ``43 s``, ``4 min 10 s``, ``2 h 05 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def totals(document: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What the ladder cost and brought: (label, text), only what the document says."""
    found: list[tuple[str, str]] = []
    speed_up = ratio_in_words(document.get("speed_up"))
    if speed_up != NOTHING:
        found.append(("final against baseline", speed_up))
    gate = gate_in_words(document.get("final_gate"))
    if gate != NOTHING:
        found.append(("gate of the final configuration", gate))
    spent, budget = document.get("spent_s"), document.get("budget_s")
    if spent is not None:
        of_budget = "" if budget is None else f" of {duration_in_words(float(budget))}"
        found.append(("time spent", f"{duration_in_words(float(spent))}{of_budget}"))
    if document.get("device_seconds") is not None:
        found.append(("device time spent", device_hours_in_words(float(document["device_seconds"]))))
    score = prediction_in_words(document.get("prediction_score"))
    if score is not None:
        found.append(("predicted gains", score))
    return (*found, *_saved(document.get("saved") or {}))


def prediction_in_words(score: Mapping[str, Any] | None) -> str | None:
    """``median error 23%, 3 of 5 measured steps predicted, 1 within its trial's interval``; None where nothing was
    measured."""
    if not score or not score.get("measured"):
        return None
    counts = f"{score['predicted']} of {score['measured']} measured steps predicted"
    if score.get("median_error") is None:
        return counts
    words = f"median error {percent_in_words(float(score['median_error']))}, {counts}"
    words += f", {score['within_interval']} within the trial's interval"
    if score.get("ranged"):
        words += f"; {score['within_range']} of {score['ranged']} measured within the model's range"
    return words


def device_hours_in_words(seconds: float) -> str:
    """``0.213 device-hours``."""
    return f"{seconds / 3600:.3g} device-hours"


def _by_account(saved: Mapping[str, Any]) -> str | None:
    if saved.get("withheld"):
        return f"withheld: {saved['withheld']}"
    if saved.get("account_seconds_per_step") is None:
        return None
    words = f"{1000 * float(saved['account_seconds_per_step']):,.1f} ms"
    # Tunes of an earlier version have a chance in place of an interval.
    chance, deviation = saved.get("account_chance_seconds"), saved.get("deviation")
    words += "" if chance is None else f", by chance alone up to {1000 * float(chance):,.1f} ms off"
    if deviation is None:
        return words
    of_measured = f"{100 * float(deviation):+.1f}% of what was measured"
    if saved.get("deviation_low") is not None:
        low, high = (100 * float(saved[key]) for key in ("deviation_low", "deviation_high"))
        of_measured += (
            f" [{low:+.1f}%, {high:+.1f}%] in {saved['blocks']} blocks: {_AGREEMENT[saved['agreement']]}"
        )
    return f"{words} ({of_measured})"


_AGREEMENT = {"agree": "they agree", "differ": "they differ", "undecided": "too wide to tell"}


def _by_class(saved: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Classes that won or lost at least a hundredth of what was saved, the largest first."""
    intervals: Mapping[str, Sequence[float]] = saved.get("class_intervals") or {}
    classes: Mapping[str, float] = saved.get("classes") or {}
    least = abs(float(saved.get("seconds_per_step") or 0.0)) / 100
    ordered = sorted(intervals, key=lambda name: -abs(classes[name]))
    return [
        (
            f"saved in {name}",
            f"{1000 * classes[name]:+,.1f} ms [{1000 * intervals[name][0]:+,.1f}, {1000 * intervals[name][1]:+,.1f}]",
        )
        for name in ordered
        if abs(classes[name]) >= least
    ]


def _saved(saved: Mapping[str, Any]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if saved.get("seconds_per_step") is not None:
        found.append(("saved, each step", f"{1000 * float(saved['seconds_per_step']):,.1f} ms"))
    by_account = _by_account(saved)
    if by_account is not None:
        found.append(("the same by the account's classes", by_account))
    found += _by_class(saved)
    for key, label in (
        ("device_hours_per_run", "saved, the whole run"),
        ("device_hours_per_million_steps", "saved, a million steps"),
    ):
        if saved.get(key) is not None:
            found.append((label, device_hours_in_words(3600 * float(saved[key]))))
    return found
