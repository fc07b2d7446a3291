"""``data.data_path`` as Megatron has it: one corpus, or several with the weights in which their samples are mixed."""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from drivetrain.config.training import DataConfig

__all__ = [
    "BAKED",
    "WeightedPath",
    "baked_with",
    "blend_problem",
    "corpora_of",
    "transform_paths",
    "with_prefixes",
]

BAKED = re.compile(r"(?P<source>.+)\.baked-(?P<key>[0-9a-f]{12})$")
"""Prefix of a corpus to whose documents a transform was applied, and of the one they come from."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?$", re.ASCII)


@dataclass(frozen=True)
class WeightedPath:
    """One corpus of a blend.

    Attributes:
        weight: its share, before the weights are divided by their sum; exactly as it was written.
        prefix: its path without suffix.
    """

    weight: Fraction
    prefix: str


def corpora_of(data_path: str) -> tuple[WeightedPath, ...]:
    """The corpora of ``data.data_path``: ``weight prefix weight prefix ...``, or one prefix as it stands.

    A prefix that holds spaces is quoted, as in a shell. Text whose first word is no number is one prefix.

    Raises:
        ValueError: a blend that is none; rule ``blend-is-weights-and-corpora`` reports it before anything reads it.
    """
    first, _, rest = data_path.strip().partition(" ")
    if not rest.strip() or not _NUMBER.match(first):
        return (WeightedPath(Fraction(1), data_path),)
    words = shlex.split(data_path)
    if len(words) % 2:
        raise ValueError(
            f"{len(words)} words, which are no pairs of weight and prefix; write 0.3 corpora/a 0.7 corpora/b"
        )
    found = []
    for weight, prefix in zip(words[::2], words[1::2], strict=True):
        if not _NUMBER.match(weight) or not 0 < Fraction(weight) < 10**9:
            raise ValueError(
                f"{weight!r} stands where the weight of {prefix!r} is expected: a number above 0 and below 1e9 "
                "(a prefix with spaces is put in quotes)"
            )
        found.append(WeightedPath(Fraction(weight), prefix))
    twice = {one.prefix for one in found if sum(other.prefix == one.prefix for other in found) > 1}
    if twice:
        raise ValueError(f"{min(twice)!r} stands there twice; give it once, with the sum of its weights")
    return tuple(found)


def blend_problem(data_path: str | None) -> str | None:
    """Why ``data.data_path`` names no corpora; None where it does."""
    try:
        if data_path is not None:
            corpora_of(data_path)
    except ValueError as error:
        return str(error)
    return None


def with_prefixes(data_path: str, change: Callable[[str], str]) -> str:
    """The same corpora in the same shares, each under another prefix."""
    corpora = corpora_of(data_path)
    if len(corpora) == 1 and corpora[0].prefix == data_path:
        return change(data_path)
    words = shlex.split(data_path)
    return " ".join(
        f"{weight} {shlex.quote(change(prefix))}"
        for weight, prefix in zip(words[::2], words[1::2], strict=True)
    )


def transform_paths(text: str | None) -> tuple[str, ...]:
    """The callables of ``data.transform`` or ``data.batch_transform``, in the order they are applied."""
    return tuple(text.split(",")) if text is not None else ()


def baked_with(data: DataConfig) -> tuple[str | None, ...]:
    """For each corpus the key of the transform that its prefix says was applied to it; None: its prefix says none."""
    if data.data_path is None or blend_problem(data.data_path) is not None:
        return (None,)
    matches = [BAKED.match(one.prefix) for one in corpora_of(data.data_path)]
    return tuple(None if match is None else match["key"] for match in matches)
