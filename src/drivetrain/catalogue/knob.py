"""A configuration leaf with a search range, as an entry declares it for the tuner."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from drivetrain.config import LaunchFacts, RunConfig, leaf_values

__all__ = ["Knob"]


@dataclasses.dataclass(frozen=True)
class Knob:
    """A leaf that is searched while its entry is in effect.

    Attributes:
        field: dotted path of the leaf.
        low, high: ends of the range, both legal values; where ``values`` is given, of all it can ever return.
        whole: whether only whole numbers are legal.
        scale: ``linear`` or ``log``: in what measure the search divides the range.
        values: the legal numbers of a configuration, ascending, where not every number of the range is one; the search
            then goes by their places. None: every number of the range is.
        refused: None, or why it is not to be searched although its entry is in effect.
        treats: account classes whose time it can reduce; None: those of its entry.
        moves_memory: whether it moves what a step needs of a device's memory, so that a limit is asked before a trial.
        absent: the number that an absent leaf stands for; None: it is never absent.
        as_text: the leaf is a text that may hold a number.
    """

    field: str
    low: float
    high: float
    whole: bool = False
    scale: Literal["linear", "log"] = "linear"
    values: Callable[[RunConfig, LaunchFacts], Sequence[float]] | None = None
    refused: Callable[[RunConfig, LaunchFacts], str | None] = lambda _config, _facts: None
    treats: tuple[str, ...] | None = None
    moves_memory: bool = False
    absent: float | None = None
    as_text: bool = False

    def __post_init__(self) -> None:
        assert self.low < self.high
        assert self.scale == "linear" or self.low > 0
        assert self.whole or not self.as_text

    def number(self, config: RunConfig) -> float | None:
        """What the leaf holds, as a number; None where that is none (a text)."""
        value = next(value for leaf, value in leaf_values(config) if leaf.path == self.field)
        if value is None:
            return self.absent
        if self.as_text and not str(value).isdigit():
            return None
        return float(value)

    def leaf_value(self, number: float) -> Any:
        """``number`` as the leaf holds it."""
        if self.as_text:
            return str(round(number))
        return round(number) if self.whole else number
