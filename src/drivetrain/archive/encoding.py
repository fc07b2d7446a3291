"""JSON as the archive writes it: NaN and infinities are kept, not turned into null.

JSON has no word for them and orjson would write ``null``, which reads like "not measured" and hides a run
that went wrong. They are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from drivetrain.errors import RunError

__all__ = ["SCHEMA", "dumps", "encode_number", "read_document", "restore_non_finite"]

SCHEMA = 1
"""Version of every file of a run directory. A reader refuses newer ones."""

_NON_FINITE: Mapping[str, float] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode_number(value: float | int | None) -> float | int | str | None:
    """A number as JSON can hold it: non-finite ones as strings, integers beyond 64 bits as floats."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if value.bit_length() < 64 else float(value)
    number = float(value)
    if math.isfinite(number):
        return number
    if math.isnan(number):
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"


def _plain(value: Any) -> Any:
    """``value`` with every number encoded; mappings and sequences become dict and list."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, int | float):
        return encode_number(value)
    if hasattr(value, "tolist"):  # NumPy scalars and arrays, without importing NumPy.
        return _plain(value.tolist())
    return str(value)


def dumps(value: Any, *, indent: bool = False) -> bytes:
    """One JSON document, UTF-8, without a trailing newline. Paths and other objects become their ``str``."""
    option = orjson.OPT_INDENT_2 if indent else None
    try:
        return orjson.dumps(_plain(value), option=option)
    except TypeError:
        # File names and arguments need not be UTF-8; Python holds their bytes as surrogates.
        return orjson.dumps(_utf8(_plain(value)), option=option)


def _utf8(value: Any) -> Any:
    """``value`` with lone surrogates in its strings as ``\\udcff``."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_utf8(key): _utf8(item) for key, item in value.items()}
    return [_utf8(item) for item in value] if isinstance(value, list) else value


def restore_non_finite(value: Any) -> Any:
    """``value`` with ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` as floats again, at any depth."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: restore_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restore_non_finite(item) for item in value]
    return value


def read_document(path: Path) -> dict[str, Any]:
    """The JSON object at ``path``; non-finite numbers are still strings (see :func:`restore_non_finite`).

    Raises:
        FileNotFoundError: there is none.
        RunError: it cannot be read or is no JSON object.
    """
    try:
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} is damaged: a JSON object is expected, found {type(value).__name__}")
    return value
