"""What collectives cost a run, step by step: from flights to metrics, to lines of a rank's file, to the summary."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drivetrain.engine.parallel.clocks import Alignment
from drivetrain.engine.parallel.flights import GLOO_LANES, Flight, Flights
from drivetrain.engine.timing import Mark
from drivetrain.measure.overlap import FlightRecord, KindOverlap, StepOverlap, overlap_of, rows_of

__all__ = ["Communication", "Taken", "metrics_of", "why_unseen"]

COMMUNICATION_RULE = (
    "mean of this segment's steady steps on rank 0, without a profiler. wire: a collective of the group under way; "
    "exposed: of that, the training thread stood waiting; hidden: the rest; idle: nothing of the "
    "group under way, and the thread not waiting; backward: the last micro-batch's"
)


@dataclass(frozen=True)
class Taken:
    """The flights of one step, some of which may still be under way."""

    flights: Sequence[Flight]
    backward: tuple[int, int] | None
    dropped: int


def why_unseen(device_type: str, *, pipeline: int, zero_stage: int, replicas: int) -> str | None:
    """Why it is not known how long this rank waits for others; None where it is.

    Args:
        device_type: where the tensors are.
        pipeline, replicas: ranks along ``pp`` and ``dp_replicate``.
    """
    if device_type != "cpu":
        return (
            f"collectives of tensors on {device_type} run on streams of their own, whose times no event of this "
            "program marks"
        )
    if pipeline > 1:
        return "torch's pipeline schedules wait for their messages themselves"
    if zero_stage == 3 and replicas > 1:
        return "FSDP2 sums gradients over replicas itself, and waits for that"
    return None


class Communication:
    """Follows the collectives of a run.

    Attributes:
        unseen: why waits are not known in full; None: they are.
        clock: this rank's against rank 0's, where lines of a rank's file are asked for.
    """

    def __init__(self, flights: Flights | None, unseen: str | None = None) -> None:
        """``flights`` is None where there are none: one process, or tensors on another device than the CPU."""
        self._flights = flights
        self.unseen = unseen
        self._steady = StepOverlap()
        self._too_many = 0
        self._told: set[str] = set()
        self.clock: Alignment | None = None

    def take(self) -> Taken | None:
        """The flights of the step that ends now."""
        if self._flights is None:
            return None
        flights, backward = self._flights.take()
        return Taken(flights, backward, self._flights.take_dropped())

    def overlap(self, taken: Taken | None, started: Mark, ended: Mark) -> StepOverlap | None:
        """What the collectives cost that step. None: there are none, or so many that some were not kept."""
        if taken is None or not isinstance(started, float) or not isinstance(ended, float):
            return None
        if taken.dropped:
            self._too_many += 1
            return None
        return overlap_of(
            [flight.record() for flight in taken.flights],
            (round(started * 1e9), round(ended * 1e9)),
            lanes=GLOO_LANES,
            backward=taken.backward,
        )

    def add_steady(self, overlap: StepOverlap) -> None:
        """A step of steady state, for the summary."""
        self._steady += overlap

    def line_of(self, taken: Taken | None) -> Mapping[str, Any] | None:
        """The flights of a step as this rank's file keeps them. The ranks of a group are named once."""
        if taken is None or self._flights is None or self.clock is None:
            return None
        records: list[FlightRecord] = [flight.record() for flight in taken.flights]
        used = {record.queue for record in records}
        new = {name: list(self._flights.members[name]) for name in sorted(used - self._told)}
        self._told |= new.keys()
        clock = {**asdict(self.clock), "host": socket.gethostname()}
        return {"clock": clock, "lanes": GLOO_LANES, "queues": new, "flights": rows_of(records)}

    def to_document(self) -> tuple[dict[str, Any] | None, str | None]:
        """The ``communication`` of a summary, and why there is none or what is missing in it."""
        steady = self._steady
        if self._flights is None:
            return None, self.unseen or "one process: nothing to communicate"
        if not steady.steps:
            if self._too_many:
                return None, "no step's collectives were few enough to keep the times of them all"
            return None, "no step of steady state"
        known = self.unseen is None
        per_step = 1e-9 / steady.steps
        groups: dict[str, dict[str, Any]] = {}
        for name, group in steady.groups.items():
            groups[name] = {
                "calls": group.calls / steady.steps,
                "bytes": group.bytes / steady.steps,
                "wire_s": group.wire_ns * per_step,
                "hidden_s": group.hidden_ns * per_step if known else None,
                "exposed_s": group.exposed_ns * per_step,
                "idle_s": group.idle_ns * per_step if known else None,
                "backward_idle_s": group.backward_idle_ns * per_step if known else None,
                "kinds": {kind: _kind_document(one, steady.steps) for kind, one in group.kinds.items()},
            }
        document = {
            "steps": steady.steps,
            "step_s": steady.window_ns * per_step,
            "backward_s": steady.backward_ns * per_step,
            "wire_s": steady.wire_ns * per_step,
            "hidden_s": steady.hidden_ns * per_step if known else None,
            "exposed_s": steady.exposed_ns * per_step if known else None,
            "overlap_frac": steady.overlap_frac if known else None,
            "exposed_frac": steady.exposed_frac if known else None,
            "inexact_calls": steady.inexact / steady.steps,
            "groups": groups,
            "rule": COMMUNICATION_RULE,
        }
        return document, self.unseen


def _kind_document(kind: KindOverlap, steps: int) -> dict[str, float | None]:
    line = kind.line.fit()
    return {
        "calls": kind.calls / steps,
        "bytes": kind.bytes / steps,
        "wire_s": kind.wire_ns * 1e-9 / steps,
        "exposed_s": kind.exposed_ns * 1e-9 / steps,
        "fixed_s_per_call": None if line is None else line[0] * 1e-9,
        "bytes_per_s": None if line is None else 1e9 / line[1],
    }


def metrics_of(overlap: StepOverlap, unseen: str | None) -> dict[str, float | None]:
    """Metrics of one step, or means of several; without what is not known in full."""
    found: dict[str, float | None] = {}
    if not overlap.steps:
        return found
    per_step = 1e-9 / overlap.steps
    if unseen is None:
        found["time/comm_exposed_s"] = overlap.exposed_ns * per_step
        found["time/comm_exposed_frac"] = overlap.exposed_frac
        found["time/comm_overlap_frac"] = overlap.overlap_frac
    for name, group in overlap.groups.items():
        found[f"comm/{name}_wire_s"] = group.wire_ns * per_step
        found[f"comm/{name}_exposed_s"] = group.exposed_ns * per_step
        if unseen is None:
            found[f"comm/{name}_hidden_s"] = group.hidden_ns * per_step
    return found
