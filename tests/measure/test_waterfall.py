"""The waterfall adds up to exactly 100, in the floats that are printed."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.errors import DrivetrainError
from drivetrain.measure.account import CLASSES
from drivetrain.measure.peaks import Peak
from drivetrain.measure.waterfall import RankTime, Waterfall, WaterfallFlops, waterfall

PEAK = Peak(1e12, "test peak")
"""1000 FLOPs a ns: numbers of the tests stay readable."""


def rank_times() -> st.SearchStrategy[RankTime]:
    nanoseconds = st.integers(min_value=1, max_value=10**12)

    def made(rank: int, classes: dict[str, int], unexplained: int) -> RankTime:
        return RankTime(rank, sum(classes.values()) + unexplained, classes, unexplained)

    return st.builds(
        made,
        st.integers(0, 7),
        st.dictionaries(st.sampled_from(CLASSES), nanoseconds, min_size=1),
        st.integers(0, 10**12),
    )


flop_counts = st.dictionaries(
    st.sampled_from(["compute.matmul", "compute.attention", "compute.loss"]),
    st.integers(0, 10**16),
    max_size=3,
)
rates = st.floats(min_value=1e9, max_value=1e15)


def add_up(drawn: Waterfall) -> None:
    """In any order: nothing is lost to the rounding of sums."""
    points = [bar.points for bar in drawn.bars]
    assert sum(points) == 100.0
    assert sum(reversed(points)) == 100.0
    assert sum(sorted(points)) == 100.0
    assert sum(bar["points"] for bar in drawn.to_document()["bars"]) == 100.0


@given(st.lists(rank_times(), min_size=1, max_size=4), flop_counts, rates, st.none() | st.floats(0.01, 1))
def test_bars_add_up_to_exactly_100(
    ranks: list[RankTime], counts: dict[str, int], rate: float, share: float | None
) -> None:
    achievable = None if share is None else Peak(rate * share, "measured")
    add_up(waterfall(ranks, WaterfallFlops(counts, Peak(rate, "sheet"), achievable)))
    add_up(waterfall(ranks))


def example() -> RankTime:
    classes = {"compute.matmul": 500, "compute.attention": 100, "compute.norm": 100, "data.loader": 200}
    return RankTime(0, 1000, {**classes, "idle": 100})


def points(drawn: Waterfall) -> dict[str, float]:
    return {bar.name: bar.points for bar in drawn.bars}


def test_each_bar_is_its_formula() -> None:
    """F = 250,000 and 50,000 of a peak of 1,000 a ns; A = 800 a ns; T = 1,000 ns."""
    flops = WaterfallFlops(
        {"compute.matmul": 250_000, "compute.attention": 50_000}, PEAK, Peak(0.8e12, "measured")
    )
    drawn = waterfall([example()], flops, order=CLASSES)
    assert points(drawn) == pytest.approx(
        {
            "MFU": 30.0,  # 300,000 / (1,000 * 1,000)
            "peak not achievable": 7.5,  # 300,000 * (1/800 - 1/1,000) / 1,000
            "shortfall of compute.matmul": 18.75,  # (500 - 250,000/800) / 1,000
            "shortfall of compute.attention": 3.75,  # (100 - 50,000/800) / 1,000
            "compute.norm": 10.0,
            "data.loader": 20.0,
            "idle": 10.0,
        },
        abs=1e-6,
    )
    assert drawn.mfu == pytest.approx(30.0, abs=1e-6)
    assert drawn.problems == ()
    assert drawn.peak_source == "test peak"


def test_an_unknown_achievable_rate_makes_one_bar_of_two_and_says_so() -> None:
    counts = {"compute.matmul": 250_000, "compute.attention": 50_000}
    drawn = waterfall([example()], WaterfallFlops(counts, PEAK))
    assert points(drawn)["peak not achievable and shortfall"] == pytest.approx(30.0, abs=1e-6)
    assert "one bar" in (drawn.reason or "")
    assert drawn.achievable_source is None


def test_without_flops_there_is_no_mfu_but_a_reason() -> None:
    drawn = waterfall([example()], reason="no model given")
    assert drawn.mfu is None
    assert drawn.unit == "percent_of_time"
    assert drawn.reason == "no model given"
    assert points(drawn)["compute.matmul"] == 50.0


def test_a_negative_bar_is_kept_and_reported() -> None:
    """More FLOPs than the achievable rate can do in the time: something given is wrong."""
    drawn = waterfall([example()], WaterfallFlops({"compute.matmul": 900_000}, PEAK, PEAK))
    assert points(drawn)["shortfall of compute.matmul"] == pytest.approx(-40.0, abs=1e-6)
    assert any("below 0" in problem for problem in drawn.problems)
    add_up(drawn)


def test_mfu_above_100_is_reported_first() -> None:
    drawn = waterfall([example()], WaterfallFlops({"compute.matmul": 1_100_000}, PEAK, PEAK))
    assert "above 100" in drawn.problems[0]


def test_attention_without_time_of_its_own_counts_as_matrix_products() -> None:
    """Eager attention is plain products; its FLOPs must not become a negative shortfall of nothing."""
    rank = RankTime(0, 1000, {"compute.matmul": 800, "idle": 200})
    counts = {"compute.matmul": 300_000, "compute.attention": 100_000}
    drawn = waterfall([rank], WaterfallFlops(counts, PEAK, PEAK))
    assert points(drawn) == pytest.approx(
        {"MFU": 40.0, "shortfall of compute.matmul": 40.0, "idle": 20.0}, abs=1e-6
    )


def test_work_with_known_bytes_splits_into_memory_bound_and_shortfall() -> None:
    rank = RankTime(0, 1000, {"compute.norm": 300, "compute.matmul": 700}, roof_ns={"compute.norm": 120})
    drawn = waterfall([rank], WaterfallFlops({"compute.matmul": 700_000}, PEAK, PEAK))
    assert points(drawn)["memory-bound work"] == pytest.approx(12.0, abs=1e-6)
    assert points(drawn)["shortfall of compute.norm"] == pytest.approx(18.0, abs=1e-6)


def test_ranks_merge_by_the_mean_of_their_points() -> None:
    ranks = [RankTime(0, 100, {"idle": 100}), RankTime(1, 1000, {"idle": 500, "copy.h2d": 500})]
    assert points(waterfall(ranks)) == {"idle": 75.0, "copy.h2d": 25.0}


def test_effective_mfu_takes_the_padding_off() -> None:
    counts = WaterfallFlops({"compute.matmul": 500_000}, PEAK, PEAK, effective_share=0.5)
    drawn = waterfall([example()], counts)
    assert drawn.effective_mfu == pytest.approx(25.0, abs=1e-6)


def test_the_unexplained_is_a_bar() -> None:
    assert points(waterfall([RankTime(0, 10, {"idle": 5}, unexplained_ns=5)]))["unexplained"] == 50.0


@pytest.mark.parametrize("ranks", [[], [RankTime(0, 0, {})]])
def test_nothing_to_split_is_refused(ranks: list[RankTime]) -> None:
    with pytest.raises(DrivetrainError, match="at least one rank"):
        waterfall(ranks)


def test_an_absurd_mfu_is_a_problem_and_no_bar() -> None:
    drawn = waterfall([example()], WaterfallFlops({"compute.matmul": 10**16}, PEAK, PEAK))
    assert drawn.mfu is None
    assert "must be wrong" in drawn.problems[0]
    add_up(drawn)


def test_an_achievable_rate_above_the_peak_is_refused() -> None:
    with pytest.raises(DrivetrainError, match="above the peak"):
        waterfall([example()], WaterfallFlops({}, PEAK, Peak(2e12, "another card")))


def test_bars_come_in_the_order_of_the_classes() -> None:
    drawn = waterfall([example()], WaterfallFlops({"compute.matmul": 1}, PEAK, PEAK), order=CLASSES)
    places = [CLASSES.index(bar.class_name) for bar in drawn.bars if bar.class_name is not None]
    assert drawn.bars[0].name == "MFU"
    assert all(earlier < later for earlier, later in itertools.pairwise(places))
