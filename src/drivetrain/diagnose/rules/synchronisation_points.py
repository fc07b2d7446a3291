"""Lines of code that make the host wait for the device."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]


def _detect(facts: Facts) -> Iterator[Finding]:
    waits = facts.waits
    if waits is None or not waits.has_device:
        return  # Without a device nothing stands still.
    if any(not {"idle_ns", "busy_ns"}.isdisjoint(finding.affects) for finding in facts.account.health):
        return  # When the device stood still is not known.
    steps = waits.num_steps or 1
    for point in waits.points:
        cost = point.device_ns / steps
        called = " > ".join((*point.operators, point.call))
        often = (
            f"{point.calls / steps:.1f} a step over {steps} steps"
            if waits.num_steps
            else f"{point.calls} in the trace"
        )
        inside = f", in {point.range}" if point.range is not None else ""
        host = f"{point.waited_ns / steps / 1e6:.3f} ms of host time"
        evidence = [
            Evidence(
                f"{called}{inside}: {often}, {host}",
                facts.waits_source,
                {"calls_per_step": point.calls / steps, "host_ms_per_step": point.waited_ns / steps / 1e6},
                names=(*point.operators, point.call),
                place=point.frame,
            )
        ]
        if waits.hint is not None:
            evidence.append(Evidence(waits.hint, "hint"))
        yield Finding(
            rule="synchronisation_points",
            kind="loss",
            subject=point.frame or called,
            cause="host.synchronisation_point",
            text="the host waits for the device here, which stands still after it"
            + (" (below this frame, on another thread)" if point.frame_is_callers else ""),
            cost_ns=cost,
            points=facts.points_of(cost),
            share=facts.share_of(cost),
            evidence=tuple(evidence),
            no_remedy="no entry of the catalogue treats it",
            part_of="host",
            unknown=facts.no_points,
        )


RULE = Rule("synchronisation_points", ("host.synchronisation_point",), ("device",), _detect)
