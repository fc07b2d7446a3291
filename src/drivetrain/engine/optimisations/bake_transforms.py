"""A corpus that holds the result of the transform; it is opened, or made first, where corpora are (``engine/data``)."""

from drivetrain.engine.optimisations.implementation import Building, Implementation, Status

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    assert building.config.data.transform is not None
    return Status(active=True)


def _at_start(building: Building) -> Status:
    loader = building.loader
    assert loader is not None
    if loader.samples.is_baked:
        return Status(active=True)
    return Status(
        active=False,
        reason="the corpus does not hold the transform's result, which is applied as documents are read",
    )


IMPLEMENTATION = Implementation(_prepare, at_start=_at_start)
