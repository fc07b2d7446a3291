"""Shards of the blocks that come next are gathered while a block computes (ZeRO 3)."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.data_parallelism import no_other_rank, overlap_in_words
from drivetrain.catalogue.entry import Knob, Optimisation
from drivetrain.catalogue.time_models.communication import PREFETCH
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "overlap.prefetch_blocks"
# Spans that FSDP2 opens itself.
_AHEAD, _GATHER = "FSDP::forward_prefetch for ", "FSDP::all_gather"


def _applies(config: RunConfig, facts: LaunchFacts) -> str | None:
    if (why := no_other_rank(config, facts)) is not None:
        return why
    if config.parallelism.zero_stage != 3:
        return f"with parallelism.zero_stage = {config.parallelism.zero_stage} blocks are not gathered"
    if config.parallelism.pipeline_model_parallel_size > 1:
        return "a pipeline schedule decides when a block is used"
    return None


def _on(config: RunConfig, facts: LaunchFacts) -> Mapping[str, Any] | None:
    if config.overlap.prefetch_blocks or _applies(config, facts) is not None:
        return None
    return {_FIELD: 1}


def _evidence(_config: RunConfig, seen: Observation, account: Account | None) -> Evidence:
    steps = max(seen.num_steps, 1)
    ahead = sum(count.calls for name, count in seen.ranges.items() if name.startswith(_AHEAD))
    gathers = sum(count.calls for name, count in seen.ranges.items() if name.startswith(_GATHER))
    if ahead:
        return Evidence(
            "shown",
            f"{ahead / steps:.3g} times a step forward asked for a block ahead of its use"
            f"{overlap_in_words(account)}",
        )
    if gathers:
        return Evidence(
            "absent", f"{gathers / steps:.3g} gathers a step, none of them asked for ahead in forward"
        )
    return Evidence("unknown", "the trace has no gathers of sharded blocks")


ENTRY = Optimisation(
    name="prefetch_blocks",
    summary="with ZeRO 3, the shards of the next blocks are gathered while a block computes",
    sources=(
        "PyTorch documentation, FSDPModule.set_modules_to_forward_prefetch",
        "Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277",
    ),
    field=_FIELD,
    requested=lambda config: config.overlap.prefetch_blocks > 0,
    on=_on,
    off=lambda _config: {_FIELD: 0},
    numerics="exact",
    treats=("communication",),
    cures=("communication.serial",),
    evidence=_evidence,
    time_model=PREFETCH,
    applies=_applies,
    knobs=(Knob(_FIELD, 1, 8, whole=True),),
    evidence_rule=(
        "shown: FSDP2's spans of gathers ahead of use in forward; absent: gathers, and none of them ahead in forward. "
        "(Backward asks one block ahead by itself.)"
    ),
)
