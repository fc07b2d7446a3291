"""The report of a run: what the page says is what the records hold, whatever is missing or hostile in them."""

import dataclasses
import json
import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from drivetrain.archive.atomic import write_json
from drivetrain.archive.dimensions import DIMENSIONS, format_value
from drivetrain.archive.reader import open_run
from drivetrain.archive.writer import RunWriter, append_event
from drivetrain.report.blocks import Report
from drivetrain.report.html_page import html_page
from drivetrain.report.markdown import markdown
from drivetrain.report.run_records import read_records
from drivetrain.report.run_report import run_report, summary_document
from report_samples import (
    CLASSES,
    PROVENANCE,
    RECORDS,
    account_document,
    finished_run,
    log_steps,
    loss_at,
    make_run,
    make_tune,
    summary,
    tune_document,
)


def report_of(path: Path) -> Report:
    return run_report(read_records(open_run(path)))


def parsed(page: str) -> ElementTree.Element:
    """The page as XML; it is written so that both kinds of parser take it."""
    return ElementTree.fromstring(page)


def words(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def page_of(path: Path) -> ElementTree.Element:
    return parsed(html_page(report_of(path)))


def section_of(root: ElementTree.Element, identifier: str) -> ElementTree.Element:
    (found,) = (each for each in root.iter("section") if each.get("id") == identifier)
    return found


def rows_of(element: ElementTree.Element) -> list[list[str]]:
    return [
        [words(cell) for cell in row.findall("td")]
        for row in element.iter("tr")
        if row.find("td") is not None
    ]


def test_each_figure_on_the_page_is_the_summary_s_with_its_rule_or_the_reason_why_it_is_unknown(
    tmp_path: Path,
) -> None:
    path = finished_run(tmp_path)
    written = summary()
    rows = {row[1]: row for row in rows_of(section_of(page_of(path), "five-dimensions"))}
    assert list(rows) == [figure.label for figure in DIMENSIONS]
    for figure in DIMENSIONS:
        value: Any = written
        for part in figure.key.split("."):
            value = value[part]
        assert rows[figure.label][2].removesuffix(" nat/token") == format_value(value, figure.unit)
        assert rows[figure.label][3], figure
    assert rows["MFU"][3] == "matmul + attention, causal half; peak: measured sustained matrix product"
    assert rows["exposed wait"][3] == "unknown: one process: nothing to communicate"
    assert "steps 4-40 of steady state" in words(section_of(page_of(path), "five-dimensions"))


def test_the_page_is_one_well_formed_file_without_script_or_anything_from_elsewhere(tmp_path: Path) -> None:
    page = html_page(report_of(finished_run(tmp_path)))
    root = parsed(page)
    names = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert not names & {"script", "link", "img", "iframe", "object", "image", "use", "foreignObject"}
    for element in root.iter():
        for attribute, value in element.attrib.items():
            assert not attribute.lower().startswith("on"), attribute
            assert attribute not in ("src", "href") or value.startswith("#")
    assert "url(" not in page
    assert "@import" not in page
    assert len(list(root.iter("{http://www.w3.org/2000/svg}svg"))) == 3


def test_links_of_the_page_lead_to_its_sections(tmp_path: Path) -> None:
    root = page_of(finished_run(tmp_path))
    targets = [link.attrib["href"].removeprefix("#") for link in root.iter("a")]
    assert targets == [section.attrib["id"] for section in root.iter("section")]


HOSTILE = "<script>alert('x')</script>&|`*[a](b)\x00\ud8ff\"'"


def test_hostile_names_are_shown_and_never_become_markup(tmp_path: Path) -> None:
    provenance = {
        **PROVENANCE,
        "command": ["drivetrain", HOSTILE],
        "host": HOSTILE,
        "environment": {"A": HOSTILE},
    }
    path = finished_run(
        tmp_path,
        provenance=provenance,
        devices={"type": "cpu", "name": HOSTILE, "count": 1},
        dataset={"fingerprint": HOSTILE, "prefix": HOSTILE},
        parent=HOSTILE,
        change={HOSTILE: HOSTILE},
        records=(dataclasses.replace(RECORDS[0], name=HOSTILE, value=HOSTILE, active=False, reason=HOSTILE),),
        summary_changes={"findings": [HOSTILE]},
    )
    manifest = json.loads((path / "run.json").read_text())
    write_json(path / "run.json", {**manifest, "name": HOSTILE, "id": HOSTILE, "created": HOSTILE})
    append_event(path, "warning", message=HOSTILE)
    page = html_page(report_of(path))
    root = parsed(page)
    assert "<script" not in page.lower()
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    assert words(root).count("<script>alert('x')</script>&|`*[a](b)") >= 12
    rendered = MarkdownIt("commonmark").enable("table").render(markdown(report_of(path)))
    assert "<script" not in rendered
    assert "<a " not in rendered
    assert rendered.count("&lt;script&gt;") >= 12


def test_the_waterfall_is_that_of_the_newest_window(tmp_path: Path) -> None:
    path = finished_run(tmp_path)
    section = section_of(page_of(path), "where-the-time-went")
    made = account_document()["windows"][-1]["account"]["waterfall"]
    tips = [words(title) for title in section.iter("{http://www.w3.org/2000/svg}title")]
    for bar in made["bars"]:
        assert f"{bar['name']}: {bar['points']:.2f}" in tips
    rows = {row[0]: row[1] for row in rows_of(section)}
    for name, milliseconds in CLASSES.items():
        assert rows[name] == f"{2 * milliseconds:,.3f}"
    assert rows["communication"] == "withheld"
    assert "step 10 is the first recorded one" in words(section)


def test_without_an_account_the_page_says_how_to_make_one(tmp_path: Path) -> None:
    path = finished_run(tmp_path, with_account=False)
    section = words(section_of(page_of(path), "where-the-time-went"))
    assert f"drivetrain profile {path / 'config.toml'}" in section


@pytest.mark.parametrize(
    "damage",
    [
        lambda account: account.update(waterfall={"bars": [{}]}),
        lambda account: account.update(ranks=[{"rank": 0}]),
        lambda account: account.pop("health"),
        lambda account: account["waterfall"].update(bars=[]),
    ],
)
def test_a_damaged_account_is_said_and_costs_only_its_section(tmp_path: Path, damage: Any) -> None:
    path = finished_run(tmp_path)
    document = account_document()
    damage(document["windows"][0]["account"])
    (path / "account.json").write_text(json.dumps(document))
    root = page_of(path)
    assert "The account of this run is damaged" in words(section_of(root, "where-the-time-went"))
    assert len(rows_of(section_of(root, "five-dimensions"))) == len(DIMENSIONS)


def test_without_a_summary_the_figures_come_from_the_logged_steps_and_the_page_says_so(
    tmp_path: Path,
) -> None:
    path = finished_run(tmp_path)
    (path / "summary.json").unlink()
    records = read_records(open_run(path))
    section = words(section_of(page_of(path), "five-dimensions"))
    assert "Computed from the logged steps" in section
    steady = [line["time/step_s"] for line in open_run(path).metrics() if not line["tags"]]
    assert format_value(max(steady), "s") in section
    document = summary_document(records)
    assert document["source"] == "metrics"
    assert document["step_time_s"]["max"] == max(steady)
    assert document["final_loss"] == pytest.approx(loss_at(40))
    assert "not in the logged steps" in document["reasons"]["mfu"]


def test_the_json_document_is_the_summary_with_the_run_s_status_and_place(tmp_path: Path) -> None:
    path = finished_run(tmp_path)
    document = summary_document(read_records(open_run(path)))
    stored = json.loads((path / "summary.json").read_text())
    assert {key: document[key] for key in stored if key != "run"} == {
        key: value for key, value in stored.items() if key != "run"
    }
    assert document["run"] == str(path)
    assert document["source"] == "summary"
    assert not document["partial"]


PIECES = ("config.toml", "summary.json", "events.jsonl", "heartbeat.json", "account.json", "segments")


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("damage", ["gone", "garbage", "another version", "a folder"])
def test_a_piece_that_is_missing_damaged_or_foreign_costs_no_report(
    tmp_path: Path, piece: str, damage: str
) -> None:
    path = finished_run(tmp_path)
    target = path / piece if piece != "segments" else path / "segments" / "0000" / "metrics.jsonl"
    target.unlink()
    if damage == "garbage":
        target.write_bytes(b"\x00\xff{not json\nnor a line\n")
    elif damage == "another version":
        target.write_text(
            'schema = 99\n[later]\nkey = "b"\n' if piece == "config.toml" else '{"schema":99}\n'
        )
    elif damage == "a folder":
        target.mkdir()
    report = report_of(path)
    root = parsed(html_page(report))
    assert markdown(report)
    assert section_of(root, "provenance") is not None
    if damage in ("garbage", "a folder") and piece not in ("heartbeat.json", "account.json"):
        assert "cannot be read" in words(root) or piece == "config.toml"


def test_a_directory_with_nothing_but_its_manifest_has_a_report(tmp_path: Path) -> None:
    path = make_run(tmp_path).path
    for entry in list(path.iterdir()):
        if entry.name != "run.json":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    root = page_of(path)
    assert "lost" in words(root)
    assert "No step has been logged." in words(section_of(root, "loss-and-gradient-norm"))
    assert "This run holds no optimisation records." in words(section_of(root, "optimisations"))


def test_a_run_that_is_still_written_is_reported_as_running_and_partial(tmp_path: Path) -> None:
    with make_run(tmp_path) as writer:
        log_steps(writer, 1, 7)
        root = page_of(writer.path)
        document = summary_document(read_records(open_run(writer.path)))
    assert "still running" in words(root)
    assert "step 7 of 40" in words(root)
    assert document["status"] == "running"
    assert document["partial"]


def test_a_killed_restart_s_summary_is_not_taken_for_the_run_s(tmp_path: Path) -> None:
    path = finished_run(tmp_path)
    with RunWriter.resume(path) as writer:
        log_steps(writer, 31, 45)
    root = page_of(path)
    assert "2 segments" in words(root)
    assert "there is no summary of the last segment" in words(section_of(root, "five-dimensions"))
    assert "segment 1 begins with step 31" in words(section_of(root, "events"))
    lines = [
        element.attrib
        for element in section_of(root, "step-time").iter("{http://www.w3.org/2000/svg}line")
        if element.get("stroke-dasharray") == "4 3"
    ]
    assert len(lines) == 2, "one in the legend, one through the panel"


def diverged_run(folder: Path) -> Path:
    with make_run(folder) as writer:
        log_steps(
            writer,
            1,
            40,
            loss=lambda step: loss_at(step) if step < 33 else math.inf if step == 33 else math.nan,
        )
        writer.event("alarm", message="loss six deviations above its mean")
        writer.event("end", status="failed", reason="the loss at step 33 is not finite")
    return writer.path


def test_a_diverged_run_says_so_and_marks_every_value_that_is_not_finite(tmp_path: Path) -> None:
    root = page_of(diverged_run(tmp_path))
    assert "diverged" in words(root)
    assert "the loss at step 33 is not finite" in words(root)
    section = section_of(root, "loss-and-gradient-norm")
    assert "The loss is not finite at 8 of 40 logged steps, first at step 33 (infinite)." in words(section)
    marks = [words(each) for each in section.iter("{http://www.w3.org/2000/svg}path")]
    steps = ["step 33: Infinity", *(f"step {step}: NaN" for step in range(34, 41))]
    assert marks == [*steps, "step 40: NaN"], "the last one is the evaluation's"
    assert "alarm: loss six deviations above its mean" in words(section_of(root, "events"))
    figures = {row[1]: row[2] for row in rows_of(section_of(root, "five-dimensions"))}
    assert figures["final loss"] == "NaN nat/token" or figures["final loss"] == "NaN"


def test_tagged_steps_evaluations_and_checkpoints_are_marked_on_the_curves(tmp_path: Path) -> None:
    section = section_of(page_of(finished_run(tmp_path)), "loss-and-gradient-norm")
    tips = [words(title) for title in section.iter("{http://www.w3.org/2000/svg}title")]
    assert "warmup: steps 1-3" in tips
    assert "compile: step 1" in tips
    assert "checkpoint: step 40" in tips
    for step in (10, 20, 30, 40):
        assert f"held-out loss, step {step}: {loss_at(step) + 0.1:.6g}" in tips


def test_a_step_that_compiled_does_not_flatten_the_step_times_and_keeps_its_value(tmp_path: Path) -> None:
    path = finished_run(tmp_path)
    section = section_of(page_of(path), "step-time")
    first = open_run(path).metrics()[0]["time/step_s"]
    tips = [words(title) for title in section.iter("{http://www.w3.org/2000/svg}title")]
    assert f"step, step 1: {first:.6g}, beyond the scale" in tips
    assert "steps beyond the scale" in words(section)


def test_what_changed_against_the_parent_is_declared_and_found(tmp_path: Path) -> None:
    parent = finished_run(tmp_path, "baseline", step_s=0.4)
    child = finished_run(
        tmp_path,
        "trial",
        step_s=0.2,
        overrides=("training.train_iters=40", "data.num_workers=1", "optimizer.lr=0.001"),
        parent=parent.name,
        change={"data.num_workers": 1, "fusion.compile": False},
    )
    root = page_of(child)
    section = section_of(root, "what-changed")
    rows = {row[0]: row[1:] for row in rows_of(section)}
    assert rows["data.num_workers"] == ["0", "1", "yes"]
    assert rows["optimizer.lr"] == ["0.003", "0.001", "no"]
    assert "Differs without being declared: optimizer.lr" in words(section)
    assert "Declared, and yet the same in both: fusion.compile." in words(section)
    figures = {row[1]: row for row in rows_of(section_of(root, "five-dimensions"))}
    assert figures["step, median"][2:5] == ["200.0 ms", "400.0 ms", "0.500x"]
    assert "parent, smoothed" in words(section_of(root, "loss-and-gradient-norm"))


def test_a_parent_that_was_renamed_is_found_by_its_id_and_one_that_is_gone_is_named(tmp_path: Path) -> None:
    parent = finished_run(tmp_path, "baseline")
    child = finished_run(tmp_path, "trial", parent=parent.name, change={"data.num_workers": 1})
    parent.rename(tmp_path / "another-name")
    assert "another-name" in words(section_of(page_of(child), "what-changed"))
    shutil.rmtree(tmp_path / "another-name")
    section = words(section_of(page_of(child), "what-changed"))
    assert f"the parent run {parent.name} is not in" in section
    assert "data.num_workers=1" in section


def test_what_was_requested_without_effect_stands_out(tmp_path: Path) -> None:
    root = page_of(finished_run(tmp_path))
    main = root.find("body/main")
    assert main is not None
    first = main[0]
    assert first.get("class") == "bad"
    assert words(first) == "Requested and without effect: data_workers, fused_adamw."
    rows = rows_of(section_of(root, "optimisations"))
    assert [row[0] for row in rows] == ["data_workers", "fused_adamw", "compile", "bf16"]
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name["fused_adamw"] == [
        "optimizer.fused=true",
        "yes",
        "no",
        "no window was profiled",
        "no fused kernel for this device",
    ]
    assert by_name["compile"][3].startswith("shown")
    assert "40 compiled graphs ran" in by_name["compile"][3]


def test_a_request_without_effect_is_told_once_above_the_figures(tmp_path: Path) -> None:
    finding = "optimizer.fused = true is not in effect: no fused kernel for this device"
    main = page_of(finished_run(tmp_path, summary_changes={"findings": [finding]})).find("body/main")
    assert main is not None
    assert [words(each) for each in main[:2]] == [
        "Requested and without effect: data_workers.",
        f"Finding: {finding}",
    ]


def test_a_run_of_a_ladder_shows_the_ladder_and_its_own_place_in_it(tmp_path: Path) -> None:
    tune = make_tune(tmp_path / "tunes")
    path = finished_run(tune / "runs")
    document = tune_document()
    document["steps"][3]["blocks"][1]["run"] = str(Path("runs") / path.name)
    (tune / "tune.json").write_text(json.dumps({"schema": 1, **document}))
    section = section_of(page_of(path), "the-ladder")
    assert "in step 4 as a block of the candidate" in words(section)
    assert len(rows_of(section)) == len(document["steps"])
    elsewhere = finished_run(tmp_path / "runs")
    assert not [each for each in page_of(elsewhere).iter("section") if each.get("id") == "the-ladder"]


def test_provenance_says_where_the_run_came_from(tmp_path: Path) -> None:
    section = words(section_of(page_of(finished_run(tmp_path)), "provenance"))
    for fact in (
        "1" * 40,
        "dirty: uncommitted changes, SHA-256 of the diff " + "d" * 64,
        "untracked files: 1",
        "torch 2.13.0, numpy 2.3.0",
        "drivetrain train llama-2m training.train_iters=40",
        "a-host",
        "f1f2f3",
        "1234",
        "OMP_NUM_THREADS",
        "train_iters = 40",
    ):
        assert fact in section, fact
    assert "triton" not in section


def test_findings_of_the_summary_stand_above_everything(tmp_path: Path) -> None:
    path = finished_run(tmp_path, records=(), summary_changes={"findings": ["MFU is 120%: above 100%"]})
    main = page_of(path).find("body/main")
    assert main is not None
    assert words(main[0]) == "Finding: MFU is 120%: above 100%"


def test_many_events_are_cut_and_the_number_of_what_is_left_out_is_said(tmp_path: Path) -> None:
    with make_run(tmp_path) as writer:
        log_steps(writer, 1, 2)
        for number in range(500):
            writer.event("warning", message=f"warning {number} of many")
    section = section_of(page_of(writer.path), "events")
    assert "and 480 more warnings and alarms" in words(section)
    assert len(rows_of(section)) == 200
    assert re.search(r"All 501 events, 301 in the middle left out", words(section))


def test_with_a_logging_interval_restarts_stay_and_each_figure_says_what_a_line_is(tmp_path: Path) -> None:
    with make_run(tmp_path, overrides=("training.train_iters=40", "monitor.log_interval=10")) as writer:
        for start, logged in ((1, (10, 20)), (25, (30, 40))):
            writer.open_segment(start)
            for step in logged:
                writer.log_metrics(step, {"train/loss": 2.0, "train/grad_norm": 1.0, "time/step_s": 0.3})
    root = page_of(writer.path)
    loss, times = section_of(root, "loss-and-gradient-norm"), section_of(root, "step-time")
    for section in (loss, times):
        assert "restart" in [element.text for element in section.iter("{http://www.w3.org/2000/svg}text")]
    assert "Each is of that one step (every 10); the steps between were not logged." in words(loss)
    assert "mean" not in words(loss)
    assert "Each is the mean of the steps since the one before (every 10)." in words(times)
