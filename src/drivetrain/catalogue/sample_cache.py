"""Finished sequences are kept on disk, so that what is expensive to build is built once."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Optimisation
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "data.sample_cache_bytes"
_FETCH = "drivetrain/fetch"
_BYTES = 2_000_000_000


def _on(config: RunConfig, _facts: LaunchFacts) -> Mapping[str, Any] | None:
    return None if config.data.sample_cache_bytes else {_FIELD: _BYTES}


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    if "ranges" in seen.missing:
        return Evidence("unknown", "the trace has no annotated ranges")
    cached = seen.ranges.get(f"{_FETCH}/sample_cache")
    if cached is not None:
        return Evidence("shown", f"{cached.calls} batches held sequences from the cache")
    if f"{_FETCH}/sample_cache_filled" in seen.ranges:
        return Evidence("unknown", "the sequences of the window were built for the first time, and kept")
    if _FETCH in seen.ranges:
        return Evidence("absent", "batches were fetched, and none held a sequence from the cache")
    return Evidence("unknown", "no batch was fetched in the window")


ENTRY = Optimisation(
    name="sample_cache",
    summary="finished sequences are kept on disk; later epochs and runs on the same data read them",
    sources=("TensorFlow documentation, tf.data: the cache transformation",),
    field=_FIELD,
    requested=lambda config: config.data.sample_cache_bytes > 0,
    on=_on,
    off=lambda _config: {_FIELD: 0},
    numerics="exact",
    treats=("data.loader",),
    cures=("data.slow_read", "data.slow_collation", "data.cold_cache"),
    # All of it is the host's.
    device_bytes=lambda _config, _facts: 0,
    evidence=_evidence,
    no_prediction=(
        "how many sequences are read a second time, and what reading them from disk takes, is not known ahead"
    ),
    evidence_rule=(
        "shown: batches of the window held sequences from the cache; absent: batches were fetched without one; "
        "unknown: they were built for the first time, and kept"
    ),
)
