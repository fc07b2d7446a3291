"""Where buckets of gradients end: by the order in which gradients become ready, with a small one at the end."""

from hypothesis import given
from hypothesis import strategies as st

from drivetrain.engine.parallel.buckets import buckets_of, order_of_registration
from drivetrain.engine.parallel.readiness import Arrivals

MB = 1e6


@given(
    st.lists(st.integers(1, 3_000_000), min_size=1, max_size=30),
    st.sampled_from([0.0, 0.001, 0.1, 1.0, 25.0]),
    st.randoms(use_true_random=False),
)
def test_buckets_hold_each_parameter_once_in_the_order_of_readiness_and_no_more_than_their_size(
    sizes: list[int], bucket_size_mb: float, random: "object"
) -> None:
    order = order_of_registration(len(sizes))
    random.shuffle(order)  # type: ignore[attr-defined]
    buckets = buckets_of(sizes, bucket_size_mb, order)
    assert [index for bucket in buckets for index in bucket] == order
    assert all(buckets)
    if len(buckets) == 1:
        assert bucket_size_mb == 0 or sum(sizes) <= bucket_size_mb * MB or len(sizes) == 1
        return
    limit = bucket_size_mb * MB
    for bucket in buckets[:-2]:
        assert sum(sizes[index] for index in bucket) >= limit, "it was closed before it was full"
    for bucket in buckets:
        assert sum(sizes[index] for index in bucket[:-1]) < limit, "it should have been closed before"
    *_, before, last = buckets
    small = limit / 25
    assert len(last) == 1 or sum(sizes[index] for index in last) <= small
    assert sum(sizes[index] for index in last) + sizes[before[-1]] > small, "another one had room"


def test_what_is_ready_last_does_not_wait_for_a_bucket_to_fill() -> None:
    # A large embedding is ready last: what comes before it must not travel with it.
    assert buckets_of([8_000_000, 100_000, 100_000, 9_000_000], 9.0) == [[3], [2, 1], [0]]
    # Small ones at the end travel together.
    assert buckets_of([20_000, 20_000, 900_000, 900_000], 1.0) == [[3, 2], [1, 0]]


def test_one_bucket_that_holds_everything_is_not_cut() -> None:
    assert buckets_of([8_000, 100, 9_000], 1.0) == [[2, 1, 0]]
    assert buckets_of([8_000, 100, 9_000], 0) == [[2, 1, 0]]


def test_gradients_are_ordered_by_their_first_arrival_and_those_that_never_came_are_last() -> None:
    arrivals = Arrivals(5)
    for index in (3, 1, 3, 4, 1):
        arrivals.note(index)
    assert arrivals.order() == [3, 1, 4, 2, 0]
    assert Arrivals(3).order() == [2, 1, 0], "nothing was seen"
