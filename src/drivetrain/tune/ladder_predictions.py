"""What models of time expect of a ladder's changes, before they are tried, and how that is written down."""

from pathlib import Path
from typing import Any

from drivetrain.archive.reader import open_run
from drivetrain.catalogue import Optimisation
from drivetrain.catalogue.time_models import TimeFacts
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.diagnose.time_facts import time_facts_of
from drivetrain.errors import DrivetrainError
from drivetrain.measure.optimisation import NoPrediction, Prediction
from drivetrain.tune.candidates import account_of
from drivetrain.tune.ladder_records import Rung
from drivetrain.tune.prediction_score import score_of_step

__all__ = ["Predictions", "write_prediction", "write_score"]


class Predictions:
    """Predicts changes of a ladder's configurations, from the profile of each.

    Args:
        launch: how their runs are started.
    """

    def __init__(self, launch: LaunchFacts) -> None:
        self._launch = launch
        self._facts: dict[str, TimeFacts | str] = {}

    def of_entry(self, rung: Rung, entry: Optimisation, after: RunConfig) -> Prediction | NoPrediction:
        """What is expected of ``after``, a change of ``rung`` by ``entry`` (its move, or a value of its knob)."""
        if entry.time_model is None:
            return entry.expects(None, after)
        facts = self.facts_of(rung)
        return NoPrediction(facts) if isinstance(facts, str) else entry.expects(facts, after)

    def facts_of(self, rung: Rung) -> TimeFacts | str:
        """Facts of a profiled configuration, or why there are none. Read once."""
        run = rung.profile.run
        if run not in self._facts:
            self._facts[run] = self._read(rung)
        return self._facts[run]

    def _read(self, rung: Rung) -> TimeFacts | str:
        try:
            account = account_of(Path(rung.profile.run))
            if account is None:
                return "the profile has no account"
            run = open_run(Path(rung.profile.run))
            return time_facts_of(run, account, rung.config, self._launch)
        except DrivetrainError as error:
            return f"the profile cannot be read: {error}"


def write_prediction(step: dict[str, Any], found: Prediction | NoPrediction) -> None:
    """Lay a prediction, or why there is none, over a step of a tune's document."""
    if isinstance(found, NoPrediction):
        step["predicted"], step["no_prediction"] = None, found.why
        return
    step["predicted"] = {
        "ratio": found.ratio,
        "low": found.low,
        "high": found.high,
        "rule": found.rule,
        "of": found.of,
    }
    step["no_prediction"] = None


def write_score(step: dict[str, Any], goal: str = "tokens_per_second") -> None:
    """Lay over a step how far its prediction was from its trial, which is of ``goal``."""
    step["prediction_score"] = score_of_step(step, goal)
