"""What an account says on a terminal about who is late and what is slow."""

from typing import Any

from drivetrain.measure.account import Account, CommunicationVerdict
from drivetrain.report.account_text import account_text


def verdict(**more: Any) -> CommunicationVerdict:
    known: dict[str, Any] = {
        "group": "tp",
        "kind": "all_reduce",
        "ranks": (2, 3),
        "occurrences": 10,
        "losses": (),
        "late_rank": 3,
        "late_ns_per_step": 300_000.0,
        "compute_excess_ns_per_step": 290_000.0,
        "transfer_ns_per_step": 250_000.0,
        "excess_transfer_ns_per_step": 150_000.0,
        "bus_bandwidth": 4e9,
        "reference_bandwidth": 10e9,
        "reference": "other_groups",
    }
    return CommunicationVerdict(**{**known, **more})


def said(*verdicts: CommunicationVerdict) -> str:
    return account_text(Account((), (), verdicts=verdicts), "An account")


def test_a_slow_rank_and_a_slow_link_are_said_with_their_figures() -> None:
    text = said(verdict(losses=("slow_rank", "slow_link")))
    assert "slow rank: all_reduce of group tp (ranks 2, 3) waits 0.300 ms a step for rank 3" in text
    assert "computes 0.290 ms longer" in text
    assert "moves 4.00 GB/s, 10.00 GB/s in other groups of its size; it loses 0.150 ms a step" in text
    assert "stands out" not in text


def test_a_late_rank_is_not_called_slow() -> None:
    text = said(verdict(losses=("late_rank",), compute_excess_ns_per_step=0.0))
    assert "late rank: all_reduce of group tp (ranks 2, 3) waits 0.300 ms a step for rank 3" in text
    assert "does not compute longer" in text
    assert "slow" not in text
    text = said(verdict(losses=("late_rank",), compute_excess_ns_per_step=None))
    assert "whether it computes longer is unknown" in text


def test_that_nothing_stands_out_is_said_with_what_is_open() -> None:
    text = said(verdict(), verdict(kind="all_gather", reason="3 seen, at least 4 needed"))
    assert "no rank and no link stands out in 2 kinds of communication; 1 leave a question open" in text
    assert "slow" not in text
    assert "stands out" not in said(), "one rank alone has no verdicts"
