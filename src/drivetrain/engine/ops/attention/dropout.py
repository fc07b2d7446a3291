"""Which attention weights are dropped: a function of seed, head, query and key, and of nothing else.

A generator's numbers depend on the order in which they are drawn; blocks, backends and a recomputed forward pass each
have their own. Here every weight has its own number, the mixer ``lowbias32`` of Wellons
(nullprogram.com/blog/2018/07/31, public domain) over seed, head, query and key, so that all of them drop the same.
"""

import torch
from torch import Tensor

__all__ = ["draw_seed", "kept"]

_WORD = 0xFFFFFFFF


def kept(
    seed: int, probability: float, heads: int, rows: range, columns: range, device: torch.device
) -> Tensor:
    """(heads, rows, columns) bool, True where the weight is kept; each with 1 - ``probability``.

    Args:
        rows, columns: numbers of queries and keys among all tokens, not those of a document.
    """
    word = _mixed(torch.tensor(seed & _WORD, device=device))
    word = _mixed(word ^ (seed >> 32))
    of_heads = _mixed(word ^ torch.arange(heads, device=device))
    queries = _mixed(torch.arange(rows.start, rows.stop, device=device) ^ 0x5BD1E995)
    keys = _mixed(torch.arange(columns.start, columns.stop, device=device) ^ 0x27D4EB2F)
    of_rows = _mixed((of_heads[:, None] + queries) & _WORD)
    bits = _mixed((of_rows[:, :, None] + keys) & _WORD)
    return bits < round((1.0 - probability) * 2**32)


def draw_seed() -> Tensor:
    """A seed from torch's generator on the CPU, () int64: a recomputation that puts it back draws the same."""
    return torch.randint(2**62, ())


def _mixed(word: Tensor) -> Tensor:
    """32 bits from 32 bits, both in int64, whose products wrap as they should."""
    word = word ^ (word >> 16)
    word = (word * 0x7FEB352D) & _WORD
    word = word ^ (word >> 15)
    word = (word * 0x846CA68B) & _WORD
    return word ^ (word >> 16)
