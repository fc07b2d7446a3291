"""A rule of diagnosis, and finding them: each module of ``rules`` has a ``RULE``."""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Finding

__all__ = ["Rule", "rules"]

_PACKAGE = "drivetrain.diagnose.rules"


@dataclass(frozen=True)
class Rule:
    """Looks for one kind of cause.

    Attributes:
        name: of its file.
        detect: the findings; none where what it reads is missing. Those below the least share are left out by the
            caller.
    """

    name: str
    detect: Callable[[Facts], Iterable[Finding]]


@functools.cache
def rules() -> tuple[Rule, ...]:
    """All rules, by name."""
    package = importlib.import_module(_PACKAGE)
    found = []
    for module in sorted(one.name for one in pkgutil.iter_modules(package.__path__)):
        rule = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), "RULE", None)
        assert isinstance(rule, Rule), f"{_PACKAGE}.{module} has no RULE"
        assert rule.name == module, f"the rule {rule.name} is in {module}.py"
        found.append(rule)
    return tuple(found)
