"""A field that was set to no effect is named, with what makes it idle; one that decides something is not."""

import pytest

from drivetrain.config import LaunchFacts, idle_fields, leaves, load_config, violations
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
    "checkpoint.initial_load_model_only": (
        ["checkpoint.initial_load_model_only=false"],
        ["checkpoint.initial_load_model_only=false", "checkpoint.initial_load_path=folder"],
    ),
    "data.prefetch_factor": (
        ["data.prefetch_factor=4"],
        ["data.prefetch_factor=4", "data.num_workers=1"],
    ),
    "data.prefetch_batches": (["data.prefetch_batches=2", "data.num_workers=1"], ["data.prefetch_batches=2"]),
    "data.packing_buffer": (["data.packing_buffer=9"], ["data.packing_buffer=9", "data.packing=best_fit"]),
    "data.sample_cache_path": (
        ["data.sample_cache_path=kept"],
        ["data.sample_cache_path=kept", "data.sample_cache_bytes=9"],
    ),
    "data.remote_cache_bytes": (
        ["data.remote_cache_bytes=9"],
        ["data.remote_cache_bytes=9", "data.data_path=s3://bucket/corpora/mine"],
    ),
    "data.remote_cache_path": (
        ["data.remote_cache_path=kept"],
        ["data.remote_cache_path=kept", "data.data_path=0.5 a 0.5 http://host/b"],
    ),
    "training.eval_interval": (
        ["training.eval_interval=5", "training.eval_iters=0"],
        ["training.eval_interval=5"],
    ),
    "profiler.with_stack": (
        ["profiler.with_stack=true"],
        ["profiler.with_stack=true", "profiler.profile=true"],
    ),
    "fusion.tuned_file": (
        ["fusion.tuned_file=ops.tuned.toml", "fusion.glu=eager"],
        ["fusion.tuned_file=ops.tuned.toml", "fusion.level=core"],
    ),
    "fusion.allow_fallback": (
        ["fusion.allow_fallback=true", "fusion.level=all"],
        ["fusion.allow_fallback=true", "fusion.glu=triton"],
    ),
    "overlap.bucket_size_mb": (["overlap.bucket_size_mb=1"], []),
    "overlap.overlap_param_gather": (["overlap.overlap_param_gather=true"], []),
    "overlap.prefetch_blocks": (["overlap.prefetch_blocks=2"], []),
    "overlap.async_tensor_model_parallel_allreduce": (
        ["overlap.async_tensor_model_parallel_allreduce=true"],
        ["overlap.async_tensor_model_parallel_allreduce=true", "parallelism.tensor_model_parallel_size=2"],
    ),
    "precision.grad_reduce_dtype": (["precision.grad_reduce_dtype=bf16"], []),
    "parallelism.sequence_parallel": (
        ["parallelism.sequence_parallel=true"],
        ["parallelism.sequence_parallel=true", "parallelism.tensor_model_parallel_size=2"],
    ),
    "parallelism.pipeline_schedule": (
        ["parallelism.pipeline_schedule=zbv"],
        ["parallelism.pipeline_schedule=zbv", "parallelism.pipeline_model_parallel_size=2"],
    ),
    "parallelism.rank_order": (
        ["parallelism.rank_order=pp-tp-cp-dp", "parallelism.tensor_model_parallel_size=2"],
        [
            "parallelism.rank_order=pp-tp-cp-dp",
            "parallelism.tensor_model_parallel_size=2",
            "parallelism.pipeline_model_parallel_size=2",
        ],
    ),
    "parallelism.hybrid_shard_size": (["parallelism.hybrid_shard_size=1"], []),
    "parallelism.reduce_each_micro_batch": (["parallelism.reduce_each_micro_batch=true"], []),
    "parallelism.zero_stage": (["parallelism.zero_stage=1"], []),
    "monitor.check_weight_hash_across_dp_replicas_interval": (
        ["monitor.check_weight_hash_across_dp_replicas_interval=10"],
        [
            "monitor.check_weight_hash_across_dp_replicas_interval=10",
            "parallelism.tensor_model_parallel_size=2",
        ],
    ),
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


def test_an_order_of_ranks_is_idle_where_the_dimensions_with_several_keep_theirs() -> None:
    def idle(order: str, world_size: int, *sizes: str) -> list[str]:
        overrides = [f"parallelism.rank_order={order}", "training.micro_batch_size=1", *sizes]
        config = load_config("llama-2m", overrides).config
        return [one.field for one in idle_fields(config, LaunchFacts(world_size))]

    tensor, pipeline = (
        "parallelism.tensor_model_parallel_size=2",
        "parallelism.pipeline_model_parallel_size=2",
    )
    assert idle("dp-pp-cp-tp", 1) == idle("dp-pp-cp-tp", 4) == ["parallelism.rank_order"], (
        "data parallelism alone"
    )
    assert idle("cp-tp-dp-pp", 4, tensor) == ["parallelism.rank_order"]
    assert idle("dp-pp-cp-tp", 4, tensor) == idle("tp-cp-dp-pp", 4, pipeline) == []
    assert idle("tp-tp-pp-dp", 4) == [], "a rule refuses it"


def test_fields_of_data_parallelism_depend_on_the_ranks_that_are_left_for_it() -> None:
    overrides = ["parallelism.zero_stage=3", "overlap.bucket_size_mb=1", "training.micro_batch_size=1"]
    layout = ["parallelism.tensor_model_parallel_size=2"]

    def idle(world_size: int, shard_size: int) -> list[str]:
        sizes = [*layout, f"parallelism.hybrid_shard_size={shard_size}"]
        config, facts = load_config("llama-2m", [*overrides, *sizes]).config, LaunchFacts(world_size)
        assert violations(config, facts) == [], "what a rule refuses is no idle field"
        return [idle.field for idle in idle_fields(config, facts)]

    everything = ["parallelism.zero_stage", "parallelism.hybrid_shard_size", "overlap.bucket_size_mb"]
    assert idle(2, 1) == everything
    assert idle(4, 2) == ["overlap.bucket_size_mb"], "a block's gradients are one bucket"


def test_ways_of_travelling_are_idle_at_the_stages_that_do_not_travel_so() -> None:
    ways = [
        "overlap.overlap_param_gather=true",
        "overlap.prefetch_blocks=1",
        "precision.grad_reduce_dtype=bf16",
    ]

    def idle(stage: int, *layout: str, world_size: int = 2) -> list[str]:
        overrides = [*ways, f"parallelism.zero_stage={stage}", "training.micro_batch_size=1", *layout]
        config = load_config("llama-2m", overrides).config
        return [one.field for one in idle_fields(config, LaunchFacts(world_size))]

    gather, prefetch = "overlap.overlap_param_gather", "overlap.prefetch_blocks"
    assert idle(0) == [gather, prefetch]
    assert idle(1) == idle(2) == [prefetch]
    assert idle(3) == [gather]
    assert idle(3, "parallelism.pipeline_model_parallel_size=2", world_size=4) == [gather, prefetch]


def test_reducing_with_each_micro_batch_is_idle_where_a_step_has_one() -> None:
    overrides = ["parallelism.reduce_each_micro_batch=true", "training.micro_batch_size=4"]

    def idle(global_batch_size: int) -> list[str]:
        sizes = [f"training.global_batch_size={global_batch_size}"]
        return list(
            map(str, idle_fields(load_config("llama-2m", [*overrides, *sizes]).config, LaunchFacts(2)))
        )

    assert idle(8) == [
        "no effect: parallelism.reduce_each_micro_batch, because a step has one micro-batch: its gradients are "
        "reduced once either way"
    ]
    assert idle(16) == []


@pytest.mark.parametrize(
    ("world_size", "overrides", "idle"),
    [
        (4, ["parallelism.hybrid_shard_size=3"], ["hybrid_shard_size"]),
        (1, ["parallelism.hybrid_shard_size=3", "parallelism.zero_stage=1"], ["zero_stage"]),
        (
            2,
            ["parallelism.pipeline_model_parallel_size=2", "parallelism.reduce_each_micro_batch=true"],
            ["reduce_each_micro_batch"],
        ),
        (
            4,
            [
                "parallelism.pipeline_model_parallel_size=2",
                "parallelism.pipeline_schedule=gpipe",
                "parallelism.reduce_each_micro_batch=true",
                "training.global_batch_size=4",
                "training.micro_batch_size=2",
            ],
            [],
        ),
        (
            2,
            [
                "parallelism.pipeline_model_parallel_size=2",
                "parallelism.pipeline_schedule=zbv",
                "parallelism.zero_stage=3",
            ],
            ["zero_stage"],
        ),
    ],
)
def test_a_field_is_refused_or_idle_and_never_both(
    world_size: int, overrides: list[str], idle: list[str]
) -> None:
    sizes = ["training.micro_batch_size=1", "training.global_batch_size=16"]
    config, facts = load_config("llama-2m", [*sizes, *overrides]).config, LaunchFacts(world_size)
    named = [one.field.removeprefix("parallelism.") for one in idle_fields(config, facts)]
    assert [name for name in named if not name.startswith("overlap")] == idle
    refused = [violation.fields[0].removeprefix("parallelism.") for violation in violations(config, facts)]
    assert not set(refused) & set(named)
    asked = {"hybrid_shard_size", "reduce_each_micro_batch", "zero_stage"}
    assert asked & {*refused, *named}, "one of them speaks"


def test_every_condition_is_of_fields_there_are_and_each_has_a_case() -> None:
    for condition in _CONDITIONS:
        assert set(condition.fields) <= leaves().keys()
        assert set(condition.fields) & CASES.keys()


@pytest.mark.parametrize(
    ("world_size", "layout", "held_twice"),
    [
        (2, [], True),
        (2, ["parallelism.zero_stage=2"], True),
        (2, ["parallelism.zero_stage=3"], False),
        (2, ["parallelism.zero_stage=3", "parallelism.hybrid_shard_size=2"], False),
        (4, ["parallelism.zero_stage=3", "parallelism.hybrid_shard_size=2"], True),
        (4, ["parallelism.zero_stage=3", "parallelism.tensor_model_parallel_size=2"], True),
        (2, ["parallelism.pipeline_model_parallel_size=2"], True),
        (
            2,
            ["parallelism.pipeline_model_parallel_size=2", "model.untie_embeddings_and_output_weights=true"],
            False,
        ),
        (2, ["parallelism.pipeline_model_parallel_size=2", "parallelism.pipeline_schedule=zbv"], False),
    ],
)
def test_comparing_weights_is_idle_exactly_where_no_two_ranks_hold_the_same(
    world_size: int, layout: list[str], held_twice: bool
) -> None:
    overrides = ["monitor.check_weight_hash_across_dp_replicas_interval=10", "training.micro_batch_size=1"]
    config = load_config("llama-2m", [*overrides, *layout]).config
    assert violations(config, LaunchFacts(world_size)) == []
    found = [idle.field for idle in idle_fields(config, LaunchFacts(world_size))]
    assert ("monitor.check_weight_hash_across_dp_replicas_interval" in found) != held_twice
