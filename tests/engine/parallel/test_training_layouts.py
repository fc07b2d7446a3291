"""``train`` on every layout gives the losses of one process: what is trained does not depend on who holds it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drivetrain.archive.origin import RunOrigin
from drivetrain.archive.reader import open_run
from drivetrain.config import LaunchFacts, load_config, violations
from drivetrain.engine.creation import create_run
from drivetrain.engine.data.corpus import ensure_corpus
from drivetrain.engine.parallel.process_group import Ranks
from drivetrain.engine.probe import GRADIENTS_FILE, LEAK_FILE
from rank_processes import on_kept_ranks
from runs_on_the_spot import Tiny, losses_of

STEPS = 4
COMMON = (
    f"training.train_iters={STEPS}",
    "training.micro_batch_size=1",
    "training.global_batch_size=8",
    "training.clip_grad=0.1",
    "model.num_layers=4",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "data.eod_mask_loss=true",
    "monitor.log_interval=1",
)


def run_rank(path: str) -> str:
    from drivetrain.engine.worker import work

    return work(Path(path), Ranks.from_environment()).outcome.status


def train(tiny: Tiny, world_size: int, overrides: Sequence[str], timeout: float = 300) -> dict[str, Any]:
    """Losses, gradient norms, the evaluation and the probe of a run on ``world_size`` ranks."""
    loaded = load_config(str(tiny.file), [*COMMON, *overrides])
    assert violations(loaded.config, LaunchFacts(world_size)) == []
    corpus = ensure_corpus(loaded.config.data, loaded.config.model)
    path = create_run(
        loaded, corpus, world_size=world_size, argv=["drivetrain"], origin=RunOrigin(probe=True)
    )
    assert set(on_kept_ranks(run_rank, world_size, str(path), timeout=timeout)) == {"finished"}
    run = open_run(path)
    metrics = list(run.metrics())
    summary = run.summary()
    assert summary is not None
    return {
        "losses": list(losses_of(run).values()),
        "norms": [line["train/grad_norm"] for line in metrics],
        "tokens": [line["progress/effective_tokens"] for line in metrics],
        "validation": summary["validation_loss"],
        "leak": json.loads((path / LEAK_FILE).read_text()),
        "gradients": load_file(path / GRADIENTS_FILE),
    }


TP, PP, ZERO = (
    "parallelism.tensor_model_parallel_size",
    "parallelism.pipeline_model_parallel_size",
    "parallelism.zero_stage",
)
LAYOUTS = {
    "dp2": (2, ()),
    "tp2": (2, (f"{TP}=2",)),
    "tp2-sp": (2, (f"{TP}=2", "parallelism.sequence_parallel=true")),
    "pp2": (2, (f"{PP}=2",)),
    "pp2-zbv": (2, (f"{PP}=2", "parallelism.pipeline_schedule=zbv")),
    "pp2-dualpipev": (2, (f"{PP}=2", "parallelism.pipeline_schedule=dualpipev")),
    "zero1": (2, (f"{ZERO}=1",)),
    "zero2": (2, (f"{ZERO}=2", "parallelism.reduce_each_micro_batch=true")),
    "zero3": (2, (f"{ZERO}=3",)),
    "tp2-dp2": (4, (f"{TP}=2",)),
    "tp4": (4, (f"{TP}=4", "parallelism.sequence_parallel=true")),
    "tp2-dp2-other-order": (4, (f"{TP}=2", "parallelism.rank_order=dp-pp-cp-tp", f"{ZERO}=1")),
    "tp2-zero3": (4, (f"{TP}=2", f"{ZERO}=3")),
    "tp2-sp-chunks": (2, (f"{TP}=2", "parallelism.sequence_parallel=true", "overlap.tp_chunks=5")),
    "tp2-zero3-chunks": (4, (f"{TP}=2", f"{ZERO}=3", "overlap.tp_chunks=3")),
    "tp2-pp2-zbv-chunks": (
        4,
        (f"{TP}=2", f"{PP}=2", "parallelism.pipeline_schedule=zbv", "overlap.tp_chunks=3"),
    ),
    "tp2-pp2": (4, (f"{TP}=2", f"{PP}=2", "parallelism.sequence_parallel=true")),
    "pp2-zero2": (4, (f"{PP}=2", f"{ZERO}=2", "parallelism.pipeline_schedule=interleaved_1f1b")),
    "pp2-dp2-zero-bubble": (4, (f"{PP}=2", "parallelism.pipeline_schedule=interleaved_zero_bubble")),
    "pp2-zero3": (4, (f"{PP}=2", f"{ZERO}=3")),
    "pp2-zero3-zero-bubble": (
        4,
        (f"{PP}=2", f"{ZERO}=3", "parallelism.pipeline_schedule=interleaved_zero_bubble"),
    ),
    "tp2-pp2-zero3": (
        8,
        (f"{TP}=2", f"{PP}=2", f"{ZERO}=3", 'parallelism.pipeline_model_parallel_layout="3,1"'),
    ),
    "hsdp": (4, (f"{ZERO}=3", "parallelism.hybrid_shard_size=2")),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> dict[str, Any]:
    return train(Tiny(tmp_path_factory.mktemp("single"), tiny_corpus), 1, ())


SHORT = {"dp2", "tp2-sp", "pp2", "zero1", "hsdp", "tp2-pp2-zero3"}
"""Each kind of parallelism, ZeRO 1, ZeRO 3 as HSDP, and three kinds together; the other layouts take minutes."""
EXHAUSTIVE = {"tp4", "tp2-sp-chunks", "tp2-zero3-chunks", "tp2-pp2-zbv-chunks"}
"""Each takes a quarter of a minute; chunks and four tensor ranks are in the parity tests."""


@pytest.mark.parametrize(
    "layout",
    [
        name
        if name in SHORT
        else pytest.param(name, marks=pytest.mark.exhaustive if name in EXHAUSTIVE else pytest.mark.long)
        for name in LAYOUTS
    ],
)
def test_losses_are_those_of_one_process(layout: str, tiny: Tiny, expected: dict[str, Any]) -> None:
    world_size, overrides = LAYOUTS[layout]
    found = train(tiny, world_size, overrides)
    assert found["tokens"] == expected["tokens"], "each token is counted once"
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert found["validation"] == pytest.approx(expected["validation"], rel=1e-6)
    assert found["leak"]["verdict"] == "clean", found["leak"]["why"]
    assert found["leak"]["control"] == pytest.approx(expected["leak"]["control"], rel=1e-3)
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        difference = torch.linalg.norm(found["gradients"][name] - gradient) / torch.linalg.norm(gradient)
        assert difference < 1e-5, name


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zero_bubble", "dualpipev"])
def test_code_that_another_schedule_left_in_the_compiler_s_cache_gives_a_zero_bubble_one_no_wrong_gradients(
    schedule: str, tiny: Tiny, expected: dict[str, Any]
) -> None:
    common = (f"{PP}=2", "fusion.compile=true")
    for name in ("1f1b", schedule):
        found = train(tiny, 2, (*common, f"parallelism.pipeline_schedule={name}"), timeout=800)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6), name
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5), name


@pytest.mark.long
def test_weights_saved_on_one_layout_are_the_start_of_another(tiny: Tiny) -> None:
    train(tiny, 4, (f"{TP}=2", f"{PP}=2"))
    (first,) = tiny.runs.iterdir()
    folder = first / "checkpoints" / f"step-{STEPS:08d}" / "model"
    again = f"checkpoint.initial_load_path={folder}"
    expected = train(tiny, 1, (again,))
    found = train(tiny, 2, (again, f"{ZERO}=3"))
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["losses"][0] < 5.9, "they are trained weights"


@pytest.mark.long
def test_a_layout_starts_its_own_processes_and_refuses_a_number_that_does_not_fit(tiny: Tiny) -> None:
    parts = (f"{TP}=2", "parallelism.sequence_parallel=true", "run.deterministic=true")
    summary = tiny.train(*COMMON, *parts)
    run = tiny.only_run()
    assert run.manifest["layout"]["world_size"] == 2
    assert run.manifest["layout"]["tensor_model_parallel_size"] == 2
    assert 0 < summary["communication_exposed_frac"] < 1
    tensor = summary["communication"]["groups"]["tp"]
    assert tensor["bytes"] == summary["communication_bytes_per_step"]["tp"]
    assert 0 < tensor["exposed_s"] <= summary["communication"]["exposed_s"]
    for layout in (parts, (f"{PP}=2", f"{ZERO}=1")):
        refused = tiny.run("train", str(tiny.file), *COMMON, *layout, "--nproc", "3")
        assert refused.returncode == 2
        assert "2 ranks hold one model, and 3 processes are no multiple of that" in refused.stderr
