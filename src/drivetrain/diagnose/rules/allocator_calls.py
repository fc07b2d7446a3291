"""An allocator that asks the device for memory, or gives it back, in steps that should need nothing new."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    calls = facts.trace.allocating
    # A device that has work left computes on meanwhile: what it stood still for is with the host's causes.
    cost = min(calls.ns_per_step, facts.group_ns("host"))
    if not cost:
        return
    means = {} if facts.figures is None else facts.figures.means
    held, used = (means.get(f"memory/{kind}_peak_bytes") for kind in ("reserved", "allocated"))
    evidence = [
        Evidence(
            f"{calls.per_step:.3g} calls a step after the first, {calls.ns_per_step / 1e6:.3f} ms: "
            f"{', '.join(calls.names)}",
            facts.trace.source,
            {"calls_per_step": calls.per_step, "ms_per_step": calls.ns_per_step / 1e6},
            names=calls.names,
        )
    ]
    if held is not None and used is not None:
        evidence.append(
            Evidence(
                f"the allocator holds {held / 1e9:.3g} GB for {used / 1e9:.3g} GB of tensors",
                "logged steps",
                {"reserved_bytes": held, "allocated_bytes": used},
            )
        )
    yield loss(
        facts,
        "allocator_calls",
        "memory.fragmentation",
        "allocation in steady steps",
        cost,
        confidence="medium",
        evidence=tuple(evidence),
        part_of="host",
    )


RULE = Rule("allocator_calls", ("memory.fragmentation",), ("trace", "device", "steps"), _detect)
