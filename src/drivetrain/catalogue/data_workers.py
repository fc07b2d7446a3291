"""Batches are built by worker processes while the device computes."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Knob, Optimisation
from drivetrain.catalogue.time_models.waiting import BUILDERS
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FROM_WORKERS = "_MultiProcessingDataLoaderIter.__next__"


def _on(config: RunConfig, _facts: LaunchFacts) -> Mapping[str, Any] | None:
    return None if config.data.num_workers else {"data.num_workers": 1}


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    if "ranges" in seen.missing:
        return Evidence("unknown", "the trace has no annotated ranges")
    name = next((name for name in seen.ranges if _FROM_WORKERS in name), None)
    if name is not None:
        return Evidence("shown", f"batches came from worker processes: {seen.ranges[name].calls} x {name}")
    if "drivetrain/fetch" in seen.ranges:
        return Evidence("absent", "batches were fetched, and none from a worker process")
    return Evidence("unknown", "no batch was fetched in the window")


ENTRY = Optimisation(
    name="data_workers",
    summary="worker processes build the batches ahead of the step that needs them",
    sources=("PyTorch documentation, torch.utils.data: multi-process data loading",),
    field="data.num_workers",
    requested=lambda config: config.data.num_workers > 0,
    on=_on,
    off=lambda _config: {"data.num_workers": 0},
    numerics="exact",
    treats=("data.loader",),
    cures=(
        "data.waiting",
        "data.slow_transform",
        "data.slow_read",
        "data.slow_collation",
        "data.too_few_workers",
    ),
    # All of it is the host's.
    device_bytes=lambda _config, _facts: 0,
    evidence=_evidence,
    knobs=(
        Knob("data.num_workers", 1, 16, whole=True, scale="log"),
        Knob("data.prefetch_factor", 1, 16, whole=True, scale="log"),
    ),
    # Batches that are ready ahead are the product of both.
    interacts_with=(("data.num_workers", "data.prefetch_factor"),),
    time_model=BUILDERS,
    evidence_rule=(
        "shown: batches fetched from worker processes in the window; absent: batches fetched, none from a worker"
    ),
)
