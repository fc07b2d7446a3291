"""The rungs of a migration: what lies between one plain process and an imported configuration, one difference each.

Nothing here runs anything. A rung names its leaves, what it claims of the numbers (and so which gate it must pass), and
how many processes a run of it has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.catalogue import entry_of_field
from drivetrain.catalogue.rules import all_rules
from drivetrain.config import (
    LaunchFacts,
    LearningRateScheduleConfig,
    MemoryConfig,
    OverlapConfig,
    ParallelismConfig,
    PrecisionConfig,
    RunConfig,
    differing_leaves,
    leaf_values,
    least_processes,
    violations,
)
from drivetrain.config.fusion import FusionConfig
from drivetrain.tune.gate import Tier

__all__ = ["RungPlan", "plain_start", "proof_batch", "rungs_between"]

_MOST_MULTIPLES = 4096

_LAYOUT: Tier = "round-off"
_GROUPS: tuple[tuple[str, tuple[str, ...], Tier], ...] = (
    ("micro-batch", ("training.micro_batch_size",), "round-off"),
    ("tensor parallelism", ("parallelism.tensor_model_parallel_size",), _LAYOUT),
    ("sequence parallelism", ("parallelism.sequence_parallel",), _LAYOUT),
    (
        "pipeline",
        (
            "parallelism.pipeline_model_parallel_size",
            "parallelism.pipeline_schedule",
            "parallelism.virtual_pipeline_model_parallel_size",
            "parallelism.pipeline_model_parallel_layout",
        ),
        _LAYOUT,
    ),
    ("data parallelism", ("parallelism.data_parallel_size", "parallelism.rank_order"), _LAYOUT),
    (
        "precision",
        (
            "precision.params_dtype",
            "precision.loss_scale",
            "precision.initial_loss_scale",
            "precision.min_loss_scale",
            "precision.loss_scale_window",
            "precision.hysteresis",
        ),
        "statistical",
    ),
    ("moments", ("precision.optimizer_state_dtype",), "statistical"),
    ("gradients on the wire", ("precision.grad_reduce_dtype",), "statistical"),
    (
        "recompute",
        (
            "memory.recompute_granularity",
            "memory.recompute_method",
            "memory.recompute_num_layers",
            "memory.recompute_modules",
            "memory.budget_bytes",
        ),
        "exact",
    ),
    ("ZeRO", ("parallelism.zero_stage", "parallelism.hybrid_shard_size"), _LAYOUT),
    ("reduction with each micro-batch", ("parallelism.reduce_each_micro_batch",), _LAYOUT),
)
"""Leaves that belong together, and their tier. All others are rungs of their own, by the catalogue's tier."""
_ORDER = (
    "training.micro_batch_size",
    "parallelism.tensor",
    "parallelism.sequence",
    "parallelism.pipeline",
    "parallelism.data",
    "parallelism.rank_order",
    "precision.params_dtype",
    "precision.",
    "fusion.level",
    "fusion.",
    "optimizer.",
    "memory.recompute",
    "memory.budget",
    "parallelism.zero_stage",
    "parallelism.hybrid",
    "parallelism.reduce",
    "overlap.",
    "memory.",
    "data.",
    "parallelism.",
    "checkpoint.",
)
"""Beginnings of leaves in the order of the rungs."""
_NOT_RUNGS = (
    "run.num_threads",
    "training.global_batch_size",
    "lr_schedule.",
    "model.hidden_dropout",
    "model.attention_dropout",
)
"""Leaves in which a proof differs from the imported configuration for good."""
_DEFAULTS = (
    "data.num_workers",
    "data.prefetch_factor",
    "data.prefetch_batches",
    "data.sample_cache_bytes",
    "checkpoint.async_save",
)
"""Leaves outside those sections that say how something is done, and not what."""


@dataclass(frozen=True)
class RungPlan:
    """One difference.

    Attributes:
        name: in words.
        leaves: leaf → value in the imported configuration.
        tier: the gate it must pass.
        why: it is that tier.
    """

    name: str
    leaves: Mapping[str, Any]
    tier: Tier
    why: str


def plain_start(target: RunConfig, *, num_threads: int) -> RunConfig:
    """The same training in one process, by the model's own code, in fp32, one sequence at a time.

    Model, data, schedule and optimizer are ``target``'s, and so are the tokens of a step but for :func:`proof_batch`.
    Nothing is dropped out: ranks, and other micro-batches, draw other masks, which no gate tells from a mistake.

    Args:
        num_threads: of each process of every rung: more would be another summation.
    """
    patience = target.parallelism.distributed_timeout_minutes
    batch = proof_batch(target)
    sections: dict[str, Any] = {
        "model": target.model.model_copy(update={"hidden_dropout": 0.0, "attention_dropout": 0.0}),
        "parallelism": ParallelismConfig(distributed_timeout_minutes=patience),
        "overlap": OverlapConfig(),
        "fusion": FusionConfig(),
        "memory": MemoryConfig(),
        "precision": PrecisionConfig(params_dtype="fp32"),
    }
    data = type(target.data)()
    sections["data"] = target.data.model_copy(
        update={path.partition(".")[2]: getattr(data, path.partition(".")[2]) for path in _DEFAULTS[:4]}
    )
    sections["checkpoint"] = target.checkpoint.model_copy(update={"async_save": False})
    sections["optimizer"] = target.optimizer.model_copy(update={"fused": False})
    sections["training"] = target.training.model_copy(
        update={"micro_batch_size": 1, "global_batch_size": batch}
    )
    sections["lr_schedule"] = _schedule_of(target, batch)
    sections["run"] = target.run.model_copy(update={"num_threads": num_threads})
    return target.model_copy(update=sections)


def _schedule_of(target: RunConfig, batch: int) -> LearningRateScheduleConfig:
    """The schedule of ``target`` with each step's rate where it was: its tokens shrink with those of a step."""
    schedule, whole = target.lr_schedule, target.training.global_batch_size
    lengths = ("lr_warmup_tokens", "lr_decay_tokens", "lr_wsd_decay_tokens")
    given = {name: value for name in lengths if (value := getattr(schedule, name)) is not None}
    # A length that is there stays there: a decay of no tokens at all is no legal one.
    scaled = {name: max(value * batch // whole, min(value, 1)) for name, value in given.items()}
    return schedule.model_copy(update=scaled)


def proof_batch(target: RunConfig) -> int:
    """Sequences of a step of every proof: the least global batch with which the rules of ``target`` hold.

    The curve of a large batch is proven by a small one: that a step adds up the same numbers does not depend on how
    many there are. The imported configuration keeps its own.
    """
    own = target.training.global_batch_size
    unit = target.training.micro_batch_size * (target.parallelism.data_parallel_size or 1)
    facts = LaunchFacts(world_size=least_processes(target))
    for multiple in range(1, min(_MOST_MULTIPLES, own // max(1, unit)) + 1):
        size = multiple * unit
        training = target.training.model_copy(update={"global_batch_size": size})
        if not violations(target.model_copy(update={"training": training}), facts, all_rules()):
            return min(size, own)
    return own


def rungs_between(plain: RunConfig, target: RunConfig) -> list[RungPlan]:
    """Every difference of ``target`` from ``plain``, in the order in which they are brought in.

    The global batch with its schedule, and threads, are no rungs: they are the proof's own.
    """
    differing = [path for path in differing_leaves(plain, target) if not path.startswith(_NOT_RUNGS)]
    values = {leaf.path: value for leaf, value in leaf_values(target)}
    found: list[RungPlan] = []
    grouped: set[str] = set()
    for path in sorted(differing, key=_place):
        if path in grouped:
            continue
        group = next((one for one in _GROUPS if path in one[1]), None)
        if group is None:
            found.append(_alone(path, values[path]))
            continue
        name, leaves, tier = group
        own = {leaf: values[leaf] for leaf in leaves if leaf in differing}
        grouped.update(own)
        why = "ranks add up the same numbers in another order" if tier == _LAYOUT else _claim(path, tier)
        found.append(RungPlan(name, own, tier, why))
    return found


def _place(path: str) -> tuple[int, str]:
    place = next((place for place, start in enumerate(_ORDER) if path.startswith(start)), len(_ORDER))
    return place, path


def _alone(path: str, value: Any) -> RungPlan:
    entry = entry_of_field(path)
    tier: Tier = "exact" if entry is None else entry.numerics
    name = path if entry is None else entry.name
    return RungPlan(name, {path: value}, tier, _claim(path, tier))


def _claim(path: str, tier: Tier) -> str:
    entry = entry_of_field(path)
    if entry is None:
        return "no catalogue entry has it, so it claims to change no number"
    return f"the catalogue says that {entry.name} is {tier}"
