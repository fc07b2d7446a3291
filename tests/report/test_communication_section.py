"""The report's section on communication: what the summary and the ranks' own files say, and what is wrong with them."""

from pathlib import Path
from typing import Any

import pytest

from drivetrain.archive.collective_waits import waits_of_run
from drivetrain.archive.reader import open_run
from drivetrain.archive.writer import RankLog
from drivetrain.errors import RunError
from drivetrain.measure.overlap import FlightRecord, rows_of
from drivetrain.report.markdown import markdown
from drivetrain.report.run_records import read_records
from drivetrain.report.run_report import run_report
from report_samples import finished_run

MS = 1_000_000
COMMUNICATION: dict[str, Any] = {
    "steps": 38,
    "step_s": 0.3,
    "overlap_frac": 0.75,
    "exposed_frac": 0.05,
    "groups": {
        "dp": {
            "calls": 5.0,
            "bytes": 7_800_000.0,
            "wire_s": 0.06,
            "hidden_s": 0.045,
            "exposed_s": 0.015,
            "idle_s": 0.225,
        }
    },
    "rule": "the rule of it",
}


def page_of(path: Path) -> str:
    return markdown(run_report(read_records(open_run(path))))


def section_of(path: Path) -> str:
    page = page_of(path)
    assert "## Communication" in page
    return page.partition("## Communication")[2].partition("\n## ")[0]


def flight(issued: int, completed: int, *, sequence: int = 0) -> FlightRecord:
    return FlightRecord("dp", "all_reduce", 100, "0", sequence, issued, completed)


def log(path: Path, rank: int, steps: dict[int, list[FlightRecord]], **clock: Any) -> None:
    known = {"offset_ns": 0, "error_ns": 0, "at_ns": 0, "host": "here", **clock}
    lines = RankLog(path, segment=0, rank=rank, start_step=1)
    for number, (step, flights) in enumerate(steps.items()):
        queues = {"0": [0, 1]} if number == 0 else {}
        kept = {"clock": known, "lanes": 2, "queues": queues, "flights": rows_of(flights)}
        lines.log(step, {"time/step_s": 0.3}, collectives=kept)
    lines.close()


def test_the_summary_s_figures_are_shown_by_group(tmp_path: Path) -> None:
    section = section_of(finished_run(tmp_path, summary_changes={"communication": COMMUNICATION}))
    assert "75.0%" in section
    assert "5.0% of a step" in section
    (row,) = [line for line in section.splitlines() if line.startswith("| dp ")]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "dp",
        "5",
        "7,800,000",
        "60.00",
        "45.00",
        "15.00",
        "225.00",
    ]
    assert "The rule of it." in section


def test_what_is_not_known_says_why(tmp_path: Path) -> None:
    group = {**COMMUNICATION["groups"]["dp"], "hidden_s": None, "idle_s": None}
    changes = {
        "communication": {**COMMUNICATION, "overlap_frac": None, "groups": {"pp": group}},
        "reasons": {"communication.overlap_frac": "schedules wait themselves"},
    }
    section = section_of(finished_run(tmp_path, summary_changes=changes))
    assert "unknown: schedules wait themselves" in section
    assert section.count("unknown") == 3


def test_a_run_of_one_process_has_no_such_section(tmp_path: Path) -> None:
    assert "## Communication" not in page_of(finished_run(tmp_path, summary_changes={"communication": None}))


def test_waits_for_the_last_rank_are_those_of_steady_steps_that_all_ranks_logged(tmp_path: Path) -> None:
    path = finished_run(tmp_path)
    tagged = {line["step"] for line in open_run(path).metrics() if line["tags"]}
    assert 1 in tagged
    steady = [step for step in range(1, 41) if step not in tagged][:3]
    log(path, 0, {step: [flight(0, 30 * MS, sequence=step)] for step in (1, *steady)})
    log(path, 1, {step: [flight(20 * MS, 30 * MS, sequence=step)] for step in (1, *steady[:2])})
    waits = waits_of_run(open_run(path))
    assert waits is not None
    assert waits.steps == 2
    (group,) = waits.groups
    assert group.wait_ns == {0: 40 * MS, 1: 0}
    section = section_of(path)
    assert "| dp | 0, 1 | 2 | 10.00 | 10.00 | 0.00 | rank 1, 100% |" in " ".join(section.split(" "))


def test_what_is_under_way_from_one_step_to_the_next_counts_once(tmp_path: Path) -> None:
    path = finished_run(tmp_path)
    tagged = {line["step"] for line in open_run(path).metrics() if line["tags"]}
    first, second = [step for step in range(1, 41) if step not in tagged][:2]
    for rank, issued in ((0, 0), (1, 20 * MS)):
        both = flight(issued, 30 * MS, sequence=7)
        own = flight(issued + 40 * MS, 70 * MS, sequence=8)
        log(path, rank, {first: [both], second: [both, own]})
    waits = waits_of_run(open_run(path))
    assert waits is not None
    (group,) = waits.groups
    assert group.collectives == 2
    assert group.wait_ns == {0: 40 * MS, 1: 0}


def test_between_hosts_the_error_grows_with_the_time_since_clocks_were_compared(tmp_path: Path) -> None:
    path = finished_run(tmp_path)
    step = next(line["step"] for line in open_run(path).metrics() if not line["tags"])
    later = 1_000_000 * MS  # a quarter of an hour
    flights = {step: [flight(later, later + 30 * MS)]}
    log(path, 0, flights)
    log(path, 1, flights, host="elsewhere", error_ns=7)
    waits = waits_of_run(open_run(path))
    assert waits is not None
    assert waits.groups[0].error_ns == 7 + 100 * MS


def test_a_run_whose_ranks_wrote_nothing_has_no_waits(tmp_path: Path) -> None:
    assert waits_of_run(open_run(finished_run(tmp_path))) is None


@pytest.mark.parametrize(
    "damage", [{"flights": [["dp"]]}, {"clock": {}}, {"queues": 3}, {"lanes": None}, {"clock": "x"}]
)
def test_damaged_lines_are_named_and_cost_the_report_one_section(
    tmp_path: Path, damage: dict[str, Any]
) -> None:
    path = finished_run(tmp_path)
    lines = RankLog(path, segment=0, rank=3, start_step=1)
    clock = {"offset_ns": 0, "error_ns": 0, "at_ns": 0, "host": "here"}
    kept = {"clock": clock, "lanes": 2, "queues": {"0": [0, 1]}, "flights": rows_of([flight(0, 1)]), **damage}
    lines.log(7, {"time/step_s": 0.3}, collectives=kept)
    lines.close()
    with pytest.raises(RunError, match="rank 3 in step 7 are damaged"):
        waits_of_run(open_run(path))
    assert "are damaged" in section_of(path)
