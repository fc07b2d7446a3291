"""What was found wrong with a trace, and which numbers of its account can therefore not be trusted.

A reader never repairs in silence: each rule it applied to a damaged file is one :class:`Finding`. A number a
finding names in ``affects`` is withheld from the account (``null`` with the finding as its reason).
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Finding", "Severity", "withheld"]

Severity = Literal["note", "warning", "error"]
"""``note``: tolerated, costs nothing. ``warning``: records were lost or changed. ``error``: numbers are wrong."""


@dataclass(frozen=True)
class Finding:
    """One kind of damage or oddity in one trace."""

    id: str
    """Name of the rule, such as ``truncated``; ``docs/traces.md`` lists them."""
    severity: Severity
    message: str
    """What was seen and what was done about it, for a reader of the account."""
    count: int
    """How many records, documents or bytes (the message says which) it concerns."""
    affects: tuple[str, ...] = ()
    """Keys of the account that must be withheld: ``idle_ns``, ``communication_ns``, ``steps`` and the like."""

    def to_document(self) -> dict[str, Any]:
        """The finding as the ``health`` block of an account prints it."""
        return {**asdict(self), "affects": list(self.affects)}


def withheld(findings: Iterable[Finding]) -> dict[str, str]:
    """Key of the account → id of the first finding that makes it untrustworthy."""
    keys: dict[str, str] = {}
    for finding in findings:
        for key in finding.affects:
            keys.setdefault(key, finding.id)
    return keys
