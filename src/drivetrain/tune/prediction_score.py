"""How far predictions were from what trials measured: of a step, of a tune, and of all tunes of a folder by entry.

A prediction is of the time that a change saves. With a ratio r of step times (for as many tokens), parent over
candidate, the change saves the share ``1 - 1/r`` of the parent's step. The error of a prediction p against the measured
ratio m is

    |(1 - 1/p) - (1 - 1/m)| / max(|1 - 1/m|, 1 - 1/(1 + least effect))

relative to the measured share, and never to less than the least effect that counted in that trial: below it the
measured share is noise, and a division by it would be, too.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drivetrain.archive.tunes import list_tunes, open_tune
from drivetrain.errors import RunError

__all__ = [
    "ERROR_RULE",
    "Score",
    "ScoredFolder",
    "goal_of",
    "score_folder",
    "score_of_step",
    "score_of_steps",
]

ERROR_RULE = (
    "saved share of the parent's step, predicted less measured, over the measured one (over the trial's least effect "
    "where that is larger); of steps that were predicted and measured"
)
_SPEED = "tokens_per_second"
_DEFAULT_LEAST_EFFECT = 0.01
"""Of documents that do not say: the least there is."""


def score_of_step(step: Mapping[str, Any], goal: str = _SPEED) -> dict[str, Any] | None:
    """Prediction and measurement of one step of a tune's document, compared.

    Args:
        goal: what its trial measured. Of another goal than speed, a step may have its ``speed`` beside.

    Returns:
        ``error``; ``within_interval``, whether the predicted ratio lies in the trial's interval; ``within_range``,
        whether the measured ratio lies in the model's own range (None: the model has none). None where one of the two
        is missing, or where they are of different figures.
    """
    predicted = step.get("predicted")
    if not predicted or not predicted.get("ratio"):
        return None
    measured = _measured(step, predicted.get("of", _SPEED), goal)
    if not measured or not measured.get("ratio"):
        return None
    least = step.get("least_effect")
    return {
        "error": _error(
            float(predicted["ratio"]),
            float(measured["ratio"]),
            _DEFAULT_LEAST_EFFECT if least is None else float(least),
        ),
        "within_interval": _within(predicted["ratio"], measured.get("low"), measured.get("high")),
        "within_range": _within(measured["ratio"], predicted.get("low"), predicted.get("high")),
    }


def _measured(step: Mapping[str, Any], of: str, goal: str) -> Mapping[str, Any] | None:
    """The measured ratio of what was predicted; None where the trial measured something else."""
    found: Mapping[str, Any] | None = step.get("measured") if of == goal else None
    if found is None and of == _SPEED:
        found = step.get("speed")
    return found


def _error(predicted: float, measured: float, least_effect: float) -> float:
    saved, expected = 1 - 1 / measured, 1 - 1 / predicted
    return abs(expected - saved) / max(abs(saved), 1 - 1 / (1 + least_effect))


def _within(value: float, low: float | None, high: float | None) -> bool | None:
    return None if low is None or high is None else low <= value <= high


@dataclass(frozen=True)
class Score:
    """Predictions of some steps against their trials.

    Attributes:
        measured: steps with a measured ratio.
        predicted: of those, the ones that were predicted.
        median_error: over the predicted ones; None without any.
        within_interval: of the predicted ones, those whose prediction lies in the trial's interval.
        within_range: of ``ranged``, those whose measurement lies in the model's range.
        ranged: of the predicted ones, those whose model has a range.
    """

    measured: int
    predicted: int
    median_error: float | None
    within_interval: int
    within_range: int
    ranged: int

    def to_document(self) -> dict[str, Any]:
        """As documents hold it."""
        return {
            "measured": self.measured,
            "predicted": self.predicted,
            "median_error": self.median_error,
            "within_interval": self.within_interval,
            "within_range": self.within_range,
            "ranged": self.ranged,
            "rule": ERROR_RULE,
        }


def score_of_steps(steps: Iterable[Mapping[str, Any]], goal: str = _SPEED) -> Score:
    """All predictions of some steps of tunes' documents.

    Args:
        goal: what their trials measured.
    """
    return _score([(step, goal) for step in steps])


def _score(steps: Iterable[tuple[Mapping[str, Any], str]]) -> Score:
    measured = [(step, goal) for step, goal in steps if (step.get("measured") or {}).get("ratio")]
    scores = [score for step, goal in measured if (score := score_of_step(step, goal)) is not None]
    ranged = [score["within_range"] for score in scores if score["within_range"] is not None]
    return Score(
        measured=len(measured),
        predicted=len(scores),
        median_error=statistics.median(score["error"] for score in scores) if scores else None,
        within_interval=sum(bool(score["within_interval"]) for score in scores),
        within_range=sum(ranged),
        ranged=len(ranged),
    )


_Steps = Mapping[str, Sequence[tuple[Mapping[str, Any], str]]]


@dataclass(frozen=True)
class ScoredFolder:
    """The tunes of a folder.

    Attributes:
        tunes: how many were read.
        steps: name of an entry, or ``entry:move`` → its steps, each with the goal of its tune.
        passed_over: why a tune could not be read.
    """

    tunes: int
    steps: _Steps
    passed_over: tuple[str, ...]

    @property
    def whole(self) -> Score:
        """All steps."""
        return _score([one for those in self.steps.values() for one in those])

    @property
    def entries(self) -> Mapping[str, Score]:
        """Name → its steps."""
        return {name: _score(those) for name, those in sorted(self.steps.items())}

    def of_entry(self, name: str) -> "ScoredFolder":
        """The steps of one entry, its moves among them."""
        return replace(
            self, steps={key: those for key, those in self.steps.items() if key.partition(":")[0] == name}
        )

    def to_document(self) -> dict[str, Any]:
        """As ``catalogue --scores --json`` prints it."""
        return {
            "tunes": self.tunes,
            "score": self.whole.to_document(),
            "entries": {name: score.to_document() for name, score in self.entries.items()},
            "passed_over": list(self.passed_over),
        }


def goal_of(document: Mapping[str, Any]) -> str:
    """What the trials of a tune's document measured; tokens/s where it does not say, as it was before there was any
    other goal."""
    goal = (document.get("settings") or {}).get("goal")
    return str(goal["name"]) if isinstance(goal, Mapping) and "name" in goal else _SPEED


def score_folder(folder: Path | str) -> ScoredFolder:
    """Predictions of all tunes of a folder, by entry.

    Raises:
        RunError: it holds no tunes.
    """
    paths = list_tunes(folder)
    if not paths:
        raise RunError(f"{folder} holds no tunes; a tune is made with: drivetrain tune CONFIG")
    steps: dict[str, list[tuple[Mapping[str, Any], str]]] = {}
    passed_over: list[str] = []
    for path in paths:
        try:
            document = open_tune(path).document
        except RunError as error:
            passed_over.append(str(error))
            continue
        goal = goal_of(document)
        for step in document["steps"]:
            name = str(step.get("entry") or "?")
            key = f"{name}:{step['move']}" if step.get("move") else name
            steps.setdefault(key, []).append((step, goal))
    return ScoredFolder(len(paths) - len(passed_over), steps, tuple(passed_over))
