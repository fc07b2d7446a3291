"""A field that was set to no effect is named, with what makes it idle; one that decides something is not."""

import pytest

from drivetrain.config import LaunchFacts, idle_fields, leaves, load_config
from drivetrain.config.idle import _CONDITIONS

CASES = {
    "lr_schedule.min_lr": (["lr_schedule.lr_decay_style=constant"], ["lr_schedule.lr_decay_style=WSD"]),
    "lr_schedule.lr_decay_tokens": (
        ["lr_schedule.lr_decay_tokens=1e6", "lr_schedule.lr_decay_style=constant", "lr_schedule.min_lr=0"],
        ["lr_schedule.lr_decay_tokens=1e6"],
    ),
    "lr_schedule.lr_wsd_decay_tokens": (
        ["lr_schedule.lr_wsd_decay_tokens=10"],
        ["lr_schedule.lr_wsd_decay_tokens=10", "lr_schedule.lr_decay_style=WSD"],
    ),
    "lr_schedule.lr_wsd_decay_style": (
        ["lr_schedule.lr_wsd_decay_style=cosine"],
        ["lr_schedule.lr_wsd_decay_style=cosine", "lr_schedule.lr_decay_style=WSD"],
    ),
    "model.rotary_base": (
        ["model.rotary_base=5e5", "model.position_embedding_type=learned_absolute"],
        ["model.rotary_base=5e5"],
    ),
    "model.rope_scaling_factor": (
        ["model.rope_scaling_factor=2"],
        ["model.rope_scaling_factor=2", "model.use_rope_scaling=true"],
    ),
    "model.init_method_std": (
        ["model.init_method_std=0.1", "checkpoint.initial_load_path=folder"],
        ["model.init_method_std=0.1"],
    ),
    "data.prefetch_factor": (
        ["data.prefetch_factor=4"],
        ["data.prefetch_factor=4", "data.num_workers=1"],
    ),
    "training.eval_interval": (
        ["training.eval_interval=5", "training.eval_iters=0"],
        ["training.eval_interval=5"],
    ),
    "profiler.with_stack": (
        ["profiler.with_stack=true"],
        ["profiler.with_stack=true", "profiler.profile=true"],
    ),
    "overlap.bucket_size_mb": (["overlap.bucket_size_mb=1"], []),
}


@pytest.mark.parametrize("field", CASES)
def test_a_value_without_effect_is_named_and_one_with_effect_is_not(field: str) -> None:
    idle, at_work = CASES[field]
    (found,) = idle_fields(load_config("llama-2m", idle).config)
    assert found.field == field
    assert str(found).startswith(f"no effect: {field}, because ")
    assert idle_fields(load_config("llama-2m", at_work).config) == []


def test_what_only_several_processes_use_depends_on_the_launch() -> None:
    overrides = ["overlap.bucket_size_mb=1", "parallelism.distributed_timeout_minutes=3"]
    config = load_config("llama-2m", overrides).config
    assert [idle.field for idle in idle_fields(config)] == [
        "parallelism.distributed_timeout_minutes",
        "overlap.bucket_size_mb",
    ]
    assert idle_fields(config, LaunchFacts(world_size=2)) == []


def test_every_condition_is_of_fields_there_are_and_each_has_a_case() -> None:
    for condition in _CONDITIONS:
        assert set(condition.fields) <= leaves().keys()
        assert set(condition.fields) & CASES.keys()
