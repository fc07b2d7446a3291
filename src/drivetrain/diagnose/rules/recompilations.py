"""Code that was compiled again during training, with the line and the guard that failed."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss_beside_steps
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]


def _detect(facts: Facts) -> Iterator[Finding]:
    figures = facts.figures
    assert figures is not None
    spent = figures.excess_s.get("compile", {})
    if not figures.recompilations or not figures.logged_steps:
        return
    cost = 1e9 * sum(spent.values()) / figures.logged_steps
    again = sum(int(one["count"]) for one in figures.recompilations)
    evidence = [
        Evidence(
            f"{one['function']}: {one['why']} ({one['count']} times)",
            "compilation events of the run",
            {"count": float(one["count"])},
            names=(str(one["function"]),),
            place=str(one["place"]),
        )
        for one in figures.recompilations
    ]
    evidence.append(
        Evidence(
            f"{again} compilations; {sum(spent.values()):.3g} s above the median steady step in {len(spent)} of "
            f"{figures.logged_steps} logged steps",
            "logged steps",
            {"excess_s": sum(spent.values())},
            steps=tuple(spent),
        )
    )
    yield loss_beside_steps(
        facts,
        "recompilations",
        "shapes.recompilation",
        str(figures.recompilations[0]["place"]),
        cost,
        evidence=tuple(evidence),
        class_name="maintenance.compile",
    )


RULE = Rule("recompilations", ("shapes.recompilation",), ("logged steps",), _detect)
