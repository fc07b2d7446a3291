"""How the messages about a plan name modules and sizes."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

__all__ = ["listed", "nearest_multiples", "nearest_names"]

_SHOWN = 3


def listed(names: Sequence[str]) -> str:
    """``a, b and c``; of many the first ones and how many more."""
    if len(names) > _SHOWN:
        return f"{', '.join(names[:_SHOWN])} and {len(names) - _SHOWN} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def nearest_multiples(value: int, of: int) -> str:
    """The multiples of ``of`` below and above ``value``, as text."""
    below = value // of * of
    return f"{below} or {below + of}" if below else f"{of}"


def nearest_names(pattern: str, names: Iterable[str]) -> str:
    """Names like ``pattern``, in its own form: with ``*`` for numbers where it has one. As text; empty if none is."""
    known = [re.sub(r"\b\d+\b", "*", name) if "*" in pattern else name for name in names if name]
    if pattern.startswith("*"):
        known += [f"*.{name.rsplit('.', 1)[-1]}" for name in known]
    close = get_close_matches(pattern, dict.fromkeys(known), n=_SHOWN, cutoff=0.5)
    return f"; nearest: {', '.join(close)}" if close else ""
