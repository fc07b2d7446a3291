"""Updated parameters travel to the ranks that need them while the next forward pass begins (ZeRO 1 and 2)."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.data_parallelism import no_other_rank, overlap_in_words
from drivetrain.catalogue.entry import Optimisation
from drivetrain.catalogue.time_models.communication import PARAMETER_GATHER
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "overlap.overlap_param_gather"
_OVERLAPPED, _BLOCKING = "drivetrain/gather/overlapped", "drivetrain/gather/blocking"


def _applies(config: RunConfig, facts: LaunchFacts) -> str | None:
    if (why := no_other_rank(config, facts)) is not None:
        return why
    stage = config.parallelism.zero_stage
    if stage == 0:
        return "with parallelism.zero_stage = 0 every rank updates all parameters itself"
    if stage == 3:
        return "with parallelism.zero_stage = 3 a block gathers its parameters itself; see overlap.prefetch_blocks"
    return None


def _on(config: RunConfig, facts: LaunchFacts) -> Mapping[str, Any] | None:
    if config.overlap.overlap_param_gather or _applies(config, facts) is not None:
        return None
    return {_FIELD: True}


def _evidence(_config: RunConfig, seen: Observation, account: Account | None) -> Evidence:
    steps = max(seen.num_steps, 1)
    overlapped, blocking = seen.ranges.get(_OVERLAPPED), seen.ranges.get(_BLOCKING)
    if overlapped is not None:
        return Evidence(
            "shown",
            f"{overlapped.calls / steps:.3g} times a step a part of the model waited for its own parameters, "
            f"{overlapped.ns / steps / 1e6:.3g} ms{overlap_in_words(account)}",
        )
    if blocking is not None:
        return Evidence(
            "absent", f"all parameters were waited for at once, {blocking.ns / steps / 1e6:.3g} ms a step"
        )
    return Evidence("unknown", "no gather of updated parameters was recorded")


ENTRY = Optimisation(
    name="overlap_param_gather",
    summary="with ZeRO 1 and 2, updated parameters travel while the next forward pass begins",
    sources=("Megatron-LM, --overlap-param-gather", "Rajbhandari et al. 2020, arXiv 1910.02054"),
    field=_FIELD,
    requested=lambda config: config.overlap.overlap_param_gather,
    on=_on,
    off=lambda _config: {_FIELD: False},
    numerics="exact",
    treats=("communication",),
    cures=("communication.serial",),
    evidence=_evidence,
    time_model=PARAMETER_GATHER,
    applies=_applies,
    evidence_rule=(
        "shown: parts of the model waited for their own parameters in the window; absent: all parameters were waited "
        "for at the end of a step"
    ),
)
