"""How documents fill sequences; the rows are made where samples are (``engine/data/rows.py``)."""

from drivetrain.engine.optimisations.implementation import Building, Implementation, Status

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    assert building.config.data.packing != "pad"
    return Status(active=True)


IMPLEMENTATION = Implementation(_prepare)
