import dataclasses
import datetime
import json

import pytest

from harness.blocks import Block
from harness.claims import Claim, claim_of_ratios, claim_of_times, document, verdict
from harness.quiet import foreign_share
from harness.report import Section, markdown
from harness.session import SameWorkError, a_against_a, interleaved, palindrome, require_same_work

KEYS = ["claim", "peer", "peer_version", "a", "b", "ratio", "low", "high", "target", "note"]


def block(side: str = "ours", seconds: float = 1.0, **changes: object) -> Block:
    made = Block(
        side=side,
        step_s=[seconds * 0.9, seconds, seconds * 5],
        losses=[8.0, 6.0],
        parameters=100,
        tokens_per_step=64,
        hooks=[],
        foreign_share=0.0,
        attempts=1,
    )
    return dataclasses.replace(made, **changes)


def times(a: list[float], b: list[float], target: float = 1.0) -> Claim:
    return claim_of_times("step", "peer", "1.0", a, b, target=target, note="")


def test_a_peer_that_takes_twice_as_long_gives_a_ratio_of_two() -> None:
    claim = times([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    assert (claim.ratio, claim.low, claim.high) == (2.0, 2.0, 2.0)
    assert verdict(claim) == "won"


def test_a_slower_side_of_ours_is_a_loss_and_is_listed_as_one() -> None:
    claim = times([2.0, 2.0], [1.0, 1.0])
    assert verdict(claim) == "lost"
    page = markdown(
        [Section("step_vs_peers", "python x", [claim])],
        date=datetime.date(2026, 1, 2),
        minutes=1,
        source="abc",
    )
    assert "0 won, 1 lost, 0 for information" in page
    assert "| 0.500 |" in page


def test_the_ratio_is_that_of_the_medians_and_lies_in_its_interval() -> None:
    claim = times([1.0, 2.0, 9.0], [3.0, 4.0, 5.0])
    assert claim.ratio == 2.0
    assert claim.low <= claim.ratio <= claim.high
    assert claim.low < claim.high


def test_a_claim_that_is_no_time_leaves_both_sides_empty() -> None:
    claim = claim_of_ratios("share", "none", "", [4.0, 5.0, 6.0], target=1.0, note="")
    assert (claim.a, claim.b) == ([], [])
    assert claim.ratio == 5.0


def test_a_line_for_information_is_neither_won_nor_lost() -> None:
    assert verdict(times([2.0], [1.0], target=0.0)) == "information"


def test_the_document_has_exactly_the_agreed_keys() -> None:
    body = json.loads(document([times([1.0], [2.0])]))
    assert list(body) == ["claims"]
    assert [list(claim) for claim in body["claims"]] == [KEYS]


def test_a_number_that_json_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError):
        document([dataclasses.replace(times([1.0], [2.0]), ratio=float("nan"))])


def test_the_order_of_a_session_reads_the_same_backwards() -> None:
    order = palindrome("A", ["B", "C", "D"], rounds=1)
    assert order == order[::-1]
    assert order == ["A", "B", "C", "A", "D", "A", "A", "D", "A", "C", "B", "A"]


def test_every_side_of_a_session_gets_its_turns() -> None:
    sides = {"A": lambda: block("A"), "B": lambda: block("B")}
    blocks = interleaved(palindrome("A", ["B"], rounds=2), sides, "test")
    assert {name: len(ran) for name, ran in blocks.items()} == {"A": 8, "B": 4}


def test_one_slow_step_does_not_move_the_figure_of_a_block() -> None:
    assert block(seconds=2.0).median_s == 2.0


def test_the_deviation_of_a_side_from_itself_compares_every_other_block() -> None:
    blocks = [block(seconds=1.0), block(seconds=1.1), block(seconds=1.0), block(seconds=1.1)]
    assert a_against_a(blocks) == pytest.approx(0.1)
    assert a_against_a(blocks[:1]) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": 101}, "parameters"),
        ({"tokens_per_step": 65}, "tokens a step"),
        ({"losses": [9.0]}, "mean training loss"),
    ],
)
def test_sides_that_did_other_work_are_not_compared(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SameWorkError, match=message):
        require_same_work(block(), block("theirs", **changes))


def test_sides_that_did_the_same_work_are_described() -> None:
    assert "100 parameters, 64 tokens a step" in require_same_work(block(), block("theirs", losses=[7.05]))


def test_ticks_of_other_processes_are_shares_of_all_cpus() -> None:
    assert foreign_share(1.0, busy_ticks=150, own_ticks=100, cpus=1) > 0
    assert foreign_share(2.0, busy_ticks=100, own_ticks=100, cpus=2) == 0.0
    # A tick may be counted for the process before it is counted for the machine.
    assert foreign_share(2.0, busy_ticks=99, own_ticks=100, cpus=2) == 0.0
