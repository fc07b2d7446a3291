"""Functions that log or print, as a trace with Python functions has them, and the line that calls the longest."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    logging = facts.trace.logging
    cost = logging.ns_per_step
    if facts.missing("device") is None:
        # A device may work on meanwhile: what it stood still for is with the host's causes.
        cost = min(cost, facts.group_ns("host"))
    if not cost:
        return
    yield loss(
        facts,
        "log_frames",
        "host.logging",
        logging.place or logging.names[0],
        cost,
        confidence="medium",
        evidence=(
            Evidence(
                f"{logging.per_step:.3g} calls a step, {logging.ns_per_step / 1e6:.3f} ms: {', '.join(logging.names)}",
                facts.trace.source,
                {"calls_per_step": logging.per_step, "ms_per_step": logging.ns_per_step / 1e6},
                names=logging.names,
                place=logging.place,
            ),
        ),
        part_of="host",
    )


RULE = Rule("log_frames", ("host.logging",), ("trace", "Python functions"), _detect)
