"""The presets: one TOML file each in ``preset_data/``, read as data and validated like any user's file."""

import functools
import re
import tomllib
from importlib import resources
from typing import Any

from drivetrain.config.suggest import nearest
from drivetrain.errors import ConfigurationError

__all__ = ["preset_names", "read_preset", "unknown_preset"]

_FOLDER = resources.files("drivetrain.config") / "preset_data"


@functools.cache
def preset_names() -> tuple[str, ...]:
    """Names of the presets; families in turn, and in each the smaller model first."""
    names = [entry.name.removesuffix(".toml") for entry in _FOLDER.iterdir() if entry.name.endswith(".toml")]
    return tuple(sorted(names, key=_order))


def read_preset(name: str) -> dict[str, Any]:
    """The sections of a preset, not validated. Raises ConfigurationError for an unknown name."""
    if name not in preset_names():
        raise ConfigurationError(unknown_preset(name))
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def unknown_preset(name: str) -> str:
    """The message for a name that is no preset: the nearest one and the list."""
    match = nearest(name, preset_names())
    hint = f"; did you mean {match}?" if match else "."
    return f"no preset is called {name[:60]!r}{hint} The presets are {', '.join(preset_names())}"


def _order(name: str) -> tuple[str, list[int]]:
    family, _, size = name.partition("-")
    return family, [int(digits) for digits in re.findall(r"\d+", size)]
