"""A document's mask as rectangles: which keys a block of queries can see, and the pattern inside a block."""

from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain.engine.ops.attention.mask import Mask, Span

__all__ = ["Pattern", "pattern_of"]


class Pattern(NamedTuple):
    """The rule of one document.

    Attributes:
        causal: as in the mask.
        window: keys that are seen, 0: no limit.
        prefix: keys that all queries see.
        offset: query i stands at position i + offset.
    """

    causal: bool
    window: int
    prefix: int
    offset: int

    def distance(self, rows: range, columns: range, device: torch.device) -> Tensor:
        """(rows, columns) int64: position of the query less that of the key."""
        queries = torch.arange(rows.start + self.offset, rows.stop + self.offset, device=device)
        return queries[:, None] - torch.arange(columns.start, columns.stop, device=device)

    def allowed(self, rows: range, columns: range, device: torch.device) -> Tensor | None:
        """(rows, columns) bool, True where the key is seen; None where all are."""
        if not self.causal or self._all_seen(rows, columns):
            return None
        distance = self.distance(rows, columns, device)
        seen = distance >= 0
        if self.window:
            seen &= distance < self.window
        if self.prefix:
            seen |= torch.arange(columns.start, columns.stop, device=device) < self.prefix
        return seen

    def _all_seen(self, rows: range, columns: range) -> bool:
        first, last = rows.start + self.offset, rows.stop - 1 + self.offset
        before = columns.stop - 1 <= first or columns.stop <= self.prefix
        return before and not (self.window and last - columns.start >= self.window)

    def keys(self, rows: range, keys: int) -> range:
        """The keys, of that many, that any of the queries can see."""
        if not self.causal:
            return range(keys)
        last = min(keys, max(rows.stop + self.offset, self.prefix))
        first = max(0, rows.start + self.offset - self.window + 1) if self.window else 0
        return range(first, max(first, last))


def pattern_of(mask: Mask, span: Span) -> Pattern:
    """The rule of ``mask`` in one document."""
    offset = span.keys - span.queries if mask.alignment == "bottom_right" else 0
    return Pattern(mask.causal, mask.window or 0, span.prefix, offset)
