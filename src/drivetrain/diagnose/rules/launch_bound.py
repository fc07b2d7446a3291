"""A device that has run dry and waits until its next piece of work is launched."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.remedies import remedies_against
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    launches = facts.trace.launches
    # Waiting for a batch, or for the collector, ends with a launch, too: what has another cause is not counted here.
    cost = min(launches.ns_per_step, facts.group_ns("host.launch") + facts.group_ns("host.python"))
    if not cost:
        return
    remedies, none, _ = remedies_against(facts, "host.launch_bound", cost)
    yield loss(
        facts,
        "launch_bound",
        "host.launch_bound",
        "launches",
        cost,
        evidence=(
            Evidence(
                f"{launches.per_step:.3g} stretches a step in which the device waited for launches, "
                f"{launches.ns_per_step / 1e6:.3f} ms together, longest for "
                f"{', '.join(launches.names) or 'unnamed calls'}",
                facts.trace.source,
                {"waiting_ms": launches.ns_per_step / 1e6, "stretches": launches.per_step},
                names=launches.names,
            ),
        ),
        remedies=remedies,
        no_remedy=none,
        part_of="host",
    )


RULE = Rule("launch_bound", ("host.launch_bound",), ("trace", "device"), _detect)
