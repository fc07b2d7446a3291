"""Whole runs by operators: packed documents, another level half-way, and what the record says of them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from drivetrain.archive.optimisations import records_of
from drivetrain.archive.reader import Run, open_run
from drivetrain.config import load_config
from runs_on_the_spot import VOCABULARY, Tiny, losses_of

# Compiled code takes seconds; its numerics are tested elsewhere.
EAGER = tuple(f"fusion.{name}=eager" for name in ("rms_norm", "add_rms_norm", "rotary", "glu"))
STEADY = ("lr_schedule.lr_decay_style=constant", "lr_schedule.min_lr=0", "lr_schedule.lr_warmup_tokens=0")
LAYERS, MICRO_BATCHES, STEPS = 2, 2, 8
ROUNDING = 1e-4
"""Of a loss in fp32 after a few steps of another order of sums."""


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a corpus of many documents, most of them shorter than a sequence of the tiny model."""
    from drivetrain.engine.data.prepare import prepare

    folder = tmp_path_factory.mktemp("short")
    lines = Path(os.__file__).read_text(encoding="utf-8").splitlines()
    sources = []
    for number in range(0, 900, 3):
        source = folder / f"{number:04}.txt"
        source.write_text("\n".join(lines[number : number + 1 + number % 5]) + "\n", encoding="utf-8")
        sources.append(source)
    prepare(sources, folder / "short", vocab_size=VOCABULARY)
    return folder / "short"


def served(document: dict[str, Any], name: str) -> dict[str, int]:
    (found,) = [one for one in records_of(open_run(document["run"])) if one.name == name]
    assert found.requested
    assert found.active, found.reason
    return dict(found.served)


def event(run: Run, kind: str) -> dict[str, Any]:
    (found,) = [one for one in run.events() if one["kind"] == kind]
    return found


def assert_same_losses(one: dict[int, float], other: dict[int, float], steps: range) -> None:
    for step in steps:
        assert one[step] == pytest.approx(other[step], abs=ROUNDING), step


def test_packed_documents_train_by_operators_as_without_them(tmp_path: Path, short_documents: Path) -> None:
    from drivetrain.engine.ops_tuning.recording import packings_of

    tiny = Tiny(tmp_path, short_documents)
    kinds = packings_of(load_config(str(tiny.file)).config)
    assert max(kinds, key=lambda one: one.share).batch.cu_seqlens.diff().unique().numel() > 1, "packed"
    plain = tiny.train("training.eval_iters=0")
    fused = tiny.train("training.eval_iters=0", "fusion.level=all", *EAGER)
    runs = [open_run(document["run"]) for document in (plain, fused)]
    assert_same_losses(losses_of(runs[0]), losses_of(runs[1]), range(1, STEPS + 1))
    calls = STEPS * MICRO_BATCHES * LAYERS
    assert served(fused, "attention") == {"eager": calls}
    assert served(fused, "glu") == {"eager": calls}
    assert sum(served(fused, "linear_cross_entropy").values()) == STEPS * MICRO_BATCHES
    assert event(runs[0], "start")["attention"] == "torch SDPA"
    assert event(runs[1], "start")["attention"] == "the operator attention, auto"


def test_a_run_may_go_on_at_another_level_and_its_record_says_at_which(tiny: Tiny) -> None:
    off = tiny.train("training.eval_iters=0", "checkpoint.save_interval=4", *STEADY)
    half_way = Path(off["run"]) / "checkpoints" / "step-00000004"
    core = tiny.train(
        f"checkpoint.initial_load_path={half_way}",
        "checkpoint.initial_load_model_only=false",
        "training.eval_iters=0",
        "fusion.level=core",
        *EAGER,
        *STEADY,
    )
    before, after = open_run(off["run"]), open_run(core["run"])
    assert list(losses_of(after)) == [5, 6, 7, 8]
    assert_same_losses(losses_of(after), losses_of(before), range(5, 9))
    assert event(after, "start")["attention"] == "the operator attention, auto"
    (level,) = [one for one in records_of(after) if one.name == "fusion_level"]
    assert (level.requested, level.active, level.value) == (True, True, "core")
    assert served(core, "attention") == {"eager": 4 * MICRO_BATCHES * LAYERS}
    (former,) = [one for one in records_of(before) if one.name == "fusion_level"]
    assert not former.requested


def test_a_run_is_not_continued_at_another_level_in_place(tiny: Tiny) -> None:
    run = Path(tiny.train("training.train_iters=2", "training.eval_iters=0", *STEADY)["run"])
    (run / "summary.json").unlink()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    kept = [one for one in events if one["kind"] != "end"]
    (run / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in kept))
    done = tiny.run("train", str(run), "fusion.level=core")
    assert done.returncode == 2
    assert "'fusion.level=core' cannot be changed" in done.stderr


def test_calls_of_the_step_that_counts_memory_are_not_in_the_record(tiny: Tiny) -> None:
    document = tiny.train(
        "training.eval_iters=0", "fusion.glu=eager", "memory.device_memory_limit_bytes=1000000000"
    )
    assert event(open_run(document["run"]), "window")["what"] == "memory_count"
    assert served(document, "glu") == {"eager": STEPS * MICRO_BATCHES * LAYERS}
