"""A thread writes the checkpoint from a copy in host memory while training goes on."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Optimisation
from drivetrain.catalogue.time_models.update import BACKGROUND_SAVE
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "checkpoint.async_save"
_SAVE = "drivetrain/checkpoint"
_SNAPSHOT = "drivetrain/checkpoint/snapshot"


def _applies(config: RunConfig, _facts: LaunchFacts) -> str | None:
    interval = config.checkpoint.save_interval
    if interval == 0:
        return (
            "checkpoint.save_interval is 0: the only checkpoint is the last one, which is always waited for"
        )
    if interval >= config.training.train_iters:
        return (
            f"checkpoint.save_interval = {interval} is not below training.train_iters = {config.training.train_iters}: "
            "the only checkpoint is the last one, which is always waited for"
        )
    return None


def _on(config: RunConfig, facts: LaunchFacts) -> Mapping[str, Any] | None:
    if config.checkpoint.async_save or _applies(config, facts) is not None:
        return None
    return {_FIELD: True}


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    if "ranges" in seen.missing:
        return Evidence("unknown", "the trace has no annotated ranges")
    saves, snapshots = seen.ranges.get(_SAVE), seen.ranges.get(_SNAPSHOT)
    if snapshots is not None:
        return Evidence(
            "shown",
            f"{snapshots.calls} checkpoints were copied to host memory in {snapshots.ns / 1e6:.3g} ms and written by "
            "a thread",
        )
    if saves is not None:
        return Evidence("absent", f"{saves.calls} x {_SAVE}, none of them with a copy to host memory")
    return Evidence("unknown", "no checkpoint was saved in the window")


ENTRY = Optimisation(
    name="async_save",
    summary="a thread writes checkpoints from a copy in host memory while training goes on",
    sources=("Megatron-LM, --async-save", "PyTorch documentation, torch.distributed.checkpoint.async_save"),
    field=_FIELD,
    requested=lambda config: config.checkpoint.async_save,
    on=_on,
    off=lambda _config: {_FIELD: False},
    numerics="exact",
    treats=("maintenance.checkpoint",),
    cures=("maintenance.checkpoint_too_often",),
    evidence=_evidence,
    time_model=BACKGROUND_SAVE,
    applies=_applies,
    evidence_rule=(
        "shown: a checkpoint was saved in the window by a copy to host memory; absent: one was saved without; unknown: "
        "the window has no checkpoint"
    ),
)
