"""Gradients and parameters travel in levels: inside a machine, between machines, inside again."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Optimisation
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.config.hosts import ranks_per_host, why_one_level
from drivetrain.config.layout import Layout, is_order, layout_of, model_ranks
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "overlap.hierarchical_collectives"
_SPAN = "drivetrain/levels/"


def _dimensions(config: RunConfig, layout: Layout) -> tuple[str, ...]:
    """Those along which gradients are summed or parameters gathered, the one that carries most first."""
    stage = config.parallelism.zero_stage
    if stage == 0 or layout.size("dp_replicate") == 1:
        return ("dp",)
    # FSDP2 sums over replicas by itself.
    return {1: ("dp", "dp_shard"), 2: ("dp_shard", "dp_replicate")}.get(stage, ("dp_shard",))


def _layout(config: RunConfig, facts: LaunchFacts) -> Layout | None:
    """None where rules of layouts are broken, which say so themselves."""
    parallelism, ranks = config.parallelism, model_ranks(config)
    data_parallel = facts.world_size // ranks
    fits = facts.world_size % ranks == 0 and parallelism.data_parallel_size in (None, data_parallel)
    shards = parallelism.hybrid_shard_size if parallelism.zero_stage else None
    if not fits or not is_order(parallelism.rank_order) or (shards and data_parallel % shards):
        return None
    return layout_of(config, facts.world_size)


def _applies(config: RunConfig, facts: LaunchFacts) -> str | None:
    if facts.world_size == 1:
        return "one process has nobody to communicate with"
    layout = _layout(config, facts)
    if layout is None:
        return None
    if layout.dp == 1:
        return "there is one data-parallel rank, which has nothing to share or to reduce"
    reasons = [why_one_level(layout, dim, ranks_per_host(facts)) for dim in _dimensions(config, layout)]
    return None if None in reasons else reasons[0]


def _on(config: RunConfig, facts: LaunchFacts) -> Mapping[str, Any] | None:
    if config.overlap.hierarchical_collectives or _applies(config, facts) is not None:
        return None
    return {_FIELD: True}


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    if "ranges" in seen.missing:
        return Evidence("unknown", "the trace has no ranges, by which collectives in levels are told")
    calls = sum(count.calls for name, count in seen.ranges.items() if name.startswith(_SPAN))
    if not calls:
        return Evidence("absent", "no collective of the window went in levels")
    return Evidence("shown", f"{calls / max(seen.num_steps, 1):.3g} collectives a step went in levels")


ENTRY = Optimisation(
    name="hierarchical_collectives",
    summary="sums of gradients and gathers of parameters cross the links between machines once for each machine",
    sources=(
        "Cho et al. 2019, BlueConnect (MLSys)",
        "Mikami et al. 2018, 2D-Torus all-reduce (arXiv:1811.05233)",
    ),
    field=_FIELD,
    requested=lambda config: config.overlap.hierarchical_collectives,
    on=_on,
    off=lambda _config: {_FIELD: False},
    # The sums of machines are added up, instead of the ranks' gradients one after the other.
    numerics="round-off",
    treats=("communication",),
    cures=("communication.too_much",),
    evidence=_evidence,
    no_prediction=(
        "rates of links inside and between machines are not kept with a run: `drivetrain bench comm` prints them"
    ),
    applies=_applies,
    evidence_rule="shown: ranges drivetrain/levels/... are recorded, in which such collectives begin; absent: none is",
)
