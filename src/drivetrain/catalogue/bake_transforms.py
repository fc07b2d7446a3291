"""A corpus to which the transform was applied once, instead of applying it each time a document is read."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Optimisation
from drivetrain.catalogue.time_models.waiting import BAKED_TRANSFORM
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.config.blend import BAKED, baked_with, with_prefixes
from drivetrain.measure.account import Account
from drivetrain.measure.corpora import baked_data_path, standard_library_prefix
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "data.data_path"
_FETCH = "drivetrain/fetch"


def _requested(config: RunConfig) -> bool:
    return config.data.transform is not None and any(baked_with(config.data))


def _applies(config: RunConfig, _facts: LaunchFacts) -> str | None:
    return (
        "data.transform is absent: there is nothing to apply once" if config.data.transform is None else None
    )


def _on(config: RunConfig, _facts: LaunchFacts) -> Mapping[str, Any] | None:
    path = baked_data_path(config)
    return None if path is None else {_FIELD: path}


def _off(config: RunConfig) -> Mapping[str, Any]:
    path = config.data.data_path
    if path is None or not any(baked_with(config.data)):
        return {_FIELD: path}
    source = with_prefixes(path, _source)
    default = str(standard_library_prefix(config.model.vocab_size))
    return {_FIELD: None if source == default else source}


def _source(prefix: str) -> str:
    found = BAKED.match(prefix)
    return prefix if found is None else found["source"]


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    if "ranges" in seen.missing:
        return Evidence("unknown", "the trace has no annotated ranges")
    baked = seen.ranges.get(f"{_FETCH}/baked")
    if baked is not None:
        return Evidence(
            "shown", f"{baked.calls} batches were read from a corpus that holds the transform's result"
        )
    if _FETCH in seen.ranges:
        return Evidence(
            "absent", "batches were fetched, and none from a corpus that holds the transform's result"
        )
    return Evidence("unknown", "no batch was fetched in the window")


ENTRY = Optimisation(
    name="bake_transforms",
    summary="the corpus holds the result of data.transform, which is applied once, when the corpus is made",
    sources=("MosaicML Streaming documentation: preprocessing ahead of training",),
    field=_FIELD,
    requested=_requested,
    on=_on,
    off=_off,
    numerics="exact",
    treats=("data.loader",),
    cures=("data.slow_transform",),
    # All of it is the host's.
    device_bytes=lambda _config, _facts: 0,
    evidence=_evidence,
    time_model=BAKED_TRANSFORM,
    applies=_applies,
    evidence_rule=(
        "shown: batches of the window were read from a corpus that holds the transform's result; absent: batches were "
        "fetched, none of them so"
    ),
)
