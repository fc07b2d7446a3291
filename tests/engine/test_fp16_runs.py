"""Runs in fp16: overflow is skipped, told, and continued to the bit; what no loss scale mends ends the run."""

import json
from itertools import pairwise
from typing import Any

import pytest
from safetensors.torch import load_file

from drivetrain.archive.reader import Run, open_run
from runs_on_the_spot import Tiny

FP16 = ("precision.params_dtype=fp16", "training.eval_iters=0")
# The first scale is far too large for any gradient, and falls with each step until it fits.
FALLING = (*FP16, "precision.initial_loss_scale=4194304", "precision.hysteresis=1")


def of_steps(run: Run, *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(line[key] for key in keys) for line in run.metrics()]


@pytest.fixture(scope="module")
def fallen(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Any) -> Run:
    tiny = Tiny(tmp_path_factory.mktemp("fp16"), tiny_corpus)
    steps = ("training.train_iters=24", "checkpoint.save_interval=6", "checkpoint.keep_latest_k=4")
    document = tiny.train(*FALLING, *steps, "precision.loss_scale_window=4", "model.hidden_dropout=0.1")
    assert document["status"] == "finished"
    return open_run(document["run"])


def test_steps_that_overflow_are_counted_and_told(fallen: Run) -> None:
    rows = of_steps(
        fallen, "step", "optim/loss_scale", "optim/skipped_steps", "train/grad_norm", "train/loss"
    )
    skipped = [row[0] for row in rows if row[3] is None]
    events = [event for event in fallen.events() if event["kind"] == "skipped_step"]
    assert len(skipped) >= 3, "the first steps overflow"
    assert [event["step"] for event in events] == skipped
    assert rows[-1][2] == len(skipped)
    scale, count = 2.0**22, 0
    by_step = {event["step"]: event for event in events}
    for step, used, counted, _, loss in rows:
        assert used == scale, f"step {step}"
        assert loss > 0
        event = by_step.get(step)
        if event is not None:
            count += 1
            assert (event["loss_scale"], event["skipped_steps"]) == (used, count)
            scale = event["next_loss_scale"]
            assert scale == used / 2
        elif step + 1 <= len(rows) and rows[step][1] != used:
            assert rows[step][1] == 2 * used, "it grows by itself"
            scale = rows[step][1]
        assert counted == count
    assert any(later[1] > one[1] for one, later in pairwise(rows)), "and grows again"


def test_a_skipped_step_consumes_tokens_and_moves_the_schedule(fallen: Run) -> None:
    rows = of_steps(fallen, "step", "progress/tokens", "optim/lr")
    assert [tokens for _, tokens, _ in rows] == [step * 8 * 32 for step, *_ in rows]
    assert len({rate for *_, rate in rows}) == len(rows)


def test_training_goes_on_after_the_scale_has_fallen(fallen: Run) -> None:
    losses = [loss for (loss,) in of_steps(fallen, "train/loss")]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("step", [6, pytest.param(18, marks=pytest.mark.long)])
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(
    fallen: Run, tmp_path: Any, tiny_corpus: Any, step: int
) -> None:
    """At step 6 the scale is falling, at 18 the weights have moved."""
    tiny = Tiny(tmp_path, tiny_corpus)
    former = fallen.path / "checkpoints" / f"step-{step:08}"
    document = tiny.train(
        *(*FALLING, "training.train_iters=24", "precision.loss_scale_window=4", "model.hidden_dropout=0.1"),
        *(f"checkpoint.initial_load_path={former}", "checkpoint.initial_load_model_only=false"),
    )
    again = open_run(document["run"])
    keys = ("step", "train/loss", "train/grad_norm", "optim/loss_scale", "optim/skipped_steps", "optim/lr")
    assert of_steps(again, *keys) == of_steps(fallen, *keys)[step:]
    last = "checkpoints/step-00000024"
    for file in ("model/model.safetensors", "optimizer.safetensors"):
        one, other = (load_file(run.path / last / file) for run in (fallen, again))
        assert one.keys() == other.keys()
        assert all(bool((one[name] == value).all()) for name, value in other.items()), file


def test_overflow_at_the_least_scale_ends_the_run(tiny: Tiny) -> None:
    scale = ("precision.initial_loss_scale=1073741824", "precision.min_loss_scale=1073741824")
    done = tiny.run("train", str(tiny.file), *FP16, *scale, "checkpoint.save_interval=1")
    run = tiny.only_run()
    assert done.returncode == 1, done.stderr[-500:]
    summary = run.summary()
    assert summary is not None
    assert summary["status"] == "diverged"
    reason = str((run.end() or {})["reason"])
    assert "step 3: gradients overflowed in 3 steps in a row at the least loss scale" in reason
    assert "precision.min_loss_scale = 1.07374e+09" in reason


def test_a_loss_that_does_not_fit_fp16_ends_the_run_and_is_not_blamed_on_the_scale(tiny: Tiny) -> None:
    # The first update moves each weight by the learning rate: from then on hidden states are beyond 65504.
    done = tiny.run("train", str(tiny.file), *FP16, "precision.initial_loss_scale=1024", "optimizer.lr=10")
    assert done.returncode == 1, done.stderr[-500:]
    run = tiny.only_run()
    reason = str((run.end() or {})["reason"])
    assert "the loss was not finite in 3 steps in a row" in reason
    assert "precision.params_dtype=bf16" in reason
    assert not (run.path / "checkpoints").exists(), "nothing is saved of a model that computes nothing"


@pytest.mark.long
def test_compiled_blocks_train_in_fp16(tiny: Tiny) -> None:
    settings = (*FP16, "precision.initial_loss_scale=1024", "training.train_iters=6")
    plain = of_steps(open_run(tiny.train(*settings)["run"]), "train/loss")
    compiled = open_run(tiny.train(*settings, "fusion.compile=true")["run"])
    assert [loss for (loss,) in of_steps(compiled, "train/loss")] == pytest.approx(
        [loss for (loss,) in plain], rel=1e-3
    )
    assert {scale for (scale,) in of_steps(compiled, "optim/loss_scale")} == {1024.0}


@pytest.mark.long
def test_overfitting_one_batch_scales_the_loss_too(tiny: Tiny) -> None:
    settings = (*FALLING, "optimizer.lr=1e-2", "training.train_iters=400")
    done = tiny.run("train", str(tiny.file), *settings, "--overfit-batch", "--json")
    assert done.returncode == 0, done.stdout[-500:]
    assert json.loads(done.stdout)["learned"]


@pytest.mark.long
def test_the_gate_compares_fp16_with_fp32_by_the_statistical_tier(tiny: Tiny) -> None:
    settings = ("training.train_iters=20", "run.deterministic=true")
    paths = [
        tiny.train(*settings, f"precision.params_dtype={dtype}", options=("--probe",))["run"]
        for dtype in ("fp32", "fp16")
    ]
    done = tiny.run("compare", *paths, "--gate", "--json")
    verdict = json.loads(done.stdout)
    assert verdict["tier"] == "statistical"
    # Two runs of one seed decide nothing; that they may be compared is what is asked here.
    assert verdict["verdict"] == "inconclusive", verdict
    assert (open_run(paths[1]).path / "probe" / "gradients.safetensors").is_file()
