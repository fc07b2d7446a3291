"""From a preset, a TOML file or a run directory, and overrides, to one validated configuration."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from drivetrain.addresses import ADDRESS_VARIABLE, holds_password, withheld
from drivetrain.config.leaves import leaves, section_types
from drivetrain.config.presets import preset_names, read_preset, unknown_preset
from drivetrain.config.problems import describe, shown, unknown_field
from drivetrain.config.schema import RunConfig
from drivetrain.config.serialise import FORMAT
from drivetrain.config.suggest import nearest
from drivetrain.errors import ConfigurationError

__all__ = ["LoadedConfig", "config_of", "load_config", "parse_config"]

_CONFIG_FILE = "config.toml"
_RUN_DIRECTORY = re.compile(r"^\d{8}-\d{6}-(?P<name>.+)-[0-9a-f]{4,}$")


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and where it came from.

    Attributes:
        config: the validated sections. Rules between fields are not checked yet.
        source: what the user named: a preset, a file, a run directory.
        name: the preset's name, the file's stem, or the name inside a run directory's name; made of
            letters, digits, dots, dashes and underscores.
    """

    config: RunConfig
    source: str
    name: str


@dataclass
class _Draft:
    """Values before validation, the file that set each of them, and the problems found so far."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def origin(self, path: str) -> str:
        return f" (in {self.origins[path]})" if path in self.origins else ""


def load_config(source: str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read ``source`` and apply ``section.field=value`` overrides; of two for one field the later wins.

    ``source`` is a preset's name, the path of a TOML file (which may start from a preset with a top-level
    ``preset = "llama-10m"``), or a run directory. An override's value is TOML; where the field is text a
    bare word needs no quotes; ``none`` takes the value of an optional field away.

    Raises:
        ConfigurationError: with every problem that was found, one line each.
    """
    draft = _read_source(source)
    for override in overrides:
        _apply_override(draft, override)
    return LoadedConfig(config=_validate(draft), source=source, name=draft.name)


def parse_config(text: str, where: str = _CONFIG_FILE) -> RunConfig:
    """The configuration in the text of a TOML file; ``where`` names it in messages."""
    draft = _Draft(name="")
    _merge(draft, _parse(text, where), where)
    return _validate(draft)


def config_of(
    sections: Mapping[str, Mapping[str, Any]],
    overrides: Sequence[str] = (),
    origins: Mapping[str, str] | None = None,
) -> RunConfig:
    """The configuration of values that are there already, with ``section.field=value`` overrides laid over them.

    Args:
        sections: section to field to value.
        origins: dotted path to what set it, for messages.

    Raises:
        ConfigurationError: with every problem that was found, one line each.
    """
    values: dict[str, Any] = {name: dict(fields) for name, fields in sections.items()}
    draft = _Draft(name="", values=values, origins=dict(origins or {}))
    for override in overrides:
        _apply_override(draft, override)
    return _validate(draft)


def _validate(draft: _Draft) -> RunConfig:
    _refuse_signatures(draft)
    draft.values.setdefault("model", {})  # so that each missing field is named
    config = None
    try:
        config = RunConfig.model_validate(draft.values)
    except ValidationError as error:
        draft.problems.extend(describe(error, draft.origin))
    if draft.problems or config is None:
        # The cause is left out: a user has no use for the validator's own words.
        raise ConfigurationError(*draft.problems) from None
    return config


def _refuse_signatures(draft: _Draft) -> None:
    """A problem for each text that holds a signed address: all of a configuration is shown and recorded. Passwords are
    refused by a rule."""
    for section, values in draft.values.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            if not isinstance(value, str) or holds_password(value) or withheld(value) == value:
                continue
            path = f"{section}.{name}"
            draft.problems.append(
                f"{path}{draft.origin(path)}: holds a signed address, whose signature would be recorded; keep the "
                f"whole address in the environment variable {ADDRESS_VARIABLE} and write {withheld(value)}"
            )


def _read_source(source: str) -> _Draft:
    if source in preset_names():
        return _Draft(name=source, values=read_preset(source))
    path = Path(source)
    if not source:
        raise ConfigurationError(unknown_preset(source))
    try:
        # Not is_dir() alone: it answers False for a name that cannot exist, which later calls raise at.
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:  # too long a name, a loop of links, a null character
        raise ConfigurationError(f"{shown(source)} can't be looked up: {_reason(error)}") from None
    if is_directory:
        return _read_run_directory(path)
    if is_file:
        return _read_file(path, name=_clean_name(path.stem))
    raise ConfigurationError(_unknown_source(source, path))


def _read_run_directory(path: Path) -> _Draft:
    inner = path / _CONFIG_FILE
    if not inner.is_file():
        raise ConfigurationError(
            f"{path} is a directory without {_CONFIG_FILE}: give a run directory, a TOML file or a preset "
            f"({', '.join(preset_names())})"
        )
    directory = path.resolve().name
    match = _RUN_DIRECTORY.match(directory)
    return _read_file(inner, name=_clean_name(match["name"] if match else directory))


def _unknown_source(source: str, path: Path) -> str:
    looks_like_a_path = len(path.parts) != 1 or path.suffix == ".toml"
    if not looks_like_a_path:
        return unknown_preset(source)
    try:
        siblings = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix == ".toml")
    except OSError:
        return f"{path} does not exist, and neither does its folder; presets are {', '.join(preset_names())}"
    alike = nearest(path.name, siblings) or nearest(path.stem, preset_names())
    hint = f"; did you mean {alike}?" if alike else f"; presets are {', '.join(preset_names())}"
    return f"{path} does not exist{hint}"


def _read_file(path: Path, name: str) -> _Draft:
    try:
        # With or without the mark that some editors put in front.
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {_reason(error)}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is no TOML: it is not UTF-8 text (byte {error.start})") from None
    values = _parse(text, str(path))
    draft = _Draft(name=name)
    preset = values.pop("preset", None)
    if isinstance(preset, str):
        if preset not in preset_names():
            raise ConfigurationError(f"preset (in {path}): {unknown_preset(preset)}")
        draft.values = read_preset(preset)
    elif preset is not None:
        draft.problems.append(f"preset (in {path}): expected a preset's name, got {shown(preset)}")
    _merge(draft, values, str(path))
    return draft


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{where} is no valid TOML: {error}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, endless nesting
        raise ConfigurationError(f"{where} is no valid TOML: {type(error).__name__}: {error}") from None


def _merge(draft: _Draft, values: dict[str, Any], where: str) -> None:
    """Lay the sections of a file over the draft."""
    values = dict(values)
    version = values.pop("schema", FORMAT)
    if version != FORMAT or isinstance(version, bool):
        draft.problems.append(
            f"schema (in {where}): got {shown(version)}, this version of Drivetrain reads schema {FORMAT}"
        )
    for section, given in values.items():
        current = draft.values.get(section)
        if isinstance(given, dict) and isinstance(current, dict):
            draft.values[section] = {**current, **given}
        else:
            draft.values[section] = given
        draft.origins[section] = where
        if isinstance(given, dict):
            draft.origins.update({f"{section}.{name}": where for name in given})


def _apply_override(draft: _Draft, override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    path = f"{section}.{name}"
    if not equals:
        alike = nearest(key.strip(), leaves())
        draft.problems.append(
            f"override {shown(override)}: expected section.field=value"
            + (f", such as {alike}=..." if alike else ", such as training.train_iters=100")
        )
    elif not dot and section in section_types():
        draft.problems.append(f"{section}: is a section; set one of its fields, as in {section}.field=value")
    elif not dot or path not in leaves():
        draft.problems.append(
            f"{key.strip()[:100]}: {unknown_field(section if dot else None, name or section)}"
        )
    else:
        target = draft.values.setdefault(section, {})
        draft.origins.pop(path, None)
        if isinstance(target, dict):  # otherwise the file's own mistake is reported
            target[name] = _override_value(path, text.strip())


def _override_value(path: str, text: str) -> Any:
    """The value an override's text stands for: none, text as it is, or TOML; else the bare word."""
    leaf = leaves()[path]
    if leaf.optional and text == "none":
        return None
    bare = leaf.kind in ("text", "choice") and not text.startswith(('"', "'"))
    if bare:
        return text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _clean_name(name: str) -> str:
    """``name`` in the form that run.name asks for."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:64] or "run"
