"""Lines of code at which a compiled graph ends, although nobody meant it to."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.figures is not None
    for one in facts.figures.graph_breaks:
        yield loss(
            facts,
            "graph_breaks",
            "kernels.graph_break",
            str(one["place"]),
            None,
            why_unknown="what the whole graph would have taken was not measured",
            # Whole graphs were asked for: behind losses of a thousandth of a step nobody would see that there are none.
            kind="setting",
            evidence=(
                Evidence(
                    f"{one['why']} ({one['count']} times)",
                    "compilation events of the run",
                    {"count": float(one["count"])},
                    place=str(one["place"]),
                ),
            ),
        )


RULE = Rule("graph_breaks", ("kernels.graph_break",), ("run",), _detect)
