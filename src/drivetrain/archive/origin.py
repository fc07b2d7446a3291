"""What a run is beside its configuration: whose child, by which change, and what the gate needs of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.config import RunConfig

__all__ = ["IDENTITY_LEAVES", "PLAIN", "RunOrigin", "change_between"]

IDENTITY_LEAVES = frozenset({"run.name", "run.runs_dir"})
"""Leaves that say which run it is and not what it computes; no change is made of them."""


@dataclass(frozen=True)
class RunOrigin:
    """The manifest's keys of the same names.

    Attributes:
        parent: id of the run that this one is a change of; None: of none.
        change: leaf → new value, where it differs from the parent; None without a parent.
        probe: the first step leaves gradients and the leak probe's result in ``probe/``.
        perturb_ulp: seed by which each initial weight was moved by one unit in the last place; None: not moved.
    """

    parent: str | None = None
    change: Mapping[str, Any] | None = None
    probe: bool = False
    perturb_ulp: int | None = None

    def to_manifest(self) -> dict[str, Any]:
        """What ``run.json`` holds of it."""
        return {
            "parent": self.parent,
            "change": None if self.change is None else dict(self.change),
            "probe": self.probe,
            "perturb_ulp": self.perturb_ulp,
        }

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> "RunOrigin":
        """Of any manifest; a run from before these keys has none of it."""
        return cls(
            parent=manifest.get("parent"),
            change=manifest.get("change"),
            probe=bool(manifest.get("probe", False)),
            perturb_ulp=manifest.get("perturb_ulp"),
        )


PLAIN = RunOrigin()
"""A run that is nobody's child, neither probed nor disturbed."""


def change_between(parent: "RunConfig", child: "RunConfig") -> dict[str, Any]:
    """Leaf → value in ``child``, of every leaf that differs and is no identity."""
    from drivetrain.config import differing_leaves

    return {
        leaf: new for leaf, (_, new) in differing_leaves(parent, child).items() if leaf not in IDENTITY_LEAVES
    }
