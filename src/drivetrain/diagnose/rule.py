"""A rule of diagnosis, and finding them: each module of ``rules`` has a ``RULE``."""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from drivetrain.diagnose.causes import CAUSES
from drivetrain.diagnose.facts import Facts, Need
from drivetrain.diagnose.finding import Finding

__all__ = ["Rule", "rules"]

_PACKAGE = "drivetrain.diagnose.rules"


@dataclass(frozen=True)
class Rule:
    """Looks for one kind of cause.

    Attributes:
        name: of its file.
        causes: identifiers of what it can find.
        needs: facts without which it is not asked; the diagnosis then says so, with the reason. An account there is
            always.
        detect: the findings; none where the cause is not there. Those below the least share are left out by the caller.
    """

    name: str
    causes: tuple[str, ...]
    needs: tuple[Need, ...]
    detect: Callable[[Facts], Iterable[Finding]]

    def missing(self, facts: Facts) -> str | None:
        """Why it cannot be asked; None: it can."""
        return next((why for need in self.needs if (why := facts.missing(need)) is not None), None)


@functools.cache
def rules() -> tuple[Rule, ...]:
    """All rules, by name."""
    package = importlib.import_module(_PACKAGE)
    found = []
    for module in sorted(one.name for one in pkgutil.iter_modules(package.__path__)):
        rule = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), "RULE", None)
        assert isinstance(rule, Rule), f"{_PACKAGE}.{module} has no RULE"
        assert rule.name == module, f"the rule {rule.name} is in {module}.py"
        assert rule.causes, f"{module} finds nothing"
        assert set(rule.causes) <= CAUSES.keys(), f"{module} finds what is no documented cause"
        found.append(rule)
    return tuple(found)
