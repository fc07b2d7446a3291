"""A compiled run says where its graphs break, and what was compiled again."""

import json
from pathlib import Path

import pytest

from runs_on_the_spot import Tiny


@pytest.mark.long
def test_a_compiled_run_tells_its_graph_breaks_and_what_was_compiled_again(tiny: Tiny) -> None:
    done = tiny.run("train", str(tiny.file), "fusion.compile=true", "training.eval_iters=1", "--json")
    assert done.returncode == 0, done.stderr
    assert "Graph break" not in done.stderr, "what is kept for the record is not printed"
    summary = json.loads(done.stdout)
    told = summary["compilation"]
    (one,) = told["graph_breaks"]
    assert one["intended"]
    assert one["place"].startswith("drivetrain/engine/model/decoder.py:")
    # Before attention and after it, with gradients and without.
    assert told["graphs"] == 4
    assert told["recompilations"]
    assert all(again["expected"] for again in told["recompilations"])
    (record,) = [record for record in summary["optimisations"] if record["name"] == "compile"]
    assert (record["active"], record["reason"]) == (True, None)
    lines = (Path(summary["run"]) / "events.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["kind"] == "compilation"]
    assert [event["when"] for event in events][:1] == ["step"]
    assert events[0]["step"] == 1
    assert events[-1]["when"] == "end"
    assert events[-1]["graph_breaks"] == told["graph_breaks"]


def test_a_run_that_compiles_nothing_has_no_word_of_it(tiny: Tiny) -> None:
    done = tiny.run("train", str(tiny.file), "fusion.compile=false", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["compilation"] is None
    assert '"compilation"' not in (Path(summary["run"]) / "events.jsonl").read_text()
