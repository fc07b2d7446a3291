"""Whole runs whose gradients and parameters travel in another way: the same training, or a difference that is told."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drivetrain.archive.reader import Run
from runs_on_the_spot import Tiny, losses_of

COMMON = ("overlap.bucket_size_mb=0.05", "training.eval_interval=3", "monitor.log_interval=1")


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint."""
    newest = max((run.path / "checkpoints").glob("step-*"))
    return {
        name: value
        for file in sorted((newest / "model").glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def summary_of(run: Run) -> dict[str, Any]:
    summary = run.summary()
    assert summary is not None
    return summary


@pytest.mark.parametrize(
    ("stage", "way"),
    [
        (1, "overlap.overlap_param_gather=true"),
        pytest.param(2, "overlap.overlap_param_gather=true", marks=pytest.mark.long),
        pytest.param(3, "overlap.prefetch_blocks=1", marks=pytest.mark.long),
    ],
)
def test_a_run_is_to_the_bit_the_same_whenever_its_parameters_travel(
    tiny: Tiny, stage: int, way: str
) -> None:
    layout = (
        *COMMON,
        f"parallelism.zero_stage={stage}",
        # After each step somebody looks at the parameters: a comparison, a checkpoint, an evaluation, or nobody.
        "monitor.check_weight_hash_across_dp_replicas_interval=4",
        "checkpoint.save_interval=5",
    )
    plain = tiny.train_on_ranks(2, *layout)
    behind = tiny.train_on_ranks(2, *layout, way)
    assert losses_of(behind) == losses_of(plain)
    for key in ("validation_loss", "communication_bytes_per_step"):
        assert summary_of(behind)[key] == summary_of(plain)[key]
    expected, found = weights_of(plain), weights_of(behind)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_run_whose_gradients_travel_in_bf16_hands_over_half_and_tells_how_far_off_they_are(
    tiny: Tiny,
) -> None:
    plain = tiny.train_on_ranks(2, *COMMON)
    narrow = tiny.train_on_ranks(2, *COMMON, "precision.grad_reduce_dtype=bf16")
    assert summary_of(plain)["gradient_reduction"] is None
    told = summary_of(narrow)["gradient_reduction"]
    assert told["dtype"] == "bf16"
    assert 2e-4 < told["relative_error"] < 2 / 256
    (event,) = [event for event in narrow.events() if event["kind"] == "gradient_reduction"]
    assert (event["step"], event["relative_error"]) == (1, told["relative_error"])
    assert not [event for event in plain.events() if event["kind"] == "gradient_reduction"]
    bytes_of = [[line["comm/dp_bytes"] for line in run.metrics()] for run in (plain, narrow)]
    assert [2 * size for size in bytes_of[1]] == bytes_of[0]
    assert losses_of(narrow) != losses_of(plain)
    assert list(losses_of(narrow).values()) == pytest.approx(list(losses_of(plain).values()), rel=1e-2)
