"""Which link between two ranks is slow: against pairs that lie alike, or its own way back."""

from drivetrain.measure.links import PairRate, slow_links


def pair(source: int, target: int, rate: float, *, same_host: bool = True) -> PairRate:
    return PairRate(source, target, same_host, rate, 1e-4)


def both(first: int, second: int, rate: float, **more: bool) -> list[PairRate]:
    return [pair(first, second, rate, **more), pair(second, first, rate, **more)]


def test_a_link_below_its_like_is_named_with_what_it_is_compared_with() -> None:
    rates = [*both(0, 1, 2e9), *both(1, 2, 2e9), pair(0, 2, 0.5e9), pair(2, 0, 2e9)]
    (slow,) = slow_links(rates)
    assert (slow.pair.source, slow.pair.target) == (0, 2)
    assert slow.reference_bytes_per_s == 2e9
    assert "rank 0 to rank 2: 0.5 GB/s, 25% of the median" in slow.in_words()


def test_links_between_machines_are_not_held_against_those_inside_one() -> None:
    between = [one for a, b in ((0, 2), (0, 3), (1, 2), (1, 3)) for one in both(a, b, 1e8, same_host=False)]
    assert slow_links([*both(0, 1, 5e9), *both(2, 3, 5e9), *between]) == []
    between[0] = pair(0, 2, 0.4e8, same_host=False)
    (slow,) = slow_links([*both(0, 1, 5e9), *both(2, 3, 5e9), *between])
    assert "two machines" in slow.reference


def test_of_two_ranks_each_direction_is_held_against_the_other() -> None:
    assert slow_links(both(0, 1, 1e9)) == []
    (slow,) = slow_links([pair(0, 1, 1e9), pair(1, 0, 3e9)])
    assert (slow.pair.source, slow.reference) == (0, "the way back")


def test_the_slowest_comes_first() -> None:
    rates = [*both(0, 1, 2e9), *both(1, 2, 2e9), *both(0, 3, 2e9), pair(0, 2, 1e9), pair(2, 0, 0.2e9)]
    assert [one.pair.source for one in slow_links(rates)] == [2, 0]


def test_no_rates_have_no_slow_links() -> None:
    assert slow_links([]) == []
