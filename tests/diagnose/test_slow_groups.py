"""Slow links among the groups of a run, by the collectives that its ranks wrote themselves."""

import pytest
from test_diagnosis import MS, account, config_with

from drivetrain.archive.collective_waits import RunCollectives
from drivetrain.config import LaunchFacts
from drivetrain.diagnose import Facts, Finding, diagnose
from drivetrain.measure.collective_waits import Matched

STEPS = 10


def collectives(
    group: str,
    ranks: tuple[int, ...],
    transfer_ms: float,
    *,
    exposed_ms: float | None = None,
    steps: int = STEPS,
) -> list[Matched]:
    """One of 8 MB in each step; all ranks wait for all of it unless another time is given."""
    exposed = transfer_ms if exposed_ms is None else exposed_ms
    return [
        Matched(
            group,
            "all_reduce",
            8_000_000,
            0,
            number,
            ranks,
            ranks[0],
            dict.fromkeys(ranks, 0),
            dict.fromkeys(ranks, round(transfer_ms * MS) + number),
            dict.fromkeys(ranks, round(exposed * MS)),
            0,
        )
        for number in range(steps)
    ]


def found(*groups: list[Matched]) -> list[Finding]:
    """Of a run with a mean step of 100 ms."""
    known = RunCollectives(STEPS, [one for group in groups for one in group])
    facts = Facts(account(), "a run", config_with(), LaunchFacts(world_size=4), collectives=known)
    return [one for one in diagnose(facts).findings if one.rule == "slow_groups"]


def test_a_group_that_is_slower_than_its_like_costs_what_it_is_waited_for_longer() -> None:
    (one,) = found(collectives("dp", (0, 2), 2.0), collectives("dp", (1, 3), 12.0))
    assert one.cause == "communication.slow_link"
    assert one.subject == "links between ranks 1, 3"
    assert one.cost_ns == pytest.approx(10 * MS)
    assert "8 MB between ranks 1, 3 takes 12.000 ms, between others 2.000 ms" in one.evidence[0].text
    assert one.evidence[0].ranks == (1, 3)


def test_the_rank_that_all_slow_groups_share_is_named_and_waits_for_all_of_them() -> None:
    groups = [collectives("dp", (0, 2), 2.0), collectives("dp", (1, 3), 12.0)]
    groups += [collectives("tp", (0, 1), 1.0), collectives("tp", (2, 3), 6.0)]
    (one,) = found(*groups)
    assert one.subject == "link of rank 3"
    assert one.cost_ns == pytest.approx(15 * MS)
    assert len(one.evidence) == 2


def test_what_computation_hides_costs_nothing() -> None:
    slow = collectives("dp", (1, 3), 12.0, exposed_ms=2.0)
    assert not found(collectives("dp", (0, 2), 2.0), slow)


def test_groups_that_are_alike_or_have_none_like_them_or_too_few_say_nothing() -> None:
    fast = collectives("dp", (0, 2), 2.0)
    assert not found(fast, collectives("dp", (1, 3), 2.5)), "less than half as slow again"
    assert not found(fast, collectives("tp", (1, 3), 12.0)), "another dimension"
    assert not found(collectives("dp", (0, 1, 2, 3), 12.0)), "alone"
    assert not found(fast, collectives("dp", (1, 3), 12.0, steps=3))


def test_without_what_the_ranks_wrote_it_is_not_asked() -> None:
    facts = Facts(account(), "a run", config_with(), LaunchFacts(world_size=4))
    (one,) = [one for one in diagnose(facts).not_asked if one.rule == "slow_groups"]
    assert "monitor.log_rank_times=true" in one.reason
