"""Fields that were set and have no effect, because another field, or the launch, leaves them nothing to decide.

They are no mistake that stops a run: one override of a preset (``lr_decay_style=constant``) would make others of its
fields illegal. But nothing that was asked for is dropped in silence: ``check`` and ``train`` name them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from drivetrain.config.derive import data_parallel_size
from drivetrain.config.fusion import AUTO, OFF, chosen_backend, operator_fields
from drivetrain.config.layout import ORDER, is_order, stage_plan
from drivetrain.config.leaves import leaf_values, leaves
from drivetrain.config.rules import LaunchFacts
from drivetrain.config.schema import RunConfig
from drivetrain.errors import ConfigurationError

__all__ = ["Idle", "idle_fields"]


@dataclass(frozen=True)
class Idle:
    """A field with a value other than its default, and why that value changes nothing."""

    field: str
    reason: str

    def __str__(self) -> str:
        return f"no effect: {self.field}, because {self.reason}"


@dataclass(frozen=True)
class _Condition:
    """Fields that decide nothing while ``holds``."""

    fields: tuple[str, ...]
    holds: Callable[[RunConfig, LaunchFacts], bool]
    reason: str


_ALONE = "there is one data-parallel rank, which has nothing to share or to reduce"


def _reduces_once_anyway(config: RunConfig, facts: LaunchFacts) -> bool:
    """One micro-batch a step. A pipeline may not reduce with each at all, and a rule says so."""
    per_pass = config.training.micro_batch_size * data_parallel_size(config, facts.world_size)
    return (
        config.training.global_batch_size == per_pass and config.parallelism.pipeline_model_parallel_size == 1
    )


def _weights_are_held_once(config: RunConfig, facts: LaunchFacts) -> bool:
    """No two ranks hold the same. (Norms are whole on every tensor-parallel rank.)"""
    parallelism = config.parallelism
    ranks = data_parallel_size(config, facts.world_size)
    replicas = ranks > 1 and not (
        parallelism.zero_stage == 3 and parallelism.hybrid_shard_size in (None, ranks)
    )
    return not (replicas or _tied_at_two_ends(config) or parallelism.tensor_model_parallel_size > 1)


def _tied_at_two_ends(config: RunConfig) -> bool:
    """Two ranks of a pipeline hold the embedding."""
    if (
        config.parallelism.pipeline_model_parallel_size == 1
        or config.model.untie_embeddings_and_output_weights
    ):
        return False
    try:
        first, last = stage_plan(config).ranks_of_ends
    except ConfigurationError:  # stages that do not fit are a rule's affair
        return True
    return first != last


def _numbered_as_by_default(config: RunConfig, facts: LaunchFacts) -> bool:
    """The dimensions that have several ranks follow each other as by default. What is no order is a rule's affair."""
    parallelism = config.parallelism
    several = {
        "tp": parallelism.tensor_model_parallel_size > 1,
        "pp": parallelism.pipeline_model_parallel_size > 1,
        "dp": data_parallel_size(config, facts.world_size) > 1,
    }
    order = parallelism.rank_order
    return is_order(order) and (
        [dim for dim in order.split("-") if several.get(dim)] == [dim for dim in ORDER if several.get(dim)]
    )


def _backends(config: RunConfig) -> set[str]:
    """What is asked for of any operator."""
    return {chosen_backend(config.fusion, name) for name in operator_fields()}


def _section(name: str, *without: str) -> tuple[str, ...]:
    return tuple(leaf.path for leaf in leaves().values() if leaf.section == name and leaf.name not in without)


_CONDITIONS = (
    _Condition(
        ("lr_schedule.min_lr", "lr_schedule.lr_decay_tokens"),
        lambda config, _: config.lr_schedule.lr_decay_style == "constant",
        "lr_schedule.lr_decay_style = constant never decays",
    ),
    _Condition(
        ("lr_schedule.lr_wsd_decay_tokens", "lr_schedule.lr_wsd_decay_style"),
        lambda config, _: config.lr_schedule.lr_decay_style != "WSD",
        "lr_schedule.lr_decay_style is not WSD",
    ),
    _Condition(
        ("model.rotary_base",),
        lambda config, _: config.model.position_embedding_type != "rope",
        "model.position_embedding_type is not rope",
    ),
    _Condition(
        tuple(path for path in _section("model") if path.startswith("model.rope_scaling_")),
        lambda config, _: not config.model.use_rope_scaling,
        "model.use_rope_scaling is off",
    ),
    _Condition(
        ("model.init_method_std",),
        lambda config, _: config.checkpoint.initial_load_path is not None,
        "the weights come from checkpoint.initial_load_path",
    ),
    _Condition(
        ("checkpoint.initial_load_model_only",),
        lambda config, _: config.checkpoint.initial_load_path is None,
        "checkpoint.initial_load_path is absent: nothing is loaded",
    ),
    _Condition(
        ("data.prefetch_factor",),
        lambda config, _: config.data.num_workers == 0,
        "data.num_workers = 0: no worker prepares anything ahead",
    ),
    _Condition(
        ("data.prefetch_batches",),
        lambda config, _: config.data.num_workers > 0,
        "data.num_workers is above 0: workers build batches ahead already",
    ),
    _Condition(
        ("data.packing_buffer",),
        lambda config, _: config.data.packing != "best_fit",
        "data.packing is not best_fit",
    ),
    _Condition(
        ("data.sample_cache_path",),
        lambda config, _: config.data.sample_cache_bytes == 0,
        "data.sample_cache_bytes = 0: no sequences are kept",
    ),
    _Condition(
        ("data.remote_cache_bytes", "data.remote_cache_path"),
        lambda config, _: "://" not in (config.data.data_path or ""),
        "data.data_path names no URL: nothing is brought",
    ),
    _Condition(
        ("training.eval_interval",),
        lambda config, _: config.training.eval_iters == 0,
        "training.eval_iters = 0: nothing is evaluated",
    ),
    _Condition(
        _section("profiler", "profile"),
        lambda config, _: not config.profiler.profile,
        "profiler.profile is off",
    ),
    _Condition(
        ("parallelism.sequence_parallel", "overlap.async_tensor_model_parallel_allreduce"),
        lambda config, _: config.parallelism.tensor_model_parallel_size == 1,
        "parallelism.tensor_model_parallel_size = 1: no ranks share a layer",
    ),
    _Condition(
        (
            "parallelism.pipeline_schedule",
            "parallelism.virtual_pipeline_model_parallel_size",
            "parallelism.pipeline_model_parallel_layout",
        ),
        lambda config, _: config.parallelism.pipeline_model_parallel_size == 1,
        "parallelism.pipeline_model_parallel_size = 1: there is no pipeline",
    ),
    _Condition(
        ("parallelism.hybrid_shard_size",),
        lambda config, _: config.parallelism.zero_stage == 0,
        "parallelism.zero_stage = 0: nothing is sharded",
    ),
    _Condition(
        ("parallelism.reduce_each_micro_batch",),
        _reduces_once_anyway,
        "a step has one micro-batch: its gradients are reduced once either way",
    ),
    _Condition(
        ("overlap.bucket_size_mb",),
        lambda config, _: config.parallelism.zero_stage == 3,
        "parallelism.zero_stage = 3: a block's gradients are one bucket",
    ),
    _Condition(
        ("overlap.overlap_param_gather",),
        lambda config, _: config.parallelism.zero_stage not in (1, 2),
        "parallelism.zero_stage is neither 1 nor 2: no rank updates a part of what all of them keep",
    ),
    _Condition(
        ("overlap.prefetch_blocks",),
        lambda config, _: config.parallelism.zero_stage != 3,
        "parallelism.zero_stage is not 3: blocks are not gathered",
    ),
    _Condition(
        ("overlap.prefetch_blocks",),
        lambda config, _: config.parallelism.pipeline_model_parallel_size > 1,
        "a pipeline schedule decides when a block is used",
    ),
    _Condition(
        (
            "overlap.bucket_size_mb",
            "overlap.hierarchical_collectives",
            "overlap.overlap_param_gather",
            "overlap.prefetch_blocks",
            "precision.grad_reduce_dtype",
            "parallelism.zero_stage",
            "parallelism.reduce_each_micro_batch",
        ),
        lambda config, facts: data_parallel_size(config, facts.world_size) == 1,
        _ALONE,
    ),
    _Condition(
        # Another size does not divide the ranks: that is a rule's affair.
        ("parallelism.hybrid_shard_size",),
        lambda config, facts: (
            config.parallelism.hybrid_shard_size == 1 and data_parallel_size(config, facts.world_size) == 1
        ),
        _ALONE,
    ),
    _Condition(
        ("monitor.check_weight_hash_across_dp_replicas_interval",),
        _weights_are_held_once,
        "no two ranks hold the same weights",
    ),
    _Condition(
        ("parallelism.rank_order",),
        _numbered_as_by_default,
        "the dimensions that have more than one rank follow each other as by default",
    ),
    _Condition(
        ("fusion.tuned_file",),
        lambda config, _: not _backends(config) & {AUTO} and config.overlap.wanted_tp_chunks is not None,
        "no operator is auto, and overlap.tp_chunks is not tuned: what was tuned is not looked at",
    ),
    _Condition(
        ("fusion.allow_fallback",),
        lambda config, _: not _backends(config) - {OFF, AUTO, "eager"},
        "no operator's backend is named but eager, which falls back on nothing",
    ),
    _Condition(
        (
            "overlap.bucket_size_mb",
            "overlap.overlap_param_gather",
            "overlap.prefetch_blocks",
            "overlap.hierarchical_collectives",
            "precision.grad_reduce_dtype",
            "parallelism.distributed_timeout_minutes",
        ),
        lambda _, facts: facts.world_size == 1,
        "one process has nobody to communicate with",
    ),
)


def idle_fields(config: RunConfig, facts: LaunchFacts | None = None) -> list[Idle]:
    """The fields of ``config`` that differ from their default to no effect, in the schema's order.

    Args:
        config: any configuration; the rules need not hold.
        facts: how it is started; by default as one process.
    """
    facts = LaunchFacts() if facts is None else facts
    reasons = {
        field: condition.reason
        for condition in _CONDITIONS
        if condition.holds(config, facts)
        for field in condition.fields
    }
    return [
        Idle(leaf.path, reasons[leaf.path])
        for leaf, value in leaf_values(config)
        if leaf.path in reasons and value != leaf.default
    ]
