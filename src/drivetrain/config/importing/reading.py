"""A file of any of the sources as arguments: what it is, is told by its content."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drivetrain.config.importing.arguments import (
    Argument,
    Source,
    Trainer,
    known_by_dump_name,
    known_names,
)
from drivetrain.config.importing.command_line import source_of_text
from drivetrain.config.leaves import section_types
from drivetrain.errors import ConfigurationError

__all__ = ["MOST_BYTES", "read_source"]

MOST_BYTES = 1 << 20
_PYTHON = re.compile(r"^(import \w+|from [\w.]+ import |def \w+\(|class \w+|@\w+)", re.MULTILINE)
_TITAN_SECTIONS = frozenset(
    {
        "job", "profiling", "metrics", "model", "optimizer", "lr_scheduler", "training", "parallelism", "experimental",
        "checkpoint", "activation_checkpoint", "compile", "float8", "quantize", "comm", "validation", "debug",
        "memory_estimation", "fault_tolerance", "mx", "dataloader",
    }
)  # fmt: skip
_DEEPEST = 12
_MOST_BITS = 128


def read_source(path: Path, trainer: Trainer | None, given: Mapping[str, str], devices: int | None) -> Source:
    """The arguments in a file.

    Args:
        trainer: whose they are; None: the content tells.
        given: values of shell variables.
        devices: processes of the job; None: as its launcher says.

    Raises:
        ConfigurationError: it cannot be read, or is nothing that is known here; one message.
    """
    where = str(path)
    text = _text(path)
    is_toml = _looks_like_toml(path, text)
    if not is_toml and (path.suffix == ".py" or _is_python(path, text)):
        raise ConfigurationError(
            f"{where} is a Python script, which would have to be run to know its arguments; give the shell script "
            "or the command that starts it, a dump of its arguments, or a job file"
        )
    if trainer != "torchtitan" and not is_toml:
        document = _mapping(path, text)
        if document is None:
            return source_of_text(text, where, trainer, given, devices)
        return _of_dump(document, where, trainer or "megatron", trainer is None, devices)
    try:
        toml = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where} is no valid TOML: {error}") from None
    return _of_job_file(toml, where, trainer, devices)


def _text(path: Path) -> str:
    try:
        if path.is_dir():
            raise ConfigurationError(f"{path} is a directory; give the file with the arguments")
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ConfigurationError(
                f"{path} has {size:,} bytes, and a file of arguments has at most {MOST_BYTES:,}"
            )
        # A device or a pipe has no size, and may never end.
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ConfigurationError(
                f"{path} has more than {MOST_BYTES:,} bytes, which is the most that a file of arguments has"
            )
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigurationError(f"{str(path)!r} can't be looked up: {error}") from None
    if not data.strip():
        raise ConfigurationError(f"{path} is empty: there are no arguments to import")
    if b"\0" in data:
        raise ConfigurationError(f"{path} is a binary file, and no text with arguments")
    try:
        # Lines may end as they do in DOS.
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is no text in UTF-8 (byte {error.start})") from None


def _looks_like_toml(path: Path, text: str) -> bool:
    if path.suffix == ".toml":
        return True
    first = next(
        (line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")), ""
    )
    return re.fullmatch(r"\[[A-Za-z_][\w.]*\](\s*#.*)?", first) is not None


def _is_python(path: Path, text: str) -> bool:
    """Whether it is a program in Python: it says so, or has statements that no shell has."""
    first = text.split("\n", 1)[0]
    if path.suffix in (".sh", ".bash") or re.match(r"#!.*\b(ba|da|k|z)?sh\b", first):
        # A shell script may hold one in a here-document.
        return False
    return (first.startswith("#!") and "python" in first) or len(_PYTHON.findall(text)) >= 2


def _mapping(path: Path, text: str) -> dict[str, Any] | None:
    """The document in JSON or YAML; None where it is neither by its name or its beginning."""
    if text.lstrip().startswith("{") or path.suffix == ".json":
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{path} is no valid JSON: {error}") from None
    elif path.suffix in (".yaml", ".yml"):
        document = _yaml(path, text)
    else:
        return None
    if not isinstance(document, dict):
        raise ConfigurationError(f"{path} holds no names with values")
    return document


def _yaml(path: Path, text: str) -> Any:
    if find_spec("yaml") is None:
        raise ConfigurationError(
            f"{path} is YAML, which needs a reader of it: pip install 'drivetrain[yaml]'"
        )
    yaml = import_module("yaml")
    try:
        # An alias can stand for endlessly many values, and no dump of arguments has one.
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=yaml.SafeLoader)):
            raise ConfigurationError(f"{path} has aliases (*name), which a list of arguments has no use for")
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ConfigurationError(f"{path} is no valid YAML: {reason}") from None


def _of_dump(
    document: Mapping[str, Any], where: str, trainer: Trainer, is_guess: bool, devices: int | None
) -> Source:
    """Arguments that a trainer wrote down, or a table of command-line arguments."""
    leaves = list(_leaves(document, ""))
    flags = [(name, value) for _, name, value in leaves if name.startswith("--")]
    if flags:
        pairs = flags
    else:
        pairs = [(name, value) for _, name, value in leaves]
    own = known_names("mindspeed")
    if is_guess and any(own[_flag(name)].trainer == "mindspeed" for name, _ in pairs if _flag(name) in own):
        trainer = "mindspeed"
    known = known_by_dump_name(trainer)
    if not any(_flag(name) in known_names(trainer) or name in known for name, _ in pairs):
        raise _nothing_known(where)
    arguments: dict[str, Argument] = {}
    notes: list[tuple[str, str]] = []
    processes = devices
    for name, value in pairs:
        key = name.lstrip("-").replace("-", "_")
        if key == "world_size" and isinstance(value, int) and devices is None:
            processes = value
        found = known.get(key)
        if found is not None and not flags and _is_default(value, found.default):
            notes.append((name, "it has the value that it has without being given"))
            continue
        argument = _dumped(
            name,
            value,
            None if found is None else found.name,
            negative=found is not None and found.is_negative and not flags,
        )
        if argument is None:
            notes.append((name, "it is off, or has no value"))
        else:
            arguments[argument.name] = argument
    return Source(trainer, where, arguments, processes=processes, notes=tuple(notes))


def _flag(name: str) -> str:
    return "--" + name.lstrip("-").replace("_", "-")


def _dumped(name: str, value: Any, flag: str | None, *, negative: bool) -> Argument | None:
    """An entry of a dump as it would stand on the command line; None where it would not."""
    flag = flag or _flag(name)
    if value is None or value == []:
        return None
    if isinstance(value, bool):
        return Argument(flag) if value is not negative else None
    if isinstance(value, list):
        return Argument(flag, tuple(_word(one) for one in value))
    words = tuple(value.split()) if isinstance(value, str) else (_word(value),)
    return Argument(flag, words or ("",))


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_default(value: Any, default: str | None) -> bool:
    if value is None or value is False or value == "" or value == []:
        return default is None or default == _word(value)
    return default is not None and _word(value) == default


def _leaves(document: Mapping[str, Any], prefix: str, depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    """Path, last name and value of everything that is no table."""
    if depth > _DEEPEST:
        raise ConfigurationError(f"tables are nested more than {_DEEPEST} deep; it is no list of arguments")
    for name, value in document.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, dict):
            yield from _leaves(value, path, depth + 1)
        else:
            for one in value if isinstance(value, list) else (value,):
                if isinstance(one, int) and one.bit_length() > _MOST_BITS:
                    raise ConfigurationError(
                        f"{path}: a whole number of {one.bit_length():,} bits is no size; at most {_MOST_BITS}"
                    )
            yield path, str(name), value


def _of_job_file(
    document: Mapping[str, Any], where: str, trainer: Trainer | None, devices: int | None
) -> Source:
    if "schema" in document or "preset" in document or _is_ours(document):
        raise ConfigurationError(
            f"{where} is a configuration of Drivetrain already; check it with: drivetrain check {where}"
        )
    sections = _TITAN_SECTIONS & {name for name, value in document.items() if isinstance(value, dict)}
    if trainer not in (None, "torchtitan") or not sections or "training" not in sections:
        raise _nothing_known(where)
    arguments = {}
    for path, _, value in _leaves(document, ""):
        if isinstance(value, bool):
            arguments[path] = Argument(path, () if value else ("false",))
        elif isinstance(value, list):
            arguments[path] = Argument(path, tuple(map(_word, value)) or ("none",))
        else:
            arguments[path] = Argument(path, (_word(value),))
    return Source("torchtitan", where, arguments, processes=devices)


def _is_ours(document: Mapping[str, Any]) -> bool:
    """Whether a section has a field that only our schema has."""
    kinds = section_types()
    model = document.get("model")
    return (
        isinstance(model, dict)
        and "hidden_size" in model
        and all(name in kinds for name in document)
        and "num_layers" in kinds["model"].model_fields
    )


def _nothing_known(where: str) -> ConfigurationError:
    return ConfigurationError(
        f"{where} holds no arguments of Megatron-LM, MindSpeed or torchtitan: give a shell script or command line, a "
        "dump of arguments (YAML, JSON), or a torchtitan job file (TOML)"
    )
