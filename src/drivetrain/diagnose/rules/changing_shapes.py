"""Products with weights whose shapes change from step to step: a short last batch, or lengths that vary."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    shapes = facts.trace.shapes
    if shapes is None or not shapes.odd:
        return
    short = len(shapes.odd) == 1 and shapes.less
    compiled = "compile" in facts.in_use or (facts.config is not None and facts.config.fusion.compile)
    yield loss(
        facts,
        "changing_shapes",
        "shapes.short_last_batch" if short else "shapes.dynamic",
        f"step {shapes.odd[0]}" if short else f"{len(shapes.odd)} of {len(shapes.steps)} steps",
        None,
        why_unknown="what equal shapes would have taken was not measured",
        # Code that was compiled for one shape is compiled again for others, or for any; operators take what comes.
        kind="setting" if compiled else "loss",
        confidence="medium",
        evidence=(
            Evidence(
                f"{shapes.example}; shapes of {len(shapes.odd)} of {len(shapes.steps)} steps are not the usual ones",
                facts.trace.source,
                {"odd_steps": len(shapes.odd), "steps": len(shapes.steps)},
                steps=shapes.odd,
            ),
        ),
    )


RULE = Rule(
    "changing_shapes", ("shapes.short_last_batch", "shapes.dynamic"), ("trace", "steps", "shapes"), _detect
)
