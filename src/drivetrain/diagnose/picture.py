"""What is shown of a diagnosis beside its findings: where the points went, what to do next, the three charts."""

from dataclasses import dataclass
from typing import Any

from drivetrain.diagnose.charts import Charts, charts_of
from drivetrain.diagnose.diagnosis import Diagnosis
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.next_step import NextStep, next_step
from drivetrain.measure.waterfall import Waterfall

__all__ = ["Picture", "picture_of"]


@dataclass(frozen=True)
class Picture:
    """A diagnosis with what belongs beside it."""

    diagnosis: Diagnosis
    next_step: NextStep
    charts: Charts
    waterfall: Waterfall | None
    """None: the window has no length."""

    def to_document(self) -> dict[str, Any]:
        """What ``drivetrain diagnose --json`` prints."""
        return {
            **self.diagnosis.to_document(),
            "next": self.next_step.to_document(),
            "charts": self.charts.to_document(),
        }


def picture_of(facts: Facts, diagnosis: Diagnosis) -> Picture:
    """The picture of a diagnosis of the same facts."""
    return Picture(diagnosis, next_step(facts, diagnosis), charts_of(facts), facts.account.waterfall)
