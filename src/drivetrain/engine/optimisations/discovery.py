"""Finding the implementations: each module of this package that has an ``IMPLEMENTATION``."""

import importlib
import pkgutil

from drivetrain.engine.optimisations.implementation import Implementation

__all__ = ["implementations"]

_PACKAGE = "drivetrain.engine.optimisations"


def implementations() -> dict[str, Implementation]:
    """All of them by name, which is their module's and their entry's."""
    package = importlib.import_module(_PACKAGE)
    found = {}
    for module in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        candidate = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), "IMPLEMENTATION", None)
        if candidate is None:
            continue
        assert isinstance(candidate, Implementation), f"{module}.IMPLEMENTATION is no Implementation"
        found[module] = candidate
    return found
