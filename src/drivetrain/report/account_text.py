"""An account for a terminal: health, waterfall, classes by rank, who waited for whom."""

from collections.abc import Iterator, Sequence

from drivetrain.measure.account import CLASSES, Account, CommunicationVerdict
from drivetrain.report.waterfall import waterfall_text

__all__ = ["account_text"]

_MOST_RANKS = 8
_MOST_FINDINGS = 12


def account_text(account: Account, title: str) -> str:
    """The whole text."""
    lines = [title, ""]
    lines.extend(_health(account))
    if account.waterfall is not None:
        lines += [waterfall_text(account.waterfall), ""]
    lines.extend(_classes(account))
    lines.extend(_ranks(account))
    return "\n".join(lines)


def _health(account: Account) -> Iterator[str]:
    for finding in account.health[:_MOST_FINDINGS]:
        withheld = f" (withheld: {', '.join(finding.affects)})" if finding.affects else ""
        yield f"{finding.severity}: {finding.message}{withheld}"
    if len(account.health) > _MOST_FINDINGS:
        yield f"and {len(account.health) - _MOST_FINDINGS} more findings, all in --json"
    if account.health:
        yield ""


def _classes(account: Account) -> Iterator[str]:
    """Milliseconds of each class by rank, over all that was recorded."""
    ranks = account.ranks[:_MOST_RANKS]
    names = [name for name in CLASSES if any(rank.whole.classes.get(name) for rank in ranks)]
    width = max([len(name) for name in names] + [len("exposed communication")])
    yield f"{'ms, whole recording':<{width}}" + "".join(f"{f'rank {rank.rank}':>14}" for rank in ranks)
    for name in names:
        cells = (rank.whole.classes.get(name, 0) for rank in ranks)
        yield f"{name:<{width}}" + "".join(f"{nanoseconds / 1e6:14,.3f}" for nanoseconds in cells)
    for label, attribute in (
        ("unexplained", "unexplained_ns"),
        ("window", "window_ns"),
        ("busy", "busy_ns"),
        ("communication", "communication_ns"),
        ("exposed communication", "exposed_communication_ns"),
    ):
        values = [getattr(rank.whole, attribute) for rank in ranks]
        yield f"{label:<{width}}" + "".join(
            f"{'withheld':>14}" if value is None else f"{value / 1e6:14,.3f}" for value in values
        )
    if len(account.ranks) > _MOST_RANKS:
        yield f"{len(account.ranks) - _MOST_RANKS} more ranks are in --json and --html"
    yield ""


def _ranks(account: Account) -> Iterator[str]:
    if account.name_table:
        yield f"names classed by tables {account.name_table}"
    if account.absent_ranks:
        yield f"no trace of ranks {', '.join(map(str, account.absent_ranks))} of {account.world_size}"
    if account.clock_residual_ns is not None:
        yield (
            f"{len(account.collectives)} collectives matched across ranks, clocks aligned with a residual of "
            f"{account.clock_residual_ns / 1e3:.1f} us"
        )
    for straggler in account.stragglers:
        yield (
            f"rank {straggler.rank} arrived last at {straggler.times_last} of {straggler.collectives} collectives; "
            f"the others waited {straggler.cost_ns_per_step / 1e6:.3f} ms a step for it"
        )
    yield from _verdicts(account.verdicts)
    for (group, kind), bandwidth in sorted(account.bus_bandwidths.items()):
        yield f"bus bandwidth of {kind} in group {group}: {bandwidth / 1e9:.2f} GB/s"


def _verdicts(verdicts: Sequence[CommunicationVerdict]) -> Iterator[str]:
    """Who and what stands out, and that nobody and nothing does."""
    for one in verdicts:
        members = f"{one.kind} of group {one.group} (ranks {', '.join(map(str, one.ranks))})"
        late = f"{one.late_ns_per_step / 1e6:.3f} ms a step for rank {one.late_rank}"
        if "slow_rank" in one.losses:
            more = (one.compute_excess_ns_per_step or 0.0) / 1e6
            yield f"slow rank: {members} waits {late}, which computes {more:.3f} ms longer than its peers"
        if "late_rank" in one.losses:
            known = one.compute_excess_ns_per_step is not None
            why = ", which does not compute longer" if known else "; whether it computes longer is unknown"
            yield f"late rank: {members} waits {late}{why}"
        if "slow_link" in one.losses:
            where = "in other groups of its size" if one.reference == "other_groups" else "at its best"
            yield (
                f"slow link: {members} moves {(one.bus_bandwidth or 0.0) / 1e9:.2f} GB/s, "
                f"{(one.reference_bandwidth or 0.0) / 1e9:.2f} GB/s {where}; it loses "
                f"{(one.excess_transfer_ns_per_step or 0.0) / 1e6:.3f} ms a step"
            )
    if verdicts and not any(one.losses for one in verdicts):
        still_open = sum(one.reason is not None for one in verdicts)
        kinds = "1 kind" if len(verdicts) == 1 else f"{len(verdicts)} kinds"
        unknown = f"; {still_open} leave a question open, for reasons in --json" if still_open else ""
        yield f"no rank and no link stands out in {kinds} of communication{unknown}"
