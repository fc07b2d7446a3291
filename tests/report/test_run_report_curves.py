"""Curves of a report: buckets lose no extreme, scales hold every value, whatever is finite or not is drawn."""

import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drivetrain.report.axes import LARGEST, linear_ticks, scale_for, tick_words
from drivetrain.report.buckets import min_max_buckets
from drivetrain.report.panels import Panel, Points, Series, panels_svg

SVG = "{http://www.w3.org/2000/svg}"
values = st.lists(st.one_of(st.none(), st.floats()), max_size=300)
finite = st.floats(allow_nan=False, allow_infinity=False)


def svg_of(
    *series: Series, points: tuple[Points, ...] = (), limit: float | None = None
) -> ElementTree.Element:
    panel = Panel("y", 100, series, points, limit=limit)
    return ElementTree.fromstring(panels_svg([panel], tagged={}, restarts=[], words="w"))


@given(values, st.integers(1, 40))
def test_no_extreme_is_lost_and_nothing_is_made_up(ys: list[float | None], columns: int) -> None:
    xs = [float(x) for x in range(len(ys))]
    curve = min_max_buckets(xs, ys, columns)
    drawn = [point for piece in curve.pieces for point in piece]
    real = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None and math.isfinite(y)]
    assert set(drawn) <= set(real)
    assert drawn == sorted(drawn, key=lambda point: point[0])
    if real:
        assert min(y for _, y in drawn) == min(y for _, y in real)
        assert max(y for _, y in drawn) == max(y for _, y in real)
        assert {drawn[0], drawn[-1]} == {real[0], real[-1]}


@given(values, st.integers(1, 40))
def test_every_value_that_is_not_finite_is_counted_and_breaks_the_curve(
    ys: list[float | None], columns: int
) -> None:
    xs = [float(x) for x in range(len(ys))]
    curve = min_max_buckets(xs, ys, columns)
    broken = [x for x, y in zip(xs, ys, strict=True) if y is not None and not math.isfinite(y)]
    assert sum(gap.count for gap in curve.gaps) == len(broken)
    for piece in curve.pieces:
        assert not [x for x in broken if piece[0][0] < x < piece[-1][0]]


@given(values, st.integers(1, 40))
def test_the_number_of_points_is_bounded_by_the_figure_and_not_by_the_run(
    ys: list[float | None], columns: int
) -> None:
    whole = [y for y in ys if y is None or math.isfinite(y)]
    curve = min_max_buckets([float(x) for x in range(len(whole))], whole, columns)
    assert sum(map(len, curve.pieces)) <= 4 * columns


def test_a_spike_of_one_step_in_a_million_is_on_the_figure() -> None:
    steps = [float(step) for step in range(1_000_000)]
    losses: list[float | None] = [2.0] * 1_000_000
    losses[777_777] = 9.5
    curve = min_max_buckets(steps, losses, 800)
    assert (777_777.0, 9.5) in curve.pieces[0]
    assert sum(map(len, curve.pieces)) <= 3200


@given(st.lists(finite, min_size=1, max_size=50), st.booleans())
def test_a_scale_holds_every_value_in_its_order(numbers: list[float], from_zero: bool) -> None:
    clipped = [min(max(number, -LARGEST), LARGEST) for number in numbers]
    scale = scale_for(clipped, from_zero=from_zero)
    places = [scale.share(number) for number in sorted(clipped)]
    assert all(0 <= place <= 1 for place in places)
    assert places == sorted(places)
    assert scale.high > scale.low


@given(finite, finite)
@example(0.0, 5e-324)
@example(7.544837040360285e-308, 7.544837040360286e-308)
@example(-2.676927595535746e-307, -2.6769275955357456e-307)
def test_ticks_are_inside_and_few(one: float, other: float) -> None:
    low, high = sorted(min(max(number, -LARGEST), LARGEST) for number in (one, other))
    ticks = linear_ticks(low, high, 5)
    assert len(ticks) <= 12
    room = 1e-6 * max(high - low, abs(low), abs(high))
    assert all(low - room <= tick <= high + room for tick in ticks)


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0"), (1500.0, "1,500"), (0.25, "0.25"), (2e-5, "2e-05"), (0.1 + 0.2, "0.3")]
)
def test_ticks_are_short(value: float, shown: str) -> None:
    assert tick_words(value) == shown


@given(values)
def test_any_curve_is_drawn_without_a_coordinate_that_is_no_number(ys: list[float | None]) -> None:
    root = svg_of(Series("s", [float(x) for x in range(len(ys))], ys, "#123456"))
    for element in root.iter():
        for value in element.attrib.values():
            assert "nan" not in value.lower().replace("system-ui", "")
            assert "inf" not in value.lower()


def test_a_lone_finite_value_between_two_nan_is_visible() -> None:
    root = svg_of(Series("loss", [1, 2, 3], [math.nan, 2.5, math.nan], "#123456"))
    tips = [title.text for title in root.iter(f"{SVG}title")]
    assert "loss, step 2: 2.5" in tips
    assert "step 1: NaN" in tips


def test_minus_infinity_is_marked_at_the_bottom_and_infinity_at_the_top() -> None:
    root = svg_of(Series("s", [1, 2, 3], [math.inf, 1.0, -math.inf], "#123456"))
    above, below = (float(path.attrib["d"].split()[1].split("L")[0]) for path in root.iter(f"{SVG}path"))
    assert above < below


def test_a_curve_over_orders_of_magnitude_is_on_a_logarithmic_scale_that_is_named() -> None:
    texts = [
        each.text for each in svg_of(Series("s", [1, 2, 3], [0.1, 1, 1000], "#123456")).iter(f"{SVG}text")
    ]
    assert "y, logarithmic" in texts
    flat = [each.text for each in svg_of(Series("s", [1, 2, 3], [1, 1.1, 1.2], "#123456")).iter(f"{SVG}text")]
    assert "y" in flat


def test_what_lies_beyond_the_scale_is_marked_with_its_value() -> None:
    root = svg_of(Series("step", [1, 2, 3], [31.25, 0.25, 0.26], "#123456"), limit=0.3)
    assert "step, step 1: 31.25, beyond the scale" in [title.text for title in root.iter(f"{SVG}title")]


def test_one_logged_step_and_none_are_figures_too() -> None:
    assert svg_of(Series("s", [5], [1.0], "#123456")) is not None
    texts = [each.text for each in svg_of(Series("s", [], [], "#123456")).iter(f"{SVG}text")]
    assert "not logged" in texts


def test_each_step_beyond_the_scale_is_marked_however_many_share_a_column() -> None:
    steps = [float(step) for step in range(10_000)]
    beyond = range(5_000, 5_010)
    values = [30.0 + step if step in beyond else 0.25 for step in range(10_000)]
    root = svg_of(Series("step", steps, values, "#123456"), limit=0.3)
    tips = [str(title.text) for title in root.iter(f"{SVG}title") if "beyond the scale" in str(title.text)]
    assert tips == [f"step, step {step}: {30 + step}, beyond the scale" for step in beyond]
