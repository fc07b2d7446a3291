"""From ``ops tune`` to a run that reads what it wrote, with real processes."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from runs_on_the_spot import Tiny


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (path / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.long
def test_a_run_is_served_by_what_was_tuned_and_its_record_names_the_file(
    tmp_path: Path, tiny_corpus: Path
) -> None:
    tiny = Tiny(tmp_path, tiny_corpus)
    file = tmp_path / "ops.tuned.toml"
    tuned = tiny.run(
        *("ops", "tune", str(tiny.file), "--operator", "qkv_product", "--output", str(file), "--json"),
        timeout=600,
    )
    assert tuned.returncode == 0, tuned.stderr
    training, evaluation = json.loads(tuned.stdout)["calls"]
    for call in (training, evaluation):
        assert call["status"] == "tuned"
        timed = {one["backend"] for one in call["candidates"] if one["seconds"] is not None}
        assert timed == {"eager", "joined"}
    assert ", gradient" in training["call"]
    assert ", gradient" not in evaluation["call"]
    # Nobody prefers it where nothing was tuned: that it serves shows that the file was read.
    text = file.read_text()
    file.write_text(re.sub(r'^backend = ".*"$', 'backend = "joined"', text, flags=re.MULTILINE))
    tiny.train("fusion.qkv_product=auto", f"fusion.tuned_file={file}")
    run = tiny.only_run()
    (read,) = events(run.path, "tuned_file")
    assert read["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert [one for one in events(run.path, "warning") if "tuned" in json.dumps(one)] == []
    served = [one["served"] for one in events(run.path, "optimisation") if one["name"] == "qkv_product"]
    # Evaluation wants no gradients, and is a call of its own: 2 global batches after the last step.
    assert served[-1] == {"joined": (8 + 2) * 2 * 2}
