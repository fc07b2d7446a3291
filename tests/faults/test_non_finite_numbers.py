"""Numbers that are not finite, and figures of nothing: what is kept, and what is said."""

import torch
from safetensors.torch import load_file

from drivetrain.archive.reader import open_run
from runs_on_the_spot import Tiny


def test_weights_that_a_non_finite_gradient_spoiled_replace_no_checkpoint(tiny: Tiny) -> None:
    done = tiny.run(
        "train",
        str(tiny.file),
        *("optimizer.lr=10", "training.clip_grad=0", "model.init_method_std=1", "training.train_iters=200"),
        *("precision.params_dtype=bf16", "optimizer.weight_decay=10"),
        *("checkpoint.save_interval=1", "checkpoint.keep_latest_k=1"),
    )
    assert done.returncode == 1, done.stderr[-500:]
    run = tiny.only_run()
    assert "is not finite" in str(run.end())
    (kept,) = (run.path / "checkpoints").glob("step-*")
    weights = load_file(kept / "model" / "model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())


def test_no_evaluation_leaves_no_figure(tiny: Tiny) -> None:
    document = tiny.train("training.eval_iters=0", "training.eval_interval=2", "training.train_iters=4")
    assert document["validation_loss"] is None
    assert document["reasons"]["validation_loss"] == "training.eval_iters is 0"
    assert not [event for event in open_run(document["run"]).events() if event["kind"] == "evaluation"]
