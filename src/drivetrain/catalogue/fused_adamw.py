"""One kernel updates parameters and moments, instead of one operator for each term of AdamW."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Optimisation
from drivetrain.catalogue.time_models.update import FUSED_UPDATE
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

# The operator on the host (any device) and the CUDA kernel behind it.
_OPERATORS = ("aten::_fused_adamw_", "aten::_fused_adam_")
_KERNEL = "FusedAdam"


def _on(config: RunConfig, _facts: LaunchFacts) -> Mapping[str, Any] | None:
    return None if config.optimizer.fused else {"optimizer.fused": True}


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    found = [(name, count) for name, count in seen.operators.items() if name in _OPERATORS]
    found += [(name, count) for name, count in seen.kernels.items() if _KERNEL in name]
    if found:
        name, count = found[0]
        return Evidence("shown", f"the update ran fused: {count.calls} x {name}")
    if "operators" in seen.missing:
        return Evidence("unknown", "the trace has no operators")
    updates = sum(
        count.calls
        for name, count in seen.ranges.items()
        if name == "drivetrain/optimizer" or name.startswith("Optimizer.step#")
    )
    if updates:
        return Evidence("absent", "updates were recorded, and no fused kernel in them")
    return Evidence("unknown", "no update was recorded in the window")


ENTRY = Optimisation(
    name="fused_adamw",
    summary="one fused kernel for the update instead of one operator for each term and tensor",
    sources=("PyTorch documentation, torch.optim.AdamW(fused=True)", "NVIDIA Apex, FusedAdam"),
    field="optimizer.fused",
    requested=lambda config: config.optimizer.fused,
    on=_on,
    off=lambda _config: {"optimizer.fused": False},
    numerics="round-off",
    treats=("compute.optimizer", "host.launch", "host.python"),
    cures=("kernels.optimizer_update",),
    evidence=_evidence,
    time_model=FUSED_UPDATE,
    capability="fused_adamw",
    evidence_rule="shown: the operator aten::_fused_adamw_ in the window; absent: updates without it",
)
