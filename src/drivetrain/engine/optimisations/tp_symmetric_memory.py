"""What enters and leaves tensor-parallel matrices is part of their products: torch's fused operators."""

from drivetrain.engine.capabilities import capability
from drivetrain.engine.optimisations.implementation import Building, Implementation, Status
from drivetrain.engine.parallel.fused_calls import FusedCalls

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    found = capability("symmetric_memory", building.device)
    if not found.available:
        return Status(active=False, reason=found.reason)
    building.fused_calls = FusedCalls()
    return Status(active=True)


def _at_end(building: Building) -> Status:
    calls = building.fused_calls
    assert calls is not None
    if not calls.steps:
        return Status(active=True)
    return Status(active=calls.wrong is None, reason=calls.wrong)


IMPLEMENTATION = Implementation(_prepare, at_end=_at_end)
