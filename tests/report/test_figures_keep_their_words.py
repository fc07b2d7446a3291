"""No figure cuts off its words: every line of text ends inside, as far as the width of letters can be told."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from figure_words import assert_words_fit

from drivetrain.measure.account import CLASSES, Account, RankAccount, StepAccount, Window
from drivetrain.measure.peaks import Peak
from drivetrain.measure.waterfall import RankTime, WaterfallFlops, waterfall
from drivetrain.report.ladder_figure import class_rungs, classes_svg, rungs_svg, step_time_rungs
from drivetrain.report.svg import legend
from drivetrain.report.timeline import timeline_svg
from drivetrain.report.waterfall import waterfall_svg
from report_samples import tune_document

MS = 1_000_000


def every_class() -> dict[str, int]:
    return dict.fromkeys(CLASSES, MS)


def account() -> Account:
    classes = every_class()
    total = sum(classes.values()) + MS
    window = Window(total, total, 0, None, None, None, None, None, None, classes, MS)
    return Account(
        health=(),
        ranks=(RankAccount(127, "device", window, (StepAccount(123456, window, 0, total, False),)),),
    )


def test_the_legend_of_a_timeline_with_every_group_goes_on_in_a_second_row() -> None:
    svg = timeline_svg(account(), "Where each step went")
    assert_words_fit(svg)
    assert "unexplained" in svg


def test_long_sources_of_a_waterfall_are_broken_into_lines() -> None:
    source = "measured here: sustained matrix product of 4096 x 4096 x 4096 in fp32 with 2 threads, " * 3
    flops = WaterfallFlops({"compute.matmul": MS}, Peak(1e9, source), Peak(8e8, source))
    classes = every_class()
    made = waterfall([RankTime(0, sum(classes.values()), classes)], flops, window="steps 1 to 2, rank 0")
    svg = waterfall_svg(replace(made, problems=("a problem that is told at length " * 8,)), "Waterfall")
    assert_words_fit(svg)
    text = " ".join(one.text or "" for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("text"))
    assert " ".join(source.split()) in " ".join(text.split()), "nothing of it is lost"


def test_the_figures_of_a_ladder_fit_whichever_bar_is_the_longest() -> None:
    tune = tune_document()
    rungs = step_time_rungs(tune)
    assert_words_fit(rungs_svg(rungs))
    assert_words_fit(rungs_svg([replace(rung, step_s=1.0) for rung in rungs]))
    assert_words_fit(classes_svg(class_rungs(tune)))
    whole = {name: float(ns) for name, ns in every_class().items()}
    assert_words_fit(
        classes_svg([("baseline", whole), ("+ a very long change of a configuration " * 2, whole)])
    )


def test_a_legend_tells_how_much_room_it_took() -> None:
    entries = [("#000000", f"entry number {number}") for number in range(12)]
    elements, used = legend(entries, 16, 38, 600)
    rows = {one.split('y="')[1].split('"')[0] for one in elements if one.startswith("<rect")}
    assert used == 18 * len(rows)
    assert len(rows) > 1
    assert legend(entries[:1], 16, 38, 600)[1] == 18
