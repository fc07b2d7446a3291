"""The three charts of a diagnosis: what they hold, what they withhold, and how they are drawn."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from figure_words import assert_words_fit

from drivetrain.diagnose import Facts
from drivetrain.diagnose.chart_facts import Ceiling, ChartFacts, LoggedStep
from drivetrain.diagnose.charts import StepChart, StepRow, charts_of
from drivetrain.measure.account import Account, RankAccount, StepAccount, Window
from drivetrain.report.charts_svg import communication_svg, data_gap_svg, kernels_svg
from drivetrain.report.charts_text import charts_lines, middle_cut, short_name
from drivetrain.report.styled import plain
from drivetrain.trace.ranked_kernels import RankedKernel, RankedKernels, Work

MS = 1_000_000


def window(classes: Mapping[str, int], hidden: Mapping[str, int] | None = None, **withheld: Any) -> Window:
    """Classes in ms; of the hidden communication by group, in ms."""
    times = {name: ms * MS for name, ms in classes.items()}
    covered = None if hidden is None else {name: ms * MS for name, ms in hidden.items()}
    total = sum(times.values())
    exposed = sum(ns for name, ns in times.items() if name.startswith("communication"))
    figures: dict[str, Any] = {
        "busy_ns": total,
        "idle_ns": 0,
        "compute_ns": total - exposed,
        "communication_ns": exposed + sum((covered or {}).values()),
        "overlapped_communication_ns": 0,
        "exposed_communication_ns": exposed,
        "copy_ns": 0,
        "exposed_copy_ns": 0,
        **withheld,
    }
    return Window(total, classes=times, unexplained_ns=0, hidden_communication_ns=covered, **figures)


def job(*ranks: Sequence[Window], **more: Any) -> Facts:
    """Each rank's steps, the first of them recorded first."""
    accounts = tuple(
        RankAccount(
            number,
            "device",
            steps[0],
            tuple(StepAccount(5 + i, one, i, i + 1, i == 0) for i, one in enumerate(steps)),
        )
        for number, steps in enumerate(ranks)
    )
    return Facts(Account(health=(), ranks=accounts), "traces", **more)


WAITS = [window({"compute.matmul": 50, "data.loader": 50}), window({"compute.matmul": 90, "data.loader": 10})]


def logged(count: int, *, tags: tuple[str, ...] = (), wait_s: float = 0.02) -> list[LoggedStep]:
    return [LoggedStep(n + 1, 0.1, wait_s, 0.01, {"dp": 0.01}, {"dp": 0.03}, tags) for n in range(count)]


# ---- data gap ---------------------------------------------------------------------------------------------------


def test_the_data_gap_is_the_mean_over_ranks_and_leaves_the_first_recorded_step_out() -> None:
    none = [window({"compute.matmul": 100}), window({"compute.matmul": 100})]
    chart = charts_of(job(WAITS, none)).data_gap
    assert [(row.first, row.lost_ns, row.tags) for row in chart.rows] == [
        (5, 25 * MS, ("first recorded",)),
        (6, 5 * MS, ()),
    ]
    assert chart.share == pytest.approx(0.05)


def test_logged_steps_stand_before_the_few_that_were_profiled() -> None:
    steps = (
        *logged(1, tags=("compile",), wait_s=0.09),
        *[replace(one, step=one.step + 1) for one in logged(6)],
    )
    chart = charts_of(job(WAITS, charted=ChartFacts(logged=steps))).data_gap
    assert chart.source == "logged steps of rank 0"
    assert len(chart.rows) == 7
    assert chart.share == pytest.approx(0.2), "the step with a tag is no part of the mean"
    few = charts_of(job(WAITS, charted=ChartFacts(logged=tuple(logged(2))))).data_gap
    assert few.source == "profiled steps, rank 0"


def test_a_trace_without_a_loader_has_no_data_gap_and_says_so() -> None:
    chart = charts_of(job(WAITS, charted=ChartFacts(loader_recorded=False))).data_gap
    assert chart.rows == ()
    assert chart.share is None
    assert "no record of a data loader" in (chart.withheld or "")


def test_a_figure_that_the_account_withholds_is_not_drawn() -> None:
    broken = [window({"compute.matmul": 100}, idle_ns=None, exposed_communication_ns=None)]
    charts = charts_of(job(broken))
    assert charts.data_gap.withheld == "the account withholds it"
    assert charts.communication.withheld == "the account withholds it"


def test_a_trace_without_steps_is_one_row() -> None:
    whole = RankAccount(0, "device", WAITS[0], ())
    chart = charts_of(Facts(Account(health=(), ranks=(whole,)), "traces")).data_gap
    assert (len(chart.rows), chart.is_step, chart.share) == (1, False, 0.5)
    assert "no steps were found" in chart.source


# ---- communication ----------------------------------------------------------------------------------------------


def test_communication_is_split_by_group_into_exposed_and_hidden() -> None:
    one = window(
        {"compute.matmul": 60, "communication.dp.wait": 10, "communication.tp.transfer": 30}, {"dp": 20}
    )
    chart = charts_of(job([one, one], [one, one])).communication
    (_, row) = chart.rows
    assert row.by_group == {"dp": 10 * MS, "tp": 30 * MS}
    assert row.hidden_ns == {"dp": 20 * MS}
    assert chart.groups == ("dp", "tp")
    text = plain(charts_lines(charts_of(job([one, one]))))
    assert "exposed, mean 40.0% of a step: bad (good below 10%, bad above 25%)" in text
    assert "dp: 10.00 ms exposed, 20.00 ms hidden, 67% of it hidden" in text
    assert "tp: 30.00 ms exposed, 0.00 ms hidden" in text


def test_what_is_hidden_is_said_to_be_unknown_where_it_is() -> None:
    one = window({"compute.matmul": 60, "communication.dp.wait": 40})
    text = plain(charts_lines(charts_of(job([one, one]))))
    assert "dp: 40.00 ms exposed, how much is hidden is not known" in text


def test_without_collectives_the_chart_says_why_it_is_empty() -> None:
    chart = charts_of(job(WAITS)).communication
    assert "no collective was recorded" in (chart.withheld or "")
    assert charts_of(job(WAITS)).to_document()["communication"]["verdict"] is None


# ---- many steps -------------------------------------------------------------------------------------------------


def test_of_many_steps_neighbours_are_joined_and_the_worst_is_kept() -> None:
    steps = logged(1000)
    steps[700] = replace(steps[700], data_wait_s=0.08)
    chart = charts_of(job(WAITS, charted=ChartFacts(logged=tuple(steps)))).data_gap
    assert len(chart.rows) <= 240
    assert sum(row.count for row in chart.rows) == 1000
    worst = max(chart.merged(16), key=lambda row: row.worst_share)
    assert (worst.worst_step, worst.worst_share) == (701, pytest.approx(0.8))
    assert len(chart.merged(16)) <= 16
    assert "the most is 80.0%, step 701" in plain(
        charts_lines(charts_of(job(WAITS, charted=ChartFacts(logged=tuple(steps)))))
    )


def test_joined_rows_are_means_by_step_and_never_mix_tagged_steps_with_others() -> None:
    rows = (
        StepRow(1, 1, 1, 10.0, 8.0, {"dp": 8.0}, {}, 0.8, 1, ("compile",)),
        StepRow(2, 3, 2, 10.0, 2.0, {"dp": 2.0}, {"dp": 1.0}, 0.2, 2),
        StepRow(4, 4, 1, 10.0, 5.0, {}, {"dp": 4.0}, 0.5, 4),
    )
    tagged, plain_row = StepChart(rows, "x", 0.3).merged(2)
    assert (tagged.first, tagged.last, tagged.tags) == (1, 1, ("compile",))
    assert (plain_row.first, plain_row.last, plain_row.count) == (2, 4, 3)
    assert plain_row.lost_ns == pytest.approx(3.0)
    assert plain_row.by_group["dp"] == pytest.approx(4 / 3)
    assert plain_row.hidden_ns == {"dp": pytest.approx(2.0)}


# ---- kernels ----------------------------------------------------------------------------------------------------

GEMM = RankedKernel(
    "void gemm<float>(int)",
    "compute.matmul",
    8,
    40 * MS,
    0.8,
    Work(80 * MS, "FLOP", 40 * MS, "fp32"),
    None,
    None,
)
SOFTMAX = RankedKernel(
    "softmax",
    "compute.attention",
    4,
    10 * MS,
    0.2,
    None,
    "its FLOPs and bytes are not counted",
    "plain attention in place of flash",
)


def with_kernels(*kernels: RankedKernel, **more: Any) -> Facts:
    ranked = RankedKernels(kernels, 5, 50 * MS, 2, True)
    return job(WAITS, charted=ChartFacts(kernels=ranked, **more))


def test_kernels_have_their_time_of_a_step_and_their_rate_against_the_ceiling_of_their_dtype() -> None:
    ceilings = {"fp32": Ceiling(4e9, "sustained matrix product"), "bf16": Ceiling(1e15, "data sheet")}
    chart = charts_of(with_kernels(GEMM, SOFTMAX, products=ceilings)).kernels
    gemm, softmax = chart.kernels
    assert (gemm.calls, gemm.ns, gemm.of_ceiling) == (4, 20 * MS, pytest.approx(0.5))
    assert softmax.of_ceiling is None
    document = chart.to_document()["kernels"]
    assert document[0]["per_second"] == pytest.approx(2e9)
    assert document[1]["per_second"] is None
    assert document[1]["per_second_reason"] == "its FLOPs and bytes are not counted"
    assert document[1]["fallback"] == "plain attention in place of flash"


def test_a_rate_in_another_dtype_is_held_against_no_ceiling() -> None:
    chart = charts_of(with_kernels(GEMM, products={"bf16": Ceiling(4e9, "data sheet")})).kernels
    assert chart.kernels[0].of_ceiling is None
    assert chart.to_document()["kernels"][0]["ceiling_per_second"] is None


def test_the_text_of_kernels_marks_fallbacks_and_names_the_ceiling() -> None:
    facts = with_kernels(GEMM, SOFTMAX, products={"fp32": Ceiling(4e9, "sustained matrix product")})
    text = plain(charts_lines(charts_of(facts)))
    assert "2 GFLOP/s, 50%" in text
    assert "FALLBACK: plain attention in place of flash" in text
    assert "ceiling: 4 GFLOP/s in fp32, sustained matrix product" in text
    assert "3 others take the rest" in text


def test_one_reason_for_all_kernels_is_said_once() -> None:
    unknown = replace(GEMM, work=None, unknown="no shapes were recorded for it")
    text = plain(charts_lines(charts_of(with_kernels(unknown, replace(unknown, name="other")))))
    assert text.count("no shapes were recorded for it") == 1


def test_names_lose_what_tells_nothing_apart_before_they_are_cut() -> None:
    name = (
        "void at::native::elementwise_kernel<4, at::native::add<float>>(int, (anonymous namespace)::f(int))"
    )
    assert short_name(name) == "elementwise_kernel<4, add<float>>"
    assert short_name("aten::mm") == "aten::mm"
    assert len(middle_cut("x" * 200, 40)) == 40


# ---- widths and figures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_of_a_chart_is_wider_than_the_terminal(width: int) -> None:
    one = window({"compute.matmul": 60, "communication.dp.wait": 40}, {"dp": 20})
    ranked = RankedKernels((replace(GEMM, name="k" * 300), SOFTMAX), 5, 50 * MS, 2, True)
    facts = job([one] * 40, charted=ChartFacts(kernels=ranked))
    bars = [line for line in plain(charts_lines(charts_of(facts), width)).splitlines() if "█" in line]
    assert bars
    assert max(map(len, bars)) <= width
    names = [line for line in plain(charts_lines(charts_of(facts), width)).splitlines() if "kkk" in line]
    assert max(map(len, names)) <= width


def rectangles(svg: str) -> list[ElementTree.Element]:
    return [one for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("rect")]


def test_a_column_is_as_high_as_its_share_and_holds_its_figures() -> None:
    root = data_gap_svg(charts_of(job(WAITS)).data_gap)
    heights = {}
    for one in rectangles(root):
        title = next((child.text or "" for child in one), "")
        if title.startswith("step "):
            heights[title.split(":")[0]] = float(one.attrib["height"])
    assert heights["step 5"] == pytest.approx(5 * heights["step 6"], rel=0.01)
    assert "step 6: 10.00 of 100.00 ms, 10.0%" in root


def test_the_words_of_the_charts_stay_inside_their_figures() -> None:
    one = window({"compute.matmul": 60, "communication.dp.wait": 40}, {"dp": 20})
    facts = with_kernels(replace(GEMM, name="k" * 300), replace(SOFTMAX, fallback="f" * 90))
    charts = charts_of(replace(facts, account=job([one] * 40).account))
    for svg in (
        data_gap_svg(charts.data_gap),
        communication_svg(charts.communication),
        kernels_svg(charts.kernels),
    ):
        assert_words_fit(svg)


def test_the_borders_of_good_and_bad_are_drawn_where_they_belong() -> None:
    one = window({"compute.matmul": 60, "communication.dp.wait": 40}, {"dp": 20})
    root = communication_svg(charts_of(job([one, one])).communication)
    assert "good below 10%" in root
    assert "bad above 25%" in root
    assert "hidden 20.00 ms" in root


def test_a_figure_of_kernels_keeps_full_names_and_marks_fallbacks() -> None:
    facts = with_kernels(replace(GEMM, name="long_" * 40), SOFTMAX)
    root = kernels_svg(charts_of(facts).kernels)
    assert "long_" * 40 in root
    assert "fallback: plain attention in place of flash" in root
    ElementTree.fromstring(root)
