"""Steps that are longer because Python's garbage collector ran in them, by the tags of the logged steps."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss_beside_steps
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]


def _detect(facts: Facts) -> Iterator[Finding]:
    figures = facts.figures
    assert figures is not None
    spent = figures.excess_s.get("gc", {})
    if not spent or not figures.logged_steps:
        return
    yield loss_beside_steps(
        facts,
        "collector_steps",
        "host.garbage_collection",
        "garbage collection",
        1e9 * sum(spent.values()) / figures.logged_steps,
        evidence=(
            Evidence(
                f"{len(spent)} of {figures.logged_steps} logged steps were tagged gc and nothing else, "
                f"{sum(spent.values()):.3g} s above the median steady one together",
                "logged steps",
                {"excess_s": sum(spent.values()), "steps": len(spent)},
                steps=tuple(spent),
            ),
        ),
        class_name="host.gc",
    )


RULE = Rule("collector_steps", ("host.garbage_collection",), ("logged steps",), _detect)
