"""Each transformer block is compiled: what lies between its matrix products becomes few generated kernels."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Optimisation
from drivetrain.catalogue.operators import calls_by_backend
from drivetrain.catalogue.time_models.activations import COMPILED
from drivetrain.config import LaunchFacts, RunConfig, operator_fields
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

# What a call of a compiled graph leaves in a trace, whatever the backend and the device.
_TRACKS = ("Torch-Compiled Region", "CompiledFxGraph", "CompiledFunction")


def _on(config: RunConfig, _facts: LaunchFacts) -> Mapping[str, Any] | None:
    return None if config.fusion.compile else {"fusion.compile": True}


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    of_operators = sum(
        count.calls
        for operator in operator_fields()
        for backend, count in calls_by_backend(seen, operator).items()
        if backend == "inductor"
    )
    for track in _TRACKS:
        for records in (seen.ranges, seen.operators):
            found = {name: count.calls for name, count in records.items() if track in name}
            # An operator's own compiled formula leaves one for its forward and one for its backward pass.
            if sum(found.values()) > 2 * of_operators:
                name = max(found, key=lambda name: found[name])
                return Evidence("shown", f"compiled code ran: {found[name]} x {name}")
    if of_operators:
        return Evidence("unknown", "compiled code ran, and may all be of operators whose backend is inductor")
    if "ranges" in seen.missing or "operators" in seen.missing:
        return Evidence("unknown", "the trace has no ranges or operators, by which compiled code would show")
    if "drivetrain/forward" in seen.ranges:
        return Evidence("absent", "forward passes were recorded, and no call of compiled code")
    return Evidence("unknown", "no forward pass was recorded in the window")


ENTRY = Optimisation(
    name="compile",
    summary="generated kernels do what lies between the matrix products of each block (torch.compile)",
    sources=("Ansel et al. 2024, PyTorch 2 (ASPLOS)", "PyTorch documentation, torch.compile"),
    field="fusion.compile",
    requested=lambda config: config.fusion.compile,
    on=_on,
    off=lambda _config: {"fusion.compile": False},
    numerics="round-off",
    # Attention, embedding, loss and update stay outside the graphs; products are the library's either way.
    treats=(
        "compute.norm",
        "compute.activation",
        "compute.elementwise",
        "compute.copy_cast",
        "host.launch",
        "host.python",
    ),
    cures=("host.launch_bound", "kernels.unfused_operators", "host.launch", "kernels.memory_bound_operators"),
    evidence=_evidence,
    time_model=COMPILED,
    capability="compile",
    evidence_rule=(
        "shown: calls of compiled graphs in the window, more than operators with the backend inductor account for; "
        "absent: forward passes without any such call"
    ),
)
