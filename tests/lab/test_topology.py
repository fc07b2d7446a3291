"""Shapes and rates: what is understood, what is refused and with what advice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.errors import DrivetrainError
from drivetrain.lab import Link, Topology, format_rate, parse_rate
from drivetrain.lab.processes import cores_of_hosts, rank_environment
from drivetrain.lab.topology import HIGHEST_RATE, LOWEST_RATE, burst_bytes


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("800mbit", 800_000_000),
        ("1.5gbit", 1_500_000_000),
        ("1.5 GBit", 1_500_000_000),
        ("64kbit", 64_000),
        (".5mbit", 500_000),
        ("20000bit", 20_000),
        ("20000", 20_000),
        (1e9, 1_000_000_000),
        (800_000_000, 800_000_000),
    ],
)
def test_rates(text: str | float, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["", "fast", "800", "-5mbit", "0gbit", "800mb", "800mbps", "1e9mbit", "nan", "٣gbit"]
)
def test_what_is_no_rate_is_refused_with_what_would_be(text: str) -> None:
    with pytest.raises(DrivetrainError, match=r"800mbit|10kbit"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "nearest"), [("1bit", "10kbit"), ("9999", "10kbit"), ("101gbit", "100gbit")]
)
def test_a_rate_outside_what_a_link_can_have_names_the_nearest(text: str, nearest: str) -> None:
    with pytest.raises(DrivetrainError, match=f"nearest legal value is {nearest}"):
        parse_rate(text)


@given(st.integers(LOWEST_RATE, HIGHEST_RATE))
def test_a_rate_is_read_back_as_it_was_written(rate: int) -> None:
    assert parse_rate(format_rate(rate)) == rate


@given(st.text(max_size=20))
def test_any_text_is_a_rate_or_refused(text: str) -> None:
    try:
        rate = parse_rate(text)
    except DrivetrainError:
        return
    assert LOWEST_RATE <= rate <= HIGHEST_RATE


def test_a_link_may_differ_by_direction() -> None:
    assert Link.parse("1gbit/200mbit") == Link(1_000_000_000, 200_000_000)
    assert Link.parse("1gbit") == Link(1_000_000_000, 1_000_000_000)
    assert str(Link.parse("1gbit/200mbit")) == "1gbit/200mbit"
    assert str(Link.parse("1gbit/1000mbit")) == "1gbit"


def test_one_slow_link_among_equal_ones() -> None:
    topology = Topology.uniform(3, 2, "1gbit", {1: "100mbit"})
    assert [link.up for link in topology.links] == [10**9, 10**8, 10**9]
    assert (topology.hosts, topology.world_size) == (3, 6)
    assert [topology.host_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("hosts", "ranks", "links", "message"),
    [
        (0, 1, {}, "0 hosts.*nearest legal value is 1"),
        (65, 1, {}, "65 hosts.*nearest legal value is 64"),
        (2, 0, {}, "0 ranks on a host.*nearest legal value is 1"),
        (2, 1, {2: "1gbit"}, "host 2: there are 2 hosts.*nearest is 1"),
        (2, 1, {1: "quick"}, "rate of host 1 'quick' is no rate"),
    ],
)
def test_a_shape_that_cannot_be_names_the_nearest_that_can(
    hosts: int, ranks: int, links: dict[int, str], message: str
) -> None:
    with pytest.raises(DrivetrainError, match=message):
        Topology.uniform(hosts, ranks, "1gbit", links)


def test_a_topology_survives_being_written_down() -> None:
    topology = Topology.uniform(3, 2, "1gbit/2gbit", {1: "100mbit"})
    assert Topology.from_document(topology.to_document()) == topology


def test_a_bucket_holds_whole_packets_at_any_rate() -> None:
    assert burst_bytes(10_000) >= 2 * 65536
    assert burst_bytes(800_000_000) == 250_000


def test_ranks_of_a_host_are_neighbours_and_know_how_many_they_are() -> None:
    topology = Topology.uniform(2, 2, "1gbit")
    seen = [rank_environment("x", topology, rank, threads=1) for rank in range(4)]
    assert [one["LOCAL_RANK"] for one in seen] == ["0", "1", "0", "1"]
    assert [one["GROUP_RANK"] for one in seen] == ["0", "0", "1", "1"]
    assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) for one in seen} == {("4", "2")}
    assert {one["MASTER_ADDR"] for one in seen} == {"10.77.0.1"}


def test_hosts_share_no_core_where_there_are_enough() -> None:
    assert cores_of_hosts(2, {0, 1, 2, 3, 4}) == [[0, 1], [2, 3]]
    assert cores_of_hosts(2, {3, 7}) == [[3], [7]]
    assert cores_of_hosts(3, {0, 1}) == [[0, 1]] * 3
