"""A preset of the operators' fields; each operator's own file does what it says."""

from drivetrain.engine.optimisations.implementation import Building, Implementation, Status
from drivetrain.engine.optimisations.service import service_of_rank

__all__ = ["IMPLEMENTATION"]


def _prepare(_building: Building) -> Status:
    return Status(active=True)


def _at_end(building: Building) -> Status:
    service = building.service or service_of_rank(building.operators)
    if not service.served and not building.decoder_is_compiled:
        return Status(active=False, reason="no operator was called")
    return Status(active=True)


IMPLEMENTATION = Implementation(_prepare, stage="model", at_end=_at_end)
