"""A configuration as text that reads back to the same configuration, its hash, and differences."""

import hashlib

import tomlkit

from drivetrain.addresses import withheld
from drivetrain.config.leaves import leaf_values
from drivetrain.config.schema import RunConfig

__all__ = ["FORMAT", "config_hash", "differing_leaves", "to_toml", "value_text"]

FORMAT = 1
"""Value of the ``schema`` key of a written configuration."""


def to_toml(config: RunConfig) -> str:
    """All leaves as TOML, in the schema's order; a leaf without value as the comment ``# name = none``.

    Equal configurations give equal text, and ``load_config`` on the text gives the configuration back; but the secret
    of a signed address is left out of it (:func:`drivetrain.addresses.withheld`).
    """
    # Line by line: a document of tomlkit looks through all its tables for each that is added.
    lines = [f"schema = {FORMAT}"]
    section = None
    for leaf, value in leaf_values(config):
        if leaf.section != section:
            section = leaf.section
            lines += ["", f"[{section}]"]
        if value is None:
            lines.append(f"# {leaf.name} = none")
        else:
            text = tomlkit.item(withheld(value) if isinstance(value, str) else value).as_string()
            lines.append(f"{leaf.name} = {text}")
    return "\n".join(lines) + "\n"


def value_text(value: object) -> str:
    """A leaf's value as an override has it, ``true``, ``none``, ``0.5``: how it is written wherever it is shown."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def config_hash(config: RunConfig) -> str:
    """SHA-256 of ``to_toml(config)`` in UTF-8, as 64 hexadecimal digits."""
    return hashlib.sha256(to_toml(config).encode("utf-8")).hexdigest()


def differing_leaves(a: RunConfig, b: RunConfig) -> dict[str, tuple[object, object]]:
    """Dotted path to (value in ``a``, value in ``b``) for each leaf that differs, in the schema's order."""
    others = {leaf.path: value for leaf, value in leaf_values(b)}
    return {
        leaf.path: (value, others[leaf.path]) for leaf, value in leaf_values(a) if value != others[leaf.path]
    }
