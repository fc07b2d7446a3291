"""``train --compare-single``: several processes that train as one are told from those that do not."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from drivetrain.archive.reader import open_run
from drivetrain.cli.beginning import Beginning
from drivetrain.cli.compare_single import on_one_process, run_compare_single
from drivetrain.cli.train_command import new_run, train_to_end
from drivetrain.config import LaunchFacts, LoadedConfig, RunConfig, idle_fields, load_config, violations
from drivetrain.engine.step import Stepper
from drivetrain.errors import DrivetrainError
from runs_on_the_spot import Tiny

Change = Callable[[RunConfig], RunConfig]
COMMON = ("model.num_layers=1", "training.train_iters=50", "lr_schedule.lr_warmup_tokens=0")


class InThisProcess:
    """Trains everything in this process: runs of several processes with a change that stands for them."""

    def __init__(self, change: Change = lambda config: config) -> None:
        self.change = change
        self.made: list[tuple[int, Beginning, LoadedConfig]] = []

    def __call__(self, loaded: LoadedConfig, world_size: int, beginning: Beginning) -> Path:
        self.made.append((world_size, beginning, loaded))
        if world_size > 1:
            alone = on_one_process(loaded)
            loaded = LoadedConfig(self.change(alone.config), loaded.source, loaded.name)
        path = new_run(loaded, 1, beginning)
        train_to_end(path, 1)
        return path


def training(config: RunConfig, **fields: Any) -> RunConfig:
    return config.model_copy(update={"training": config.training.model_copy(update=fields)})


def compare(
    tiny: Tiny, train: InThisProcess, capsys: pytest.CaptureFixture[str], *overrides: str, **options: Any
) -> tuple[int, dict[str, Any]]:
    """Exit code and document."""
    given = {"num_processes": 2, "steps": None, "as_json": True, "beside": {}, **options}
    code = run_compare_single(str(tiny.file), [*COMMON, *overrides], **given, train=train)
    return code, json.loads(capsys.readouterr().out)


def test_another_order_of_the_same_sums_agrees(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    train = InThisProcess(lambda config: training(config, micro_batch_size=1))
    code, document = compare(tiny, train, capsys)
    assert (code, document["verdict"]) == (0, "agree")
    assert [world_size for world_size, _, _ in train.made][:2] == [1, 2]
    assert (document["steps"], document["processes"], document["dtype"]) == (3, 2, "fp32")
    assert 0 < document["gradients"][0]["difference"] <= document["gradients"][0]["limit"] == 1e-5
    names = {row["name"] for row in document["gradients"]}
    assert {"embedding.weight", "blocks.0.attention.query.weight", "final_norm.weight"} < names
    assert {row["name"] for row in document["parameters"]} == names, "the same names for both"
    runs = document["runs"]
    losses = [line["train/loss"] for line in open_run(runs["several"]).metrics()]
    assert document["losses"]["several"] == losses
    assert len(losses) == 3
    configs = [open_run(runs[which]).config() for which in ("one_process", "several")]
    whole = load_config(str(tiny.file), COMMON).config
    for config in configs:
        assert config.training.train_iters == 3
        assert config.lr_schedule.lr_decay_tokens == whole.training.train_iters * 8 * 32, (
            "at its learning rates"
        )


class Scaled(InThisProcess):
    """Gradients of runs on so many processes are ``factor`` times as large as they should be."""

    def __init__(self, factor: float, world_size: int) -> None:
        super().__init__()
        self.factor = factor
        self.world_size = world_size

    def __call__(self, loaded: LoadedConfig, world_size: int, beginning: Beginning) -> Path:
        if world_size != self.world_size:
            return super().__call__(loaded, world_size, beginning)

        def backward(stepper: Stepper, loss_sum: torch.Tensor, valid_tokens: int) -> None:
            (loss_sum * (self.factor / valid_tokens)).backward()

        with mock.patch.object(Stepper, "backward", backward):
            return super().__call__(loaded, world_size, beginning)


def test_a_gradient_of_twice_the_size_is_found_which_no_loss_shows(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    train = Scaled(2.0, world_size=2)
    code, document = compare(tiny, train, capsys, "training.clip_grad=0.01")
    assert (code, document["verdict"]) == (1, "differ")
    assert "the gradient" in document["why"]
    assert all(row["difference"] == pytest.approx(1.0, rel=1e-3) for row in document["gradients"])
    assert all(row["difference"] < 1e-4 for row in document["losses"]["differences"])
    seeds = [beginning.perturb_ulp for _, beginning, _ in train.made]
    assert seeds == [None, None, 1, 2, 3], "an envelope is made where something exceeds its tolerance"
    assert all(beginning.probe for _, beginning, _ in train.made)
    assert len(document["runs"]["perturbed"]) == 3


def test_half_precision_is_held_against_an_envelope_and_other_data_lies_outside(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    bf16 = "precision.params_dtype=bf16"
    train = InThisProcess(lambda config: training(config, micro_batch_size=1))
    code, document = compare(tiny, train, capsys, bf16)
    assert (code, document["verdict"]) == (0, "agree"), document["why"]

    def other_data(config: RunConfig) -> RunConfig:
        return config.model_copy(update={"data": config.data.model_copy(update={"seed": 5})})

    code, document = compare(tiny, InThisProcess(other_data), capsys, bf16)
    assert (code, document["verdict"]) == (1, "differ")


def test_a_run_of_several_processes_that_diverges_differs_and_is_said_to(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = compare(tiny, Scaled(math.inf, world_size=2), capsys)
    assert (code, document["verdict"]) == (1, "differ")
    assert "one process finished, and with several the run failed: the gradient norm" in document["why"]


def test_a_training_that_one_process_does_not_survive_has_no_verdict(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = compare(tiny, Scaled(math.inf, world_size=1), capsys)
    assert (code, document["verdict"]) == (1, "withheld")
    assert "in one process the run failed: the gradient norm" in document["why"]


def test_the_text_names_what_is_nearest_to_its_limit(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    train = InThisProcess(lambda config: training(config, micro_batch_size=1))
    code = run_compare_single(
        str(tiny.file), COMMON, num_processes=2, steps=1, as_json=False, beside={}, train=train
    )
    out, err = capsys.readouterr()
    assert code == 0
    assert out.startswith("compared    1 step of 2 processes with one process, fp32\n")
    assert "gradients of step 1: " in out
    assert "verdict     agree" in out
    assert "which holds the whole model" in err


def test_one_process_has_the_same_training_without_a_layout(tiny: Tiny) -> None:
    loaded = load_config(
        str(tiny.file),
        [
            "parallelism.tensor_model_parallel_size=2",
            "parallelism.sequence_parallel=true",
            "parallelism.zero_stage=2",
            "overlap.bucket_size_mb=1",
            "monitor.check_weight_hash_across_dp_replicas_interval=5",
            "optimizer.lr=1e-4",
        ],
    )
    alone = on_one_process(loaded).config
    assert violations(alone, LaunchFacts(1)) == []
    assert idle_fields(alone, LaunchFacts(1)) == []
    assert alone.optimizer == loaded.config.optimizer
    assert alone.training == loaded.config.training
    assert alone.parallelism.tensor_model_parallel_size == 1


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ([], {"num_processes": None}, "add --nproc 2"),
        ([], {"steps": 51}, "at most that many"),
        (["model.hidden_dropout=0.1"], {}, "add model.hidden_dropout=0$"),
        (["model.attention_dropout=0.1"], {}, "add model.attention_dropout=0$"),
        ([], {"beside": {"--probe": False, "--dry-run": True}}, "to which --dry-run does not belong"),
        (["training.global_batch_size=7"], {}, "global_batch_size"),
        (
            ["checkpoint.initial_load_path=step-00000002", "checkpoint.initial_load_model_only=false"],
            {},
            "^checkpoint.initial_load_model_only = false: .* step of step-00000002; take the weights alone",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_made(
    overrides: list[str], options: dict[str, Any], message: str, tiny: Tiny
) -> None:
    train = InThisProcess()
    given = {"num_processes": 2, "steps": None, "as_json": False, "beside": {}, **options}
    with pytest.raises(DrivetrainError, match=message):
        run_compare_single(str(tiny.file), [*COMMON, *overrides], **given, train=train)
    assert train.made == []
    assert not tiny.runs.exists()


def test_a_model_that_one_process_does_not_hold_is_said_to_be_that(tiny: Tiny) -> None:
    def full(loaded: LoadedConfig, world_size: int, beginning: Beginning) -> Path:
        raise DrivetrainError("out of memory: 5 TB")

    with pytest.raises(DrivetrainError, match="of one process, which holds the whole model: out of memory"):
        run_compare_single(
            str(tiny.file), COMMON, num_processes=2, steps=None, as_json=False, beside={}, train=full
        )


def test_a_run_to_continue_is_refused(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.runs.mkdir()
    with pytest.raises(DrivetrainError, match=r"is a run to continue; give .*config.toml"):
        run_compare_single(
            str(tiny.runs), [], num_processes=2, steps=None, as_json=False, beside={}, train=InThisProcess()
        )


def test_the_command_line_refuses_steps_without_a_comparison_and_torchrun(tiny: Tiny) -> None:
    done = tiny.run("train", str(tiny.file), "--compare-steps", "2")
    assert done.returncode == 2
    assert "--compare-steps belongs to --compare-single" in done.stderr
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    done = tiny.run("train", str(tiny.file), "--compare-single", environment=ranks)
    assert done.returncode == 2
    assert "--compare-single under torchrun" in done.stderr
    assert not tiny.runs.exists()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            ("parallelism.tensor_model_parallel_size=2", "parallelism.sequence_parallel=true"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            ("parallelism.pipeline_model_parallel_size=2", "model.num_layers=2"), marks=pytest.mark.long
        ),
        pytest.param(
            ("parallelism.data_parallel_size=2", "parallelism.zero_stage=3"), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            ("parallelism.data_parallel_size=2", "precision.params_dtype=bf16"),
            marks=pytest.mark.exhaustive,
        ),
        # GPT-2 of Hugging Face: packed and transposed tensors in a checkpoint.
        pytest.param(
            (
                "parallelism.tensor_model_parallel_size=2",
                "model.normalization=LayerNorm",
                "model.position_embedding_type=learned_absolute",
                "model.activation_func=gelu",
                "model.add_bias_linear=true",
            ),
            marks=pytest.mark.long,
        ),
    ],
)
def test_real_processes_agree_with_one(layout: tuple[str, ...], tiny: Tiny) -> None:
    done = tiny.run("train", str(tiny.file), *COMMON, *layout, "--compare-single", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["verdict"] == "agree"
    assert document["processes"] == 2
    assert open_run(document["runs"]["several"]).manifest["layout"]["world_size"] == 2
