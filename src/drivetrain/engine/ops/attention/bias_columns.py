"""ALiBi as columns of the queries and keys, so that a kernel without a bias computes it.

Under a causal mask -m (p - j) is m j less a constant of the row, and the softmax does not see constants of rows. With
the number of a key split as j = 256 a + b, both of which have 8 bits, the keys get the columns (256 a, b), the queries
(m/s, m/s): the scaled product gains m j. A slope is split into as many columns as it takes for their sum to be the
slope to 2^-21: one where it is a power of two, up to three. Values are padded with zeros to the same width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["MOST_KEYS", "with_bias_columns"]

MOST_KEYS = 32768
"""Up to here 256 a is exact in fp16 and the fp32 sums of a score keep 2^-9 absolute, the rounding of bf16 weights."""

_SPLIT = 256
_MULTIPLE = 8


def with_bias_columns(
    q_NHLK: Tensor, k_NGMK: Tensor, v_NGMK: Tensor, slopes_H: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with columns behind: products of the first two, scaled, gain slope x key number.

    Args:
        q_NHLK, k_NGMK, v_NGMK: in bf16 or fp16.
        slopes_H: of ALiBi.
        scale: that the products will be multiplied by.
    """
    numbers = torch.arange(k_NGMK.shape[2], device=k_NGMK.device)
    split_M2 = torch.stack([numbers // _SPLIT * _SPLIT, numbers % _SPLIT], dim=1).to(k_NGMK.dtype)
    parts = _parts(slopes_H / scale, q_NHLK.dtype)
    of_queries = torch.stack(parts, dim=1).to(q_NHLK.device).repeat_interleave(2, dim=1)
    of_keys = split_M2.repeat(1, len(parts))
    padding = -(q_NHLK.shape[-1] + of_keys.shape[-1]) % _MULTIPLE
    of_queries, of_keys = (F.pad(columns, (0, padding)) for columns in (of_queries, of_keys))
    q = torch.cat([q_NHLK, of_queries[:, None].expand(*q_NHLK.shape[:3], -1)], dim=-1)
    k = torch.cat([k_NGMK, of_keys.expand(*k_NGMK.shape[:3], -1)], dim=-1)
    return q, k, F.pad(v_NGMK, (0, of_keys.shape[-1]))


def _parts(values: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Up to three tensors in ``dtype`` that add up to ``values``; zero parts are left out but for the first."""
    rest, parts = values.double(), list[Tensor]()
    for _ in range(3):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].double()
    return [part for number, part in enumerate(parts) if number == 0 or bool((part != 0).any())]
