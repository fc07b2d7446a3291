"""A thread of the training process builds the next batches while the device computes."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Knob, Optimisation
from drivetrain.catalogue.time_models.waiting import BUILDERS
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "data.prefetch_batches"
_FETCH = "drivetrain/fetch"


def _applies(config: RunConfig, _facts: LaunchFacts) -> str | None:
    if config.data.num_workers:
        return "data.num_workers is above 0: workers build batches ahead already"
    return None


def _on(config: RunConfig, facts: LaunchFacts) -> Mapping[str, Any] | None:
    if config.data.prefetch_batches or _applies(config, facts) is not None:
        return None
    return {_FIELD: 4}


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    if "ranges" in seen.missing:
        return Evidence("unknown", "the trace has no annotated ranges")
    ahead = seen.ranges.get(f"{_FETCH}/prefetched")
    if ahead is not None:
        return Evidence("shown", f"{ahead.calls} batches came from the thread that builds them")
    if _FETCH in seen.ranges:
        return Evidence("absent", "batches were fetched, and none from a thread that builds them")
    return Evidence("unknown", "no batch was fetched in the window")


ENTRY = Optimisation(
    name="prefetch",
    summary="a thread builds the next batches while the device computes",
    sources=("NVIDIA DALI documentation, prefetch_queue_depth",),
    field=_FIELD,
    requested=lambda config: config.data.prefetch_batches > 0,
    on=_on,
    off=lambda _config: {_FIELD: 0},
    numerics="exact",
    treats=("data.loader",),
    cures=("data.waiting", "data.slow_read"),
    # All of it is the host's.
    device_bytes=lambda _config, _facts: 0,
    evidence=_evidence,
    time_model=BUILDERS,
    applies=_applies,
    knobs=(Knob(_FIELD, 1, 64, whole=True, scale="log"),),
    evidence_rule="shown: batches of the window came from the thread; absent: batches were fetched, none from it",
)
