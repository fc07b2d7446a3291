"""A ladder in words and pictures: every step with its figures, negative results too."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from drivetrain.archive.tunes import open_tune
from drivetrain.report.html_page import html_page
from drivetrain.report.ladder_figure import class_rungs, classes_text, rungs_svg, rungs_text, step_time_rungs
from drivetrain.report.ladder_report import tune_report
from drivetrain.report.ladder_rows import (
    LADDER_HEADINGS,
    change_in_words,
    duration_in_words,
    ladder_rows,
    ratio_in_words,
    removal_rows,
    totals,
    value_in_words,
    verdict_word,
)
from drivetrain.report.markdown import markdown
from report_samples import make_tune, tune_document

SVG = "{http://www.w3.org/2000/svg}"


def words(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def test_each_step_is_a_row_with_its_figures_and_its_verdict() -> None:
    rows = ladder_rows(tune_document()["steps"])
    assert [row.verdict for row in rows] == ["kept", "kept", "discarded", "discarded", "out of memory"]
    assert [row.tone for row in rows] == ["good", "good", "doubtful", "bad", "bad"]
    assert rows[0].cells == (
        "1",
        "data.num_workers=1",
        "data.loader",
        "1.333x",
        "1.321x [1.302, 1.339]",
        "4%",
        "+112.00 MB",
        "exact: pass",
        "kept",
    )
    assert len(rows[0].cells) == len(LADDER_HEADINGS)
    assert rows[4].change == "training.micro_batch_size=64 optimizer.lr=0.006"
    assert rows[4].measured == "-"
    assert rows[0].predicted_why == "the loader's class vanishes"
    assert (rows[1].predicted, rows[1].error) == ("-", "-")
    assert rows[1].predicted_why == "not predicted: shapes were not recorded"
    assert rows[0].gate_why == "20 steps equal to the bit"
    assert rows[3].gate_why == "", "the verdict's own reason says it"


@pytest.mark.parametrize(
    ("step", "word"),
    [
        ({}, "not finished"),
        ({"outcome": "finished", "kept": False}, "discarded"),
        ({"outcome": "finished", "kept": True}, "kept"),
        ({"outcome": "crash"}, "crashed"),
        ({"outcome": "hang"}, "hung"),
        ({"outcome": "refused"}, "refused"),
        ({"outcome": "diverged"}, "diverged"),
        ({"outcome": "interrupted"}, "interrupted"),
        ({"outcome": "something later"}, "something later"),
    ],
)
def test_what_became_of_a_trial_is_one_word(step: dict[str, Any], word: str) -> None:
    assert verdict_word(step)[0] == word


def test_a_step_that_is_still_written_is_dashes_and_no_figure() -> None:
    (row,) = ladder_rows([{"change": {"fusion.compile": True}}])
    assert row.cells == ("1", "fusion.compile=true", "-", "-", "-", "-", "-", "-", "not finished")


def test_taking_a_change_away_has_words_of_its_own() -> None:
    stays, gone = removal_rows(
        [{"outcome": "finished", "kept": True}, {"outcome": "finished", "kept": False}]
    )
    assert (stays.verdict, gone.verdict) == ("stays", "dropped")


def test_values_and_durations_read_as_they_are_written() -> None:
    assert change_in_words({"a.b": True, "c.d": 0.003, "e.f": None}) == "a.b=true c.d=0.003 e.f=-"
    assert value_in_words([1, "x", False]) == "[1, x, false]"
    assert ratio_in_words({"ratio": 1.5, "low": None, "high": None}) == "1.500x"
    assert [duration_in_words(seconds) for seconds in (0.84, 43.2, 250, 7500)] == [
        "0.8 s",
        "43 s",
        "4 min 10 s",
        "2 h 05 min",
    ]


def test_totals_say_only_what_the_document_says() -> None:
    found = dict(totals(tune_document()))
    assert found["final against baseline"] == "1.672x [1.640, 1.703]"
    assert found["time spent"] == "12 min 34 s of 20 min 00 s"
    assert found["device time spent"] == "0.195 device-hours"
    assert found["saved, each step"] == "192.9 ms"
    assert found["the same by the account's classes"] == "196.0 ms (+1.6% of what was measured)"
    assert found["saved, the whole run"] == "0.0107 device-hours"
    assert found["saved, a million steps"] == "53.6 device-hours"
    assert totals({}) == ()


def test_what_the_account_says_was_saved_is_shown_with_its_chance_or_with_why_it_is_withheld() -> None:
    saved = tune_document()["saved"]
    chance = dict(totals({"saved": {**saved, "account_chance_seconds": 0.012, "withheld": None}}))
    assert (
        chance["the same by the account's classes"]
        == "196.0 ms, by chance alone up to 12.0 ms off (+1.6% of what was measured)"
    )
    nothing = {"account_seconds_per_step": None, "deviation": None, "withheld": "another machine; tune again"}
    without = dict(totals({"saved": {**saved, **nothing}}))
    assert without["the same by the account's classes"] == "withheld: another machine; tune again"
    assert without["saved, each step"] == chance["saved, each step"]


def test_the_bars_are_the_step_times_of_what_was_kept_to_scale() -> None:
    rungs = step_time_rungs(tune_document())
    assert [(rung.label, round(rung.step_s, 9)) for rung in rungs] == [
        ("baseline", 0.480),
        ("+ data.num_workers=1", 0.3634),
        ("+ fusion.compile=true", 0.2889),
        ("final configuration", 0.2871),
    ]
    root = ElementTree.fromstring(rungs_svg(rungs))
    widths = [
        float(bar.attrib["width"]) for bar in root.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None
    ]
    for width, rung in zip(widths, rungs, strict=True):
        assert width / widths[0] == pytest.approx(rung.step_s / 0.480, abs=1e-3)
    text = rungs_text(rungs)
    assert "363.4 ms, 1.321x its parent's speed" in text
    assert "287.1 ms, 1.672x the baseline's" in text


def test_the_classes_are_those_of_the_profiled_rungs() -> None:
    rungs = class_rungs(tune_document())
    assert [label for label, _ in rungs] == [rung.label for rung in step_time_rungs(tune_document())]
    assert "baseline: 490.0 ms (compute 330.0 ms, data 120.0 ms, host 40.0 ms)" in classes_text(rungs)


def test_the_page_of_a_tune_holds_every_step_and_the_final_configuration(tmp_path: Path) -> None:
    tune = open_tune(make_tune(tmp_path))
    report = tune_report(tune)
    root = ElementTree.fromstring(html_page(report))
    text = words(root)
    for step in tune.document["steps"]:
        assert change_in_words(step["change"]) in text
        assert ratio_in_words(step["measured"]) in text
        assert step["why"] in text
    for fact in (
        'compile = true # 1.258x, gate "round-off": pass',
        "2 of 5",
        "0.741x [0.729, 0.754]",
        "fused_adamw: no effect above the noise of this machine",
        "training.train_iters=200",
        "1.672x",
        "stays",
        "steps per block",
        "gate: exact steps",
    ):
        assert fact in text, fact
    as_markdown = markdown(report)
    assert as_markdown.count("out of memory") == 1
    assert "1.321x \\[1.302, 1.339\\]" in as_markdown


def test_a_finished_ladder_without_a_configuration_says_so(tmp_path: Path) -> None:
    path = make_tune(
        tmp_path, final=None, final_gate={"tier": "exact", "verdict": "fail", "why": "other bits"}
    )
    text = words(ElementTree.fromstring(html_page(tune_report(open_tune(path)))))
    assert "No configuration came out of this ladder; its findings say why." in text
    assert "exact: fail" in text


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_a_ladder_that_did_not_finish_says_so(tmp_path: Path, status: str) -> None:
    path = make_tune(
        tmp_path, status=status, reason="out of budget", final=None, final_gate=None, speed_up=None
    )
    report = tune_report(open_tune(path))
    text = words(ElementTree.fromstring(html_page(report)))
    expected = "lost" if status == "running" else status
    assert f"This ladder is {expected}: out of budget" in text
    assert "There is no final configuration yet." in text


def test_a_ladder_at_its_very_beginning_has_a_page(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.mkdir()
    document = {"schema": 1, "tune": "t", "status": "running", "steps": [], "settings": {}}
    (path / "tune.json").write_text(json.dumps(document))
    text = words(ElementTree.fromstring(html_page(tune_report(open_tune(path)))))
    assert "No change has been tried." in text


@pytest.mark.parametrize(
    "damage",
    [
        {"steps": ["no step"]},
        {"steps": [{"measured": {"ratio": "fast"}}]},
        {"baseline": 3},
        {"saved": [1]},
        {"speed_up": {"ratio": "x"}},
        {"leave_one_out": 5},
    ],
)
def test_a_damaged_ladder_costs_only_what_is_damaged(tmp_path: Path, damage: dict[str, Any]) -> None:
    path = make_tune(tmp_path, **damage)
    text = words(ElementTree.fromstring(html_page(tune_report(open_tune(path)))))
    assert "The records behind this section are damaged" in text


def test_a_final_configuration_outside_the_tune_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret.toml").write_text("secret = 1")
    path = make_tune(tmp_path / "tunes", final={"config": "../../secret.toml", "step_s": 0.1})
    assert "secret = 1" not in html_page(tune_report(open_tune(path)))
