"""Values that follow from a configuration: what absent leaves become, and the counts of a run.

Nothing here changes a configuration. Each derived value is reported with its reason.
"""

from dataclasses import dataclass

from drivetrain.config.layout import model_ranks, stage_plan
from drivetrain.config.rules import LaunchFacts
from drivetrain.config.schema import RunConfig
from drivetrain.config.training import DataConfig

__all__ = [
    "Derived",
    "data_parallel_size",
    "data_seed",
    "decay_tokens",
    "derived_values",
    "microbatches_per_rank",
    "num_microbatches",
    "split_weights",
    "tokens_per_step",
    "total_tokens",
    "wsd_decay_tokens",
]


@dataclass(frozen=True)
class Derived:
    """A value that was not given: the field, the value (None where it can't be known yet) and why."""

    field: str
    value: int | float | str | None
    reason: str


def data_parallel_size(config: RunConfig, world_size: int) -> int:
    """Data-parallel ranks: parallelism.data_parallel_size, or all processes over the ranks of one model."""
    given = config.parallelism.data_parallel_size
    return max(1, world_size // model_ranks(config)) if given is None else given


def data_seed(config: RunConfig) -> int:
    """Seed of the order of training data: data.seed, or run.seed."""
    return config.run.seed if config.data.seed is None else config.data.seed


def num_microbatches(config: RunConfig, world_size: int) -> int:
    """Micro-batches of one step on each data-parallel rank. The basic rules must hold."""
    return microbatches_per_rank(config, data_parallel_size(config, world_size))


def microbatches_per_rank(config: RunConfig, data_parallel_ranks: int) -> int:
    """The same for a number of data-parallel ranks, where they are there to be counted."""
    training = config.training
    per_pass = training.micro_batch_size * data_parallel_ranks
    assert training.global_batch_size % per_pass == 0, "rule global-batch-divides was not checked"
    return training.global_batch_size // per_pass


def tokens_per_step(config: RunConfig) -> int:
    """Tokens of one optimizer step over all ranks."""
    return config.training.global_batch_size * config.model.seq_length


def total_tokens(config: RunConfig) -> int:
    """Tokens of the whole run."""
    return config.training.train_iters * tokens_per_step(config)


def decay_tokens(config: RunConfig) -> int:
    """Tokens at which the decay of the learning rate ends."""
    return config.lr_schedule.decay_end(total_tokens(config))


def wsd_decay_tokens(config: RunConfig) -> int:
    """Length of the final decay of the WSD schedule, in tokens."""
    return config.lr_schedule.wsd_decay_length(total_tokens(config))


def split_weights(data: DataConfig) -> tuple[float, float]:
    """Weights of training and validation in data.split; either may be 0 unless the basic rules hold."""
    training, validation = data.split.split(",")
    return float(training), float(validation)


def derived_values(config: RunConfig, facts: LaunchFacts) -> list[Derived]:
    """Each absent leaf that is derived, with its value and reason, then the counts of the run."""
    return [*_model(config), *_execution(config, facts), *_schedule(config), *_counts(config, facts)]


def _model(config: RunConfig) -> list[Derived]:
    model = config.model
    found = []
    if model.ffn_hidden_size is None:
        reason = (
            "4 x hidden_size"
            if model.activation_func == "gelu"
            else "8/3 x hidden_size, rounded up to a multiple of 64"
        )
        found.append(Derived("model.ffn_hidden_size", model.ffn_size, reason))
    if model.num_query_groups is None:
        reason = "num_attention_heads: each query head has its own key and value"
        found.append(Derived("model.num_query_groups", model.query_groups, reason))
    if model.kv_channels is None:
        found.append(Derived("model.kv_channels", model.head_size, "hidden_size / num_attention_heads"))
    if model.max_position_embeddings is None:
        found.append(Derived("model.max_position_embeddings", model.max_positions, "seq_length"))
    return found


def _execution(config: RunConfig, facts: LaunchFacts) -> list[Derived]:
    found = []
    if config.data.seed is None:
        found.append(Derived("data.seed", config.run.seed, "run.seed"))
    if config.parallelism.data_parallel_size is None:
        reason = f"{facts.world_size} process{'es' if facts.world_size > 1 else ''}"
        if model_ranks(config) > 1:
            reason += f" / {model_ranks(config)} that hold one model"
        size = data_parallel_size(config, facts.world_size)
        found.append(Derived("parallelism.data_parallel_size", size, reason))
    found += _pipeline(config)
    if config.parallelism.hybrid_shard_size is None and config.parallelism.zero_stage > 0:
        size = data_parallel_size(config, facts.world_size)
        found.append(
            Derived("parallelism.hybrid_shard_size", size, "all data-parallel ranks share one set of shards")
        )
    if config.run.name is None:
        reason = (
            "the preset's or the file's name" if facts.source_name else "named by its source when it starts"
        )
        found.append(Derived("run.name", facts.source_name, reason))
    if config.run.num_threads is None:
        found.append(_num_threads(facts))
    return found


def _pipeline(config: RunConfig) -> list[Derived]:
    """Stages of a pipeline. The rules must hold."""
    parallelism = config.parallelism
    if parallelism.pipeline_model_parallel_size == 1:
        return []
    plan = stage_plan(config)
    found = []
    if parallelism.virtual_pipeline_model_parallel_size is None:
        name = "parallelism.virtual_pipeline_model_parallel_size"
        found.append(
            Derived(name, plan.num_stages // plan.pp, f"stages that {parallelism.pipeline_schedule} needs")
        )
    if parallelism.pipeline_model_parallel_layout is None:
        name, layers = "parallelism.pipeline_model_parallel_layout", ",".join(map(str, plan.layers_per_stage))
        found.append(Derived(name, layers, f"{plan.num_layers} layers over {plan.num_stages} stages"))
    return found


def _num_threads(facts: LaunchFacts) -> Derived:
    if facts.usable_cores is None:
        return Derived("run.num_threads", None, "usable cores / local processes, known where the run starts")
    processes = facts.local_world_size or facts.world_size
    value = max(1, facts.usable_cores // processes)
    reason = f"{facts.usable_cores} usable cores / {processes} local process{'es' if processes > 1 else ''}"
    return Derived("run.num_threads", value, reason)


def _schedule(config: RunConfig) -> list[Derived]:
    lr_schedule = config.lr_schedule
    found = []
    if lr_schedule.lr_decay_tokens is None and lr_schedule.lr_decay_style != "constant":
        found.append(Derived("lr_schedule.lr_decay_tokens", decay_tokens(config), "all tokens of the run"))
    if lr_schedule.lr_wsd_decay_tokens is None and lr_schedule.lr_decay_style == "WSD":
        value = wsd_decay_tokens(config)
        found.append(Derived("lr_schedule.lr_wsd_decay_tokens", value, "one fifth of lr_decay_tokens"))
    return found


def _counts(config: RunConfig, facts: LaunchFacts) -> list[Derived]:
    training = config.training
    ranks = data_parallel_size(config, facts.world_size)
    per_pass = training.micro_batch_size * ranks
    whole = training.global_batch_size % per_pass == 0
    return [
        Derived(
            "num_microbatches",
            training.global_batch_size // per_pass if whole else None,
            "global_batch_size / (micro_batch_size x data-parallel size)"
            if whole
            else f"global_batch_size = {training.global_batch_size} is no multiple of {per_pass}",
        ),
        Derived("tokens_per_step", tokens_per_step(config), "global_batch_size x seq_length"),
        Derived("total_tokens", total_tokens(config), "train_iters x tokens_per_step"),
    ]
