"""The waterfall, the timeline and the page of an account: what they show is what the records hold."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from drivetrain.measure.account import Account, RankAccount, StepAccount, Straggler, Window
from drivetrain.measure.peaks import Peak
from drivetrain.measure.waterfall import RankTime, Waterfall, WaterfallFlops, waterfall
from drivetrain.report.account_page import account_page
from drivetrain.report.account_text import account_text
from drivetrain.report.palette import colour_of
from drivetrain.report.timeline import MOST_ROWS, timeline_svg
from drivetrain.report.waterfall import SMALLEST_BAR, waterfall_svg, waterfall_text
from drivetrain.trace.health import Finding

CLASSES = {
    "compute.matmul": 500,
    "communication.dp.unsplit": 300,
    "host.launch": 150,
    "idle": 48,
    "host.gc": 1,
}


def window(scale: int = 1_000_000) -> Window:
    classes = {name: count * scale for name, count in CLASSES.items()}
    return Window(
        window_ns=1000 * scale,
        busy_ns=800 * scale,
        idle_ns=200 * scale,
        compute_ns=500 * scale,
        communication_ns=None,
        overlapped_communication_ns=None,
        exposed_communication_ns=300 * scale,
        copy_ns=0,
        exposed_copy_ns=0,
        classes=classes,
        unexplained_ns=scale,
    )


def made_waterfall(with_flops: bool = True) -> Waterfall:
    whole = window()
    times = [RankTime(0, whole.window_ns, whole.classes, whole.unexplained_ns)]
    flops = WaterfallFlops({"compute.matmul": 300_000_000}, Peak(1e9, "a sheet"), Peak(8e8, "measured"))
    return waterfall(times, flops if with_flops else None, window="steps 1 to 2, rank 0")


def an_account(ranks: int = 2) -> Account:
    steps = tuple(StepAccount(step, window(), 0, 1, step == 0) for step in range(2))
    return Account(
        health=(Finding("truncated", "warning", "cut <here> & there", 1, ("communication_ns",)),),
        ranks=tuple(RankAccount(rank, "device", window(), steps) for rank in range(ranks)),
        clock_residual_ns=2500,
        waterfall=made_waterfall(),
        stragglers=(Straggler(1, 5, 8, 5e6),),
        absent_ranks=(7,),
        world_size=8,
    )


def test_the_figure_s_bars_are_drawn_to_scale_and_end_where_the_next_begins() -> None:
    made = made_waterfall()
    root = ElementTree.fromstring(waterfall_svg(made, "title"))
    bars = [
        (float(element.attrib["x"]), float(element.attrib["width"]))
        for element in root.iter("{http://www.w3.org/2000/svg}rect")
        if element.find("{http://www.w3.org/2000/svg}title") is not None
    ]
    assert len(bars) == sum(1 for bar in made.bars if bar.points >= SMALLEST_BAR)
    right = bars[0][0] + bars[0][1]
    for x, width in bars:
        assert x + width == pytest.approx(right, abs=0.8)
        right = x
    assert right == pytest.approx(250, abs=0.1), "the last bar, MFU, starts at zero"


def test_the_text_names_every_bar_with_its_points_and_the_rules() -> None:
    made = made_waterfall()
    text = waterfall_text(made)
    for bar in made.bars:
        if bar.points >= SMALLEST_BAR:
            assert re.search(rf"{re.escape(bar.name)} +{bar.points:.2f}", text), bar
    assert "peak: a sheet" in text
    assert "MFU points" in text
    assert "% of time" in waterfall_text(made_waterfall(with_flops=False))


def test_bars_too_small_to_see_are_joined_and_keep_the_sum() -> None:
    times = [RankTime(0, 100_000, {"compute.matmul": 99_980, "host.gc": 10, "idle": 10})]
    text = waterfall_text(waterfall(times))
    assert "2 classes below 0.05 each" in text
    points = re.findall(r" {2}(\d+\.\d\d) {2}", text)
    assert sum(map(float, points)) == pytest.approx(100, abs=0.02)


def test_a_problem_of_the_waterfall_is_shown_as_an_error() -> None:
    broken = replace(made_waterfall(), problems=("MFU is 120.0%, above 100",))
    assert "ERROR: MFU is 120.0%" in waterfall_text(broken)
    assert "ERROR: MFU is 120.0%" in waterfall_svg(broken, "title")


def test_the_timeline_has_a_row_for_each_rank_and_step_and_says_what_it_leaves_out() -> None:
    svg = timeline_svg(an_account(), "title")
    ElementTree.fromstring(svg)
    for label in ("rank 0 step 0", "rank 1 step 1"):
        assert label in svg
    many = timeline_svg(an_account(ranks=40), "title")
    assert f"{MOST_ROWS} of 80 rows" in many


def test_the_page_is_self_contained_and_escapes_what_comes_from_files() -> None:
    page = account_page(an_account(), "a <b> & c")
    assert "<script" not in page
    assert set(re.findall(r"(?:src|href)\s*=\s*(.)(.)", page)) == {('"', "#")}, "places of the page itself"
    assert "a &lt;b&gt; &amp; c" in page
    assert "cut &lt;here&gt; &amp; there" in page
    assert "5 of 8" in page
    assert "No trace of rank 7" in page


def test_names_of_files_with_what_xml_cannot_hold_spoil_no_figure() -> None:
    title = "Account of a\x01\x1b\ud8ff.json"
    account = an_account()
    assert account.waterfall is not None
    root = ElementTree.fromstring(waterfall_svg(account.waterfall, title))
    assert root.get("aria-label", "").startswith("Account of a")
    assert "Account of a\ufffd\ufffd\ufffd.json" in account_page(account, title).encode().decode()


def test_the_terminal_says_what_is_withheld_and_who_is_waited_for() -> None:
    text = account_text(an_account(), "title")
    assert "(withheld: communication_ns)" in text
    assert re.search(r"^communication +withheld +withheld$", text, re.MULTILINE)
    assert "rank 1 arrived last at 5 of 8 collectives; the others waited 5.000 ms a step for it" in text
    assert "no trace of ranks 7 of 8" in text


def test_each_group_of_classes_has_a_colour_of_its_own() -> None:
    groups = (
        "compute.matmul",
        "communication.dp.wait",
        "copy.h2d",
        "data.loader",
        "host.gc",
        "idle",
        "unexplained",
    )
    assert len({colour_of("class", name) for name in groups}) == len(groups)
