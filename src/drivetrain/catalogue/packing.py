"""Several documents share a sequence, instead of each being padded to the length of one."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Optimisation
from drivetrain.catalogue.time_models.waiting import PACKED
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "data.packing"
_FETCH = "drivetrain/fetch"


def _on(config: RunConfig, _facts: LaunchFacts) -> Mapping[str, Any] | None:
    return {_FIELD: "best_fit"} if config.data.packing == "pad" else None


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    if "ranges" in seen.missing:
        return Evidence("unknown", "the trace has no annotated ranges")
    packed = seen.ranges.get(f"{_FETCH}/packed")
    if packed is not None:
        return Evidence("shown", f"{packed.calls} batches of packed documents were fetched")
    if _FETCH in seen.ranges:
        return Evidence("absent", "batches were fetched, and none of packed documents")
    return Evidence("unknown", "no batch was fetched in the window")


ENTRY = Optimisation(
    name="packing",
    summary="several documents share a sequence, instead of each being padded to its length",
    sources=(
        "Krell et al. 2021, Efficient sequence packing without cross-contamination (arXiv 2107.02027)",
        "Ding et al. 2024, Fewer truncations improve language modeling (arXiv 2404.10830)",
    ),
    field=_FIELD,
    requested=lambda config: config.data.packing != "pad",
    on=_on,
    off=lambda _config: {_FIELD: "pad"},
    # Other sequences make up a batch, and more tokens of it carry loss.
    numerics="statistical",
    # Work on padding is work like any other: only effective tokens tell it apart.
    treats=("compute.matmul", "compute.attention"),
    cures=("data.padding",),
    # All of it is the host's.
    device_bytes=lambda _config, _facts: 0,
    evidence=_evidence,
    time_model=PACKED,
    evidence_rule="shown: batches of packed documents were fetched in the window; absent: batches, none of them packed",
)
