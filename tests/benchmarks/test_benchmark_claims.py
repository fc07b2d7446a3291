import dataclasses
import datetime
import json

import pytest

from harness.claims import Claim, claim_of_ratios, claim_of_times, document, verdict
from harness.lanes import Block, Done
from harness.quiet import TICKS_PER_S, Usage, foreign_share
from harness.report import Section, markdown
from harness.session import Ran, SameWorkError, a_against_a, medians, palindrome, require_same_work

KEYS = ["claim", "peer", "peer_version", "a", "b", "ratio", "low", "high", "target", "note"]


def done(**changes: object) -> Done:
    made = Done(parameters=100, tokens_per_step=64, losses=[8.0, 7.0, 6.0], steps=3, hooks=[])
    return dataclasses.replace(made, **changes)


def ran(*blocks: tuple[float, float]) -> Ran:
    """Blocks of (seconds a step, share that others took)."""
    return Ran(
        "ours", [Block([seconds * 0.9, seconds, seconds * 5], share) for seconds, share in blocks], done()
    )


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


@pytest.mark.parametrize(
    ("b", "outcome"),
    [
        ([1.1, 1.2], "won"),
        ([0.9, 1.2], "won, within noise"),
        ([0.8, 1.1], "lost, within noise"),
        ([0.8, 0.9], "lost"),
    ],
)
def test_an_interval_that_holds_the_target_is_said_to_be_noise(b: list[float], outcome: str) -> None:
    section = Section("step_vs_peers", "python x", [times([1.0, 1.0], b)])
    page = markdown([section], date=datetime.date(2026, 1, 2), minutes=1, source="abc")
    assert f"| {outcome} |" in page


def test_a_section_of_another_machine_says_which() -> None:
    claim = times([1.0, 1.0], [2.0, 2.0])
    here, there = (
        Section("a", "python a", [claim]),
        Section("b", "python b", [claim], where="a machine, 2 CPUs"),
    )
    page = markdown([here, there], date=datetime.date(2026, 1, 1), minutes=1.0, source="abc")
    assert page.count("On a machine, 2 CPUs.") == 1
    assert page.index("## b") < page.index("On a machine")


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
    order = palindrome("A", ["B", "C"], rounds=1)
    assert order == order[::-1]
    assert order == ["A", "B", "A", "C", "A", "A", "C", "A", "B", "A"]
    assert palindrome("A", ["B"], rounds=2) == ["A", "B", "A", "A", "B", "A"] * 2


def test_one_slow_step_does_not_move_the_figure_of_a_block() -> None:
    assert medians(ran((2.0, 0.0), (3.0, 0.0))) == [2.0, 3.0]


def test_blocks_that_others_disturbed_do_not_count() -> None:
    assert medians(ran((2.0, 0.0), (9.0, 0.5), (3.0, 0.01))) == [2.0, 3.0]


def test_disturbed_blocks_count_when_there_is_nothing_else() -> None:
    assert medians(ran((2.0, 0.4), (9.0, 0.5))) == [2.0, 9.0]


def test_the_deviation_of_a_side_from_itself_compares_every_other_block() -> None:
    assert a_against_a([1.0, 1.1, 1.0, 1.1]) == pytest.approx(0.1)
    assert a_against_a([1.0]) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": 101}, "parameters"),
        ({"tokens_per_step": 65}, "tokens a step"),
        ({"losses": [9.0], "steps": 1}, "mean training loss"),
        ({"losses": [7.0], "steps": 4}, "only tells its mean loss"),
    ],
)
def test_sides_that_did_other_work_are_not_compared(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SameWorkError, match=message):
        require_same_work(done(), done(**changes), "theirs")


def test_losses_are_compared_over_the_steps_that_both_did() -> None:
    assert "first 2 steps 7.5000" in require_same_work(done(), done(losses=[8.0, 7.0], steps=2), "theirs")
    # A side that only tells its mean.
    assert "100 parameters, 64 tokens" in require_same_work(done(), done(losses=[7.55], steps=2), "theirs")
    longer = done(losses=[8.0, 7.0, 6.0, 1.0], steps=4)
    assert "first 3 steps" in require_same_work(done(), longer, "theirs")


def test_ticks_of_other_processes_are_shares_of_all_cpus() -> None:
    start = Usage(time=0.0, busy_ticks=0, own_ticks=0)
    assert foreign_share(start, Usage(1.0, TICKS_PER_S, 0), cpus=1) == 1.0
    assert foreign_share(start, Usage(1.0, TICKS_PER_S, TICKS_PER_S // 2), cpus=2) == 0.25
    # A tick may be counted for the process before it is counted for the machine.
    assert foreign_share(start, Usage(2.0, 99, 100), cpus=2) == 0.0


def test_what_parallel_reports_for_information_says_so_in_its_note() -> None:
    import parallel

    found: dict[str, object] = {"torch": "2.0"}
    for ours, peers in parallel.PEERS.items():
        sides = [ours, *peers]
        one = {"traffic": {name: {"all_reduce": [2, 8]} for name in sides}}
        found[ours] = {
            **one,
            **{kind: {name: [1.0, 1.0] for name in sides} for kind in ("times", "cpu", "foreign")},
        }
    claims = parallel.claims_of(found)
    assert {verdict(claim) for claim in claims} == {"won", "information"}
    for claim in claims:
        assert claim.note.startswith("for information, ") == (verdict(claim) == "information"), claim.claim
