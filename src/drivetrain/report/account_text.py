"""An account for a terminal: health, waterfall, classes by rank, who waited for whom."""

from collections.abc import Iterator

from drivetrain.measure.account import CLASSES, Account
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
    for (group, kind), bandwidth in sorted(account.bus_bandwidths.items()):
        yield f"bus bandwidth of {kind} in group {group}: {bandwidth / 1e9:.2f} GB/s"
