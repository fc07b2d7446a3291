"""Consecutive memory-bound operators, each a kernel of its own, that one kernel could do in one pass."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.remedies import remedies_against
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]

_NAMED = 3


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    steps = facts.trace.num_steps or 1
    small = facts.trace.small
    cost = sum(one.kernel_ns for one in small) / steps
    if not cost:
        return
    remedies, none, _ = remedies_against(facts, "kernels.unfused_operators", cost)
    longest = sorted(small, key=lambda one: -one.kernel_ns)[:_NAMED]
    saved = sum(one.saved_bytes for one in small) / steps
    yield loss(
        facts,
        "unfused_operators",
        "kernels.unfused_operators",
        "small operators",
        cost,
        confidence="low",
        evidence=(
            Evidence(
                f"{sum(one.count for one in small) / steps:.3g} a step between two neighbours of their size, "
                f"{saved / 1e6:.3g} MB of traffic; longest: "
                + ", ".join(f"{one.operator} between {one.before} and {one.after}" for one in longest),
                facts.trace.source,
                {"operators_per_step": sum(one.count for one in small) / steps, "bytes_per_step": saved},
                names=tuple(dict.fromkeys(one.operator for one in longest)),
            ),
        ),
        remedies=remedies,
        no_remedy=none,
        part_of="compute",
    )


RULE = Rule("unfused_operators", ("kernels.unfused_operators",), ("trace", "device", "shapes"), _detect)
