"""Where steps wait for batches: the operation of building them that takes longest, by its name."""

from collections.abc import Iterator

from drivetrain.config.blend import transform_paths
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.remedies import remedies_for
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]

_CLASS = "data.loader"


def _detect(facts: Facts) -> Iterator[Finding]:
    waiting = facts.mean.classes.get(_CLASS, 0.0)
    if not facts.data_operations or not waiting:
        return
    whole = sum(facts.data_operations.values())
    name, seconds = max(facts.data_operations.items(), key=lambda item: item[1])
    share = seconds / whole if whole else 0.0
    cost = waiting * share
    remedies, none, _ = remedies_for(facts, [_CLASS], cost)
    parts = ", ".join(
        f"{other} {1e3 * time:.3g} ms"
        for other, time in sorted(facts.data_operations.items(), key=lambda item: -item[1])
    )
    yield Finding(
        rule="data_operations",
        kind="loss",
        subject=name,
        cause=_cause(facts, name),
        text="the slowest operation of building batches, for which steps wait",
        confidence="medium",
        cost_ns=cost,
        points=facts.points_of(cost),
        share=facts.share_of(cost),
        evidence=(
            Evidence(
                f"{share:.0%} of building a micro-batch: {parts}",
                "events of the run",
                {f"{other} s": time for other, time in facts.data_operations.items()},
                names=(name,),
            ),
            Evidence("its part of data.loader, as its share of building", "account"),
        ),
        remedies=remedies,
        no_remedy=none,
        part_of=_CLASS,
        unknown=facts.no_points,
    )


def _cause(facts: Facts, operation: str) -> str:
    data = None if facts.config is None else facts.config.data
    own = () if data is None else (*transform_paths(data.transform), *transform_paths(data.batch_transform))
    if operation in own:
        return "data.slow_transform"
    return "data.slow_collation" if operation == "collate" else "data.slow_read"


RULE = Rule(
    "data_operations",
    ("data.slow_transform", "data.slow_read", "data.slow_collation"),
    ("configuration",),
    _detect,
)
