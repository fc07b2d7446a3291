"""Recomputation while much memory is free: it pays with time for what nobody needs."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.remedies import switch_off
from drivetrain.diagnose.rule import Rule
from drivetrain.measure.peaks import find_device

__all__ = ["RULE"]

_FREE = 0.5
"""Share of memory that must be free. Whether what recomputation frees fits in it is not known: the remedy says so."""
_PEAKS = ("memory/reserved_peak_bytes", "memory/allocated_peak_bytes", "memory/process_rss_peak_bytes")


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.config is not None
    assert facts.figures is not None
    cost = facts.group_ns("recompute")
    peak = next((facts.figures.means[key] for key in _PEAKS if key in facts.figures.means), None)
    limit = _limit(facts)
    if facts.config.memory.recompute_granularity == "none" or not cost or peak is None or limit is None:
        return
    if peak > (1 - _FREE) * limit:
        return
    note = "or less of it, where all does not fit (drivetrain check --dry-run); or a larger micro-batch"
    yield loss(
        facts,
        "needless_recompute",
        "memory.recompute_without_need",
        "memory.recompute_granularity",
        cost,
        confidence="medium",
        evidence=(
            Evidence(
                f"the peak is {peak / 1e9:.3g} GB of {limit / 1e9:.3g} GB; recomputation takes "
                f"{cost / 1e6:.3f} ms a step",
                "logged steps and account",
                {"peak_bytes": peak, "limit_bytes": limit, "recompute_ms": cost / 1e6},
            ),
        ),
        remedies=(switch_off(facts, "recompute", cost, note),),
        part_of="recompute",
    )


def _limit(facts: Facts) -> float | None:
    """Memory that a process may use; None: unknown."""
    assert facts.config is not None
    assert facts.figures is not None
    given = facts.config.memory.device_memory_limit_bytes
    if given is not None:
        return float(given)
    if facts.figures.device_type == "cpu":
        # The peak is of one process, and all that run on the machine share its memory.
        whole, processes = facts.figures.memory_bytes, facts.figures.local_processes
        return None if whole is None or processes is None else whole / processes
    return None if facts.device is None else find_device(facts.device).memory_bytes


RULE = Rule(
    "needless_recompute", ("memory.recompute_without_need",), ("configuration", "logged steps"), _detect
)
