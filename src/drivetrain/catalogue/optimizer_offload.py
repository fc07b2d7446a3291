"""A share of the optimizer's state lives in host memory."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Optimisation
from drivetrain.catalogue.offload_evidence import evidence_of_copies
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "memory.optimizer_offload_fraction"


def _on(config: RunConfig, _facts: LaunchFacts) -> Mapping[str, Any] | None:
    return {_FIELD: 1.0} if config.memory.optimizer_offload_fraction == 0 else None


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    return evidence_of_copies(
        seen, "drivetrain/offload/optimizer", "states of the optimizer visited the device and went back"
    )


ENTRY = Optimisation(
    name="optimizer_offload",
    summary="a share of AdamW's moments lives in host memory and visits the device to be updated",
    sources=(
        "Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv 2104.07857",
        "Megatron-LM, --optimizer-cpu-offload and --optimizer-offload-fraction",
        "SOURCES A12",
    ),
    field=_FIELD,
    requested=lambda config: config.memory.optimizer_offload_fraction > 0,
    on=_on,
    off=lambda _config: {_FIELD: 0.0},
    numerics="exact",
    treats=(),
    relieves=("optimizer",),
    evidence=_evidence,
    no_prediction=("at what rate device and host memory exchange data is not among the measured ceilings"),
    evidence_rule=(
        "shown: updates with states that visit the device were recorded in the window; absent: steps without any. What "
        "travels, and how long it was waited for, are the metrics `offload/moved_bytes` and `offload/exposed_s`"
    ),
)
