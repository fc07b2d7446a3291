"""The rules of layouts: which numbers of ranks can share which model, and what can't be combined.

Each message gives the nearest legal values. A rule whose precondition another rule guards stays silent.
"""

from collections.abc import Callable

from drivetrain.config.derive import data_parallel_size
from drivetrain.config.layout import is_order, model_ranks, stage_plan
from drivetrain.config.nearest_values import around, closest, divisors
from drivetrain.config.rules import LaunchFacts, Rule
from drivetrain.config.schema import RunConfig
from drivetrain.config.stages import V_SHAPED, legal_micro_batches, nearest_micro_batches
from drivetrain.errors import ConfigurationError

__all__ = ["PARALLEL_RULES"]

_TP = "parallelism.tensor_model_parallel_size"
_PP = "parallelism.pipeline_model_parallel_size"


def _layout_fits(config: RunConfig, facts: LaunchFacts) -> bool:
    """Whether the rules on the number of processes hold, so that the data-parallel size is known."""
    given, ranks = config.parallelism.data_parallel_size, model_ranks(config)
    return facts.world_size % ranks == 0 and given in (None, facts.world_size // ranks)


def _layout_covers_processes(config: RunConfig, facts: LaunchFacts) -> str | None:
    parallelism, ranks, world = config.parallelism, model_ranks(config), facts.world_size
    if world % ranks == 0:
        return None
    tensor, pipeline = parallelism.tensor_model_parallel_size, parallelism.pipeline_model_parallel_size
    remedy = f"{around(world, ranks)} processes"
    if pipeline == 1:
        remedy += f"; tensor_model_parallel_size = {closest(tensor, divisors(world))}"
    if tensor == 1:
        remedy += f"; pipeline_model_parallel_size = {closest(pipeline, divisors(world))}"
    return (
        f"{ranks} ranks hold one model, and {world} process{'es are' if world > 1 else ' is'} no multiple of that; "
        f"nearest legal values: {remedy}"
    )


def _data_parallel_equals_processes(config: RunConfig, facts: LaunchFacts) -> str | None:
    given, ranks, world = config.parallelism.data_parallel_size, model_ranks(config), facts.world_size
    if given is None or world % ranks or given == world // ranks:
        return None
    over = (
        f" over the {ranks} ranks of a model, {world} / {ranks} = {world // ranks}"
        if ranks > 1
        else f", {world}"
    )
    return (
        f"{given} does not equal the number of processes{over}; start {given * ranks} processes, or "
        f"use {world // ranks} or none"
    )


def _rank_order_is_an_order(config: RunConfig, _: LaunchFacts) -> str | None:
    order = config.parallelism.rank_order
    if is_order(order):
        return None
    seen = list(dict.fromkeys(order.split("-")))
    missing = [dim for dim in ("tp", "cp", "pp", "dp") if dim not in seen]
    return f"{order} does not name each dimension once; the nearest legal value is {'-'.join(seen + missing)}"


def _tensor_parallel_divides(what: str, size: Callable[[RunConfig], int]) -> Callable[..., str | None]:
    """A check that the tensor-parallel size divides ``size``, which ``what`` names."""

    def check(config: RunConfig, _: LaunchFacts) -> str | None:
        parts, whole = config.parallelism.tensor_model_parallel_size, size(config)
        if whole % parts == 0:
            return None
        return (
            f"{parts} does not divide {what} = {whole}; nearest legal values: tensor_model_parallel_size = "
            f"{closest(parts, divisors(whole))}; {what} = {around(whole, parts)}"
        )

    return check


def _tensor_parallel_and_query_groups(config: RunConfig, _: LaunchFacts) -> str | None:
    parts, groups = config.parallelism.tensor_model_parallel_size, config.model.query_groups
    heads = config.model.num_attention_heads
    # Numbers that do not divide the heads are the other rules' affair.
    if groups % parts == 0 or parts % groups == 0 or heads % groups or heads % parts:
        return None
    legal = [size for size in divisors(heads) if groups % size == 0 or size % groups == 0]
    return (
        f"{parts} neither divides num_query_groups = {groups} nor is a multiple of it; nearest legal values: "
        f"tensor_model_parallel_size = {closest(parts, legal)}"
    )


def _tensor_parallel_fits_vocabulary(config: RunConfig, _: LaunchFacts) -> str | None:
    parts, rows = config.parallelism.tensor_model_parallel_size, config.model.vocab_size
    if rows >= parts or config.model.num_attention_heads % parts:
        return None
    legal = [size for size in divisors(config.model.num_attention_heads) if size <= rows]
    return (
        f"{parts} ranks cannot each have a row of vocab_size = {rows}; nearest legal values: "
        f"tensor_model_parallel_size = {legal[-1]}; vocab_size = {parts}"
    )


def _sequence_parallel_divides(config: RunConfig, _: LaunchFacts) -> str | None:
    parts, length = config.parallelism.tensor_model_parallel_size, config.model.seq_length
    if not config.parallelism.sequence_parallel or length % parts == 0:
        return None
    return (
        f"seq_length = {length} is not divisible by tensor_model_parallel_size = {parts}; nearest legal values: "
        f"model.seq_length = {around(length, parts)}; tensor_model_parallel_size = "
        f"{closest(parts, divisors(length))}; or sequence_parallel = false"
    )


def _stages_hold_the_layers(config: RunConfig, _: LaunchFacts) -> str | None:
    if config.parallelism.pipeline_model_parallel_size == 1:
        return None
    try:
        stage_plan(config)
    except ConfigurationError as error:
        return "; ".join(error.problems)
    return None


def _micro_batches_fit_the_schedule(config: RunConfig, facts: LaunchFacts) -> str | None:
    parallelism, training = config.parallelism, config.training
    ranks, schedule = parallelism.pipeline_model_parallel_size, parallelism.pipeline_schedule
    per_pass = training.micro_batch_size * data_parallel_size(config, facts.world_size)
    if ranks == 1 or training.global_batch_size % per_pass:
        return None
    number = training.global_batch_size // per_pass
    if legal_micro_batches(schedule, ranks, number):
        return None
    nearest = nearest_micro_batches(schedule, ranks, number)
    return (
        f"it makes {number} micro-batch{'es' if number > 1 else ''} a step, and {schedule} on {ranks} ranks cannot run "
        f"that many; nearest legal values: {' or '.join(str(legal * per_pass) for legal in nearest)} "
        f"({' or '.join(map(str, nearest))} micro-batches)"
    )


def _hybrid_shards_divide_ranks(config: RunConfig, facts: LaunchFacts) -> str | None:
    size, ranks = config.parallelism.hybrid_shard_size, data_parallel_size(config, facts.world_size)
    if size is None or config.parallelism.zero_stage == 0 or not _layout_fits(config, facts):
        return None
    if ranks % size == 0:
        return None
    return (
        f"{size} does not divide the data-parallel size, {ranks}; nearest legal values: "
        f"{closest(size, _shard_sizes(ranks))}"
    )


def _hybrid_shards_are_shared(config: RunConfig, facts: LaunchFacts) -> str | None:
    parallelism, ranks = config.parallelism, data_parallel_size(config, facts.world_size)
    if parallelism.hybrid_shard_size != 1 or parallelism.zero_stage == 0 or ranks == 1:
        return None
    if not _layout_fits(config, facts):
        return None
    return (
        "one rank holds all shards: nothing is shared; use zero_stage = 0, or hybrid_shard_size = "
        f"{_shard_sizes(ranks)[0]}"
    )


def _shard_sizes(ranks: int) -> list[int]:
    """Legal numbers of data-parallel ranks that share one set of shards, ascending."""
    return [size for size in divisors(ranks) if size > 1 or ranks == 1]


def _pipelines_reduce_once(config: RunConfig, facts: LaunchFacts) -> str | None:
    parallelism = config.parallelism
    if not parallelism.reduce_each_micro_batch or parallelism.pipeline_model_parallel_size == 1:
        return None
    if data_parallel_size(config, facts.world_size) == 1:  # nothing is reduced
        return None
    return (
        "a pipeline's backward passes overlap, and its gradients are complete at the end of the step alone; use "
        "reduce_each_micro_batch = false, or pipeline_model_parallel_size = 1"
    )


def _one_rank_ends_share_no_shards(config: RunConfig, facts: LaunchFacts) -> str | None:
    parallelism = config.parallelism
    if not _layout_fits(config, facts) or data_parallel_size(config, facts.world_size) == 1:
        return None
    schedule = parallelism.pipeline_schedule
    in_a_v = parallelism.pipeline_model_parallel_size > 1 and schedule in V_SHAPED
    if parallelism.zero_stage < 3 or not in_a_v or config.model.untie_embeddings_and_output_weights:
        return None
    return (
        f"with {schedule} one rank has both ends of the model, and their common embedding cannot be gathered for each "
        "stage by itself; the nearest legal value is 2; or use another pipeline_schedule, or "
        "model.untie_embeddings_and_output_weights = true"
    )


def _memory_limit_counts_whole_ranks(config: RunConfig, facts: LaunchFacts) -> str | None:
    limited = config.memory.device_memory_limit_bytes is not None and facts.device_type == "cpu"
    if not limited or (model_ranks(config) == 1 and config.parallelism.zero_stage == 0):
        return None
    return (
        "on a CPU it is held by counting one step of a rank that has the whole model and its optimizer state; use "
        "none, or tensor_model_parallel_size = 1, pipeline_model_parallel_size = 1 and zero_stage = 0"
    )


PARALLEL_RULES: tuple[Rule, ...] = (
    Rule(
        "layout-covers-processes",
        (_TP, _PP),
        _layout_covers_processes,
        "The number of processes is a multiple of the ranks that hold one model.",
    ),
    Rule(
        "data-parallel-equals-processes",
        ("parallelism.data_parallel_size", _TP, _PP),
        _data_parallel_equals_processes,
        "data_parallel_size, where given, equals the number of processes over the ranks that hold one model.",
    ),
    Rule(
        "rank-order-is-an-order",
        ("parallelism.rank_order",),
        _rank_order_is_an_order,
        "rank_order names each of tp, cp, pp and dp once.",
    ),
    Rule(
        "tensor-parallel-divides-heads",
        (_TP, "model.num_attention_heads"),
        _tensor_parallel_divides("num_attention_heads", lambda config: config.model.num_attention_heads),
        "tensor_model_parallel_size divides num_attention_heads.",
    ),
    Rule(
        "tensor-parallel-and-query-groups",
        (_TP, "model.num_query_groups", "model.num_attention_heads"),
        _tensor_parallel_and_query_groups,
        "tensor_model_parallel_size divides num_query_groups or is a multiple of it: keys and values are then held "
        "by several ranks alike.",
    ),
    Rule(
        "tensor-parallel-divides-ffn",
        (_TP, "model.ffn_hidden_size"),
        _tensor_parallel_divides("ffn_hidden_size", lambda config: config.model.ffn_size),
        "tensor_model_parallel_size divides ffn_hidden_size.",
    ),
    Rule(
        "tensor-parallel-fits-vocabulary",
        (_TP, "model.vocab_size"),
        _tensor_parallel_fits_vocabulary,
        "vocab_size is at least tensor_model_parallel_size; it need not be a multiple, and nothing is padded.",
    ),
    Rule(
        "sequence-parallel-divides-sequence",
        ("parallelism.sequence_parallel", "model.seq_length", _TP),
        _sequence_parallel_divides,
        "With sequence_parallel, tensor_model_parallel_size divides seq_length.",
    ),
    Rule(
        "pipeline-stages-hold-the-layers",
        (
            _PP,
            "model.num_layers",
            "parallelism.pipeline_schedule",
            "parallelism.virtual_pipeline_model_parallel_size",
            "parallelism.pipeline_model_parallel_layout",
        ),
        _stages_hold_the_layers,
        "In a pipeline, each stage but the first and the last has a layer; a layout, where given, "
        "numbers each stage and sums to num_layers; a schedule has the stages on each rank that it is made for.",
    ),
    Rule(
        "pipeline-micro-batches",
        ("training.global_batch_size", "training.micro_batch_size", "parallelism.pipeline_schedule", _PP),
        _micro_batches_fit_the_schedule,
        "In a pipeline, the micro-batches of a step are at least as many as its ranks (gpipe: any number; dualpipev: "
        "twice as many), and with an interleaved schedule they make rounds of equal length.",
    ),
    Rule(
        "hybrid-shards-divide-ranks",
        ("parallelism.hybrid_shard_size", "parallelism.data_parallel_size"),
        _hybrid_shards_divide_ranks,
        "With zero_stage above 0, hybrid_shard_size divides the data-parallel size.",
    ),
    Rule(
        "hybrid-shards-are-shared",
        ("parallelism.hybrid_shard_size", "parallelism.zero_stage", "parallelism.data_parallel_size"),
        _hybrid_shards_are_shared,
        "With zero_stage above 0 and several data-parallel ranks, hybrid_shard_size is at least 2.",
    ),
    Rule(
        "pipelines-reduce-once",
        ("parallelism.reduce_each_micro_batch", _PP),
        _pipelines_reduce_once,
        "In a pipeline with several data-parallel ranks, gradients are reduced once a step.",
    ),
    Rule(
        "v-shape-gathers-no-tied-embedding",
        (
            "parallelism.zero_stage",
            "parallelism.pipeline_schedule",
            "model.untie_embeddings_and_output_weights",
            _PP,
        ),
        _one_rank_ends_share_no_shards,
        "With pipeline_schedule = zbv or dualpipev, a tied embedding and several data-parallel ranks, zero_stage is at "
        "most 2.",
    ),
    Rule(
        "memory-limit-counts-whole-ranks",
        ("memory.device_memory_limit_bytes", _TP, _PP, "parallelism.zero_stage"),
        _memory_limit_counts_whole_ranks,
        "On a CPU, a rank has the whole model and its optimizer state where device_memory_limit_bytes is given.",
    ),
)
"""Tried with the basic rules."""
