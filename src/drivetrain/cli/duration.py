"""Durations as they are given on the command line."""

import re

from drivetrain.errors import DrivetrainError

__all__ = ["seconds_of_duration"]

_UNITS = (3600.0, 60.0, 1.0)


def seconds_of_duration(option: str, text: str) -> float:
    """``90s``, ``20m``, ``1h30m``, ``90``: seconds.

    Raises:
        DrivetrainError: it is no duration; the message names the option.
    """
    parts = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    if parts is None or not any(parts.groups()):
        raise DrivetrainError(f"{option} {text!r} is no duration; write it as 90s, 20m or 1h30m")
    return sum(float(part) * unit for part, unit in zip(parts.groups(), _UNITS, strict=True) if part)
