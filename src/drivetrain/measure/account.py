"""Plain records of an account: where the wall time of a window went, by rank and step.

``docs/account.md`` says what each class is. The records hold integers of nanoseconds; a number that cannot be
trusted is None, and a finding in `Account.health` says why. `Account.to_document` is the form on disk and of
``drivetrain account --json``.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from drivetrain.measure.waterfall import Waterfall

__all__ = [
    "BUBBLE_CLASSES",
    "CLASSES",
    "CLASS_GROUPS",
    "COMMUNICATION_PARTS",
    "COMPUTE_CLASSES",
    "COPY_CLASSES",
    "HOST_CAUSES",
    "PARALLEL_GROUPS",
    "UNCLASSIFIED",
    "Account",
    "Collective",
    "CommunicationVerdict",
    "HealthFinding",
    "Loss",
    "RankAccount",
    "StepAccount",
    "Straggler",
    "View",
    "Window",
]

COMPUTE_CLASSES: tuple[str, ...] = (
    "compute.matmul",
    "compute.attention",
    "compute.norm",
    "compute.activation",
    "compute.elementwise",
    "compute.loss",
    "compute.optimizer",
    "compute.copy_cast",
    "compute.other",
    "recompute",
)
"""In the order in which they take time that several of them cover."""

PARALLEL_GROUPS: tuple[str, ...] = ("dp", "tp", "pp", "cp", "ep", "world", "unknown")
COMMUNICATION_PARTS: tuple[str, ...] = ("transfer", "wait", "unsplit")
"""Parts of a collective. Bytes that move take the time that another collective only waits in."""

COPY_CLASSES: tuple[str, ...] = (
    "copy.h2d",
    "copy.d2h",
    "copy.d2d",
    "copy.offload",
    "copy.memset",
    "copy.other",
)

UNCLASSIFIED = "unclassified"
"""Device work of which nothing says whether it computes or communicates."""

HOST_CAUSES: tuple[str, ...] = (
    "data.loader",
    "maintenance.checkpoint",
    "maintenance.evaluation",
    "maintenance.profiler",
    "maintenance.compile",
    "host.sync",
    "host.gc",
    "host.launch",
    "host.python",
)
"""Why a device (in the host view: every compute thread) had nothing to do, the most telling first."""

BUBBLE_CLASSES: tuple[str, ...] = ("bubble.warmup", "bubble.cooldown", "bubble.imbalance")

CLASSES: tuple[str, ...] = (
    *COMPUTE_CLASSES,
    *(f"communication.{group}.{part}" for part in COMMUNICATION_PARTS for group in PARALLEL_GROUPS),
    *COPY_CLASSES,
    UNCLASSIFIED,
    *BUBBLE_CLASSES,
    *HOST_CAUSES,
    "idle",
)
"""Every class of an account. `Window.unexplained_ns` comes on top."""

CLASS_GROUPS: tuple[str, ...] = (
    "compute",
    "recompute",
    "communication",
    "copy",
    "unclassified",
    "bubble",
    "data",
    "host",
    "maintenance",
    "idle",
)
"""First parts of the names of `CLASSES`."""

View = Literal["device", "host"]
"""Whether an account is of kernels on a device, or of operators on the host where there is no device record."""


class HealthFinding(Protocol):
    """What an account needs of a finding about its sources."""

    @property
    def id(self) -> str: ...
    @property
    def severity(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def affects(self) -> tuple[str, ...]: ...
    def to_document(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Window:
    """Where the time of one window of one rank went. All in ns; None: withheld.

    ``sum(classes.values()) + unexplained_ns == window_ns``, always. Sums over streams never occur: each figure
    is the length of a union of intervals, so none exceeds the window.
    """

    window_ns: int
    busy_ns: int | None
    """Compute, communication or copies, any of them."""
    idle_ns: int | None
    """The rest of the window, whatever its cause."""
    compute_ns: int | None
    """Union of computing kernels (host view: of leaf operators), recomputation included."""
    communication_ns: int | None
    """Union of communication, waiting included."""
    overlapped_communication_ns: int | None
    """Communication while something computes: it costs no wall time."""
    exposed_communication_ns: int | None
    """Communication while nothing computes."""
    copy_ns: int | None
    """Union of copies and memory sets."""
    exposed_copy_ns: int | None
    """Copies while nothing computes or communicates."""
    classes: Mapping[str, int]
    """Disjoint split of the window; classes without time are left out."""
    unexplained_ns: int
    """Time about which the records are missing, clipped or contradictory."""
    hidden_communication_ns: Mapping[str, int] | None = None
    """Parallel group → its communication while something computes, as a union; groups whose collectives run at the same
    time add up to more than `overlapped_communication_ns`. Groups that hide nothing are left out. None: withheld, or
    not told. No part of the document, which has the sum."""

    def __post_init__(self) -> None:
        shared = sum(self.classes.values()) + self.unexplained_ns
        assert shared == self.window_ns, f"classes add up to {shared} of {self.window_ns} ns"
        assert self.unexplained_ns >= 0
        assert all(value > 0 and name in _KNOWN for name, value in self.classes.items()), self.classes
        assert self.busy_ns is None or self.busy_ns <= self.window_ns

    def group_ns(self, group: str) -> int:
        """Time of all classes whose name starts with `group` (``communication``, ``host``)."""
        return sum(ns for name, ns in self.classes.items() if name == group or name.startswith(f"{group}."))

    def to_document(self) -> dict[str, Any]:
        """The window as the JSON of an account holds it."""
        return {
            "window_ns": self.window_ns,
            "busy_ns": self.busy_ns,
            "idle_ns": self.idle_ns,
            "compute_ns": self.compute_ns,
            "communication_ns": self.communication_ns,
            "overlapped_communication_ns": self.overlapped_communication_ns,
            "exposed_communication_ns": self.exposed_communication_ns,
            "copy_ns": self.copy_ns,
            "exposed_copy_ns": self.exposed_copy_ns,
            "classes": dict(self.classes),
            "unexplained_ns": self.unexplained_ns,
        }


_KNOWN = frozenset(CLASSES)


@dataclass(frozen=True)
class StepAccount:
    """One step of one rank."""

    step: int
    """Number in the trace (``ProfilerStep#7``), or counted from 0 where steps were inferred."""
    window: Window
    start_ns: int
    """Absolute start of the window on the rank's own clock."""
    end_ns: int
    first: bool
    """First recorded step: records at its start may be missing, and the profiler was just starting."""


@dataclass(frozen=True)
class RankAccount:
    """One rank."""

    rank: int
    view: View
    whole: Window
    """Device view: from the first device record to the end of the last. Host view: the recorded steps, or
    without steps everything that was recorded."""
    steps: tuple[StepAccount, ...]
    source: str = ""
    """File it was made from."""

    @property
    def steady_steps(self) -> tuple[StepAccount, ...]:
        """Steps whose time is worth a mean: all but the first recorded one, if there are others."""
        return tuple(step for step in self.steps if not step.first) or self.steps

    def to_document(self) -> dict[str, Any]:
        """The rank as the JSON of an account holds it."""
        return {
            "rank": self.rank,
            "whole": self.whole.to_document(),
            "steps": [{"step": step.step, **step.window.to_document()} for step in self.steps],
        }


@dataclass(frozen=True)
class Collective:
    """One collective that was found on all the ranks given of its group. Times in ns, clocks aligned."""

    index: int
    """Position among all matched collectives, by the time the last rank arrived."""
    group: str
    """``dp``, ``tp``, …; ``unknown``."""
    kind: str
    """``all_reduce``, ``all_gather``, …"""
    bytes: int | None
    """Payload this rank put in (the largest of the ranks); None where unknown."""
    last_rank: int
    """The rank that arrived last: the others waited for it."""
    start_skew_ns: int
    """Last start minus first start."""
    end_skew_ns: int
    """Last end minus first end: what is left of the clocks' difference, and real differences."""
    transfer_ns: int
    """First end minus last start: the part in which all ranks took part, at least 0."""
    wait_ns: Mapping[int, int]
    """Rank → last start minus its own start."""
    step: int | None = None
    bus_bandwidth: float | None = None
    """Bytes per second over the busiest link, as nccl-tests count it; None: bytes unknown, or no transfer."""

    def to_document(self) -> dict[str, Any]:
        """The collective as the JSON of an account holds it."""
        return {
            "index": self.index,
            "group": self.group,
            "kind": self.kind,
            "bytes": self.bytes,
            "last_rank": self.last_rank,
            "start_skew_ns": self.start_skew_ns,
            "end_skew_ns": self.end_skew_ns,
            "transfer_ns": self.transfer_ns,
            "wait_ns": {str(rank): ns for rank, ns in self.wait_ns.items()},
        }


@dataclass(frozen=True)
class Straggler:
    """How much one rank's late arrivals cost the others."""

    rank: int
    times_last: int
    """Collectives at which it arrived last, of `collectives`."""
    collectives: int
    cost_ns_per_step: float
    """Exposed waiting for it, in ns a step: mean over the other ranks, no instant counted twice."""


Loss = Literal["slow_rank", "late_rank", "slow_link"]
"""Why time is lost in a group's communication: one rank computes longer than its peers, one rank arrives late without
computing longer, or bytes move slower than they do elsewhere or at other times."""


@dataclass(frozen=True)
class CommunicationVerdict:
    """Whether one group loses time to a late rank or to a slow link, in collectives of one kind.

    Times are ns a step that nothing covered, mean over the ranks concerned. ``docs/account.md`` has the thresholds.
    """

    group: str
    kind: str
    """Of a collective; ``send``: messages from the first of `ranks` to the second."""
    ranks: tuple[int, ...]
    """Those of the group that were recorded."""
    occurrences: int
    losses: tuple[Loss, ...]
    """Empty: no rank and no link stands out."""
    late_rank: int | None
    """The rank that the others waited longest for; None: nobody waited, or waiting is not a rank's lateness."""
    late_ns_per_step: float
    """Waiting for it."""
    compute_excess_ns_per_step: float | None
    """How much longer it computed than the median of the others before it arrived last; None: unknown."""
    transfer_ns_per_step: float
    excess_transfer_ns_per_step: float | None
    """Transfer above what the reference takes; None: no reference."""
    bus_bandwidth: float | None
    """Bytes/s, median over the transfers that were compared, else over all; None: bytes unknown."""
    reference_bandwidth: float | None
    """Bytes/s of the same payload elsewhere, or at its best."""
    reference: Literal["other_groups", "own_best"] | None
    reason: str | None = None
    """Why a question is left open; None: both are answered."""

    def to_document(self) -> dict[str, Any]:
        """The verdict as the JSON of an account holds it."""
        return {**asdict(self), "ranks": list(self.ranks), "losses": list(self.losses)}


@dataclass(frozen=True)
class Account:
    """The account of the traces of one job."""

    health: tuple[HealthFinding, ...]
    ranks: tuple[RankAccount, ...]
    collectives: tuple[Collective, ...] = ()
    clock_residual_ns: int | None = None
    """How far apart the ranks' ends of one collective typically are (median) after clocks were aligned; None:
    one rank, or nothing to align by."""
    waterfall: Waterfall | None = None
    stragglers: tuple[Straggler, ...] = ()
    """Ranks that were last at least once, the costliest first."""
    verdicts: tuple[CommunicationVerdict, ...] = ()
    """Late ranks and slow links, by group and kind; those that lose time first."""
    clock_offsets_ns: Mapping[int, int] = field(default_factory=dict)
    """Rank → what was added to its times to bring them onto the clock of the first rank."""
    absent_ranks: tuple[int, ...] = ()
    """Ranks of the job of which there is no trace."""
    world_size: int | None = None
    name_table: str = ""
    """Version and digest of the tables that classed the names: accounts with the same text compare by name."""

    @property
    def bus_bandwidths(self) -> Mapping[tuple[str, str], float]:
        """(group, kind) → bus bandwidth in bytes/s: bytes on the wire of all such collectives over their time."""
        sums: dict[tuple[str, str], tuple[float, int]] = {}
        for collective in self.collectives:
            if collective.bus_bandwidth is not None:
                key = (collective.group, collective.kind)
                wire, time = sums.get(key, (0.0, 0))
                moved = collective.bus_bandwidth * collective.transfer_ns
                sums[key] = (wire + moved, time + collective.transfer_ns)
        return {key: wire / time for key, (wire, time) in sums.items()}

    def to_document(self) -> dict[str, Any]:
        """What ``drivetrain account --json`` prints."""
        return {
            "health": [finding.to_document() for finding in self.health],
            "ranks": [rank.to_document() for rank in self.ranks],
            "collectives": [collective.to_document() for collective in self.collectives],
            "clock_residual_ns": self.clock_residual_ns,
            "waterfall": None if self.waterfall is None else self.waterfall.to_document(),
            "verdicts": [verdict.to_document() for verdict in self.verdicts],
        }
