"""Multi-head attention as a module of anybody's model: projections, optional rotary embedding, and the operator."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from drivetrain.engine.ops.attention import OPERATOR
from drivetrain.engine.ops.attention.mask import CAUSAL, Documents, Mask
from drivetrain.engine.ops.selection import Selection
from drivetrain.errors import DrivetrainError

__all__ = ["Attention"]


class Attention(nn.Module):
    """Query, key and value projections, attention under a mask, output projection.

    Args:
        hidden_size: width of the input and output.
        num_attention_heads: query heads, H.
        num_query_groups: key and value heads, G, of which H is a multiple; None: H.
        head_size: width of a head; None: hidden_size / H.
        bias: whether the projections have one.
        rotary: turns queries and keys, (T, heads, head size), given the tokens' positions, (T,) int64; or None.
        selection: who computes; one may be shared by many modules.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        num_query_groups: int | None = None,
        head_size: int | None = None,
        bias: bool = False,
        rotary: Callable[[Tensor, Tensor], Tensor] | None = None,
        selection: Selection | None = None,
    ) -> None:
        super().__init__()
        groups = num_attention_heads if num_query_groups is None else num_query_groups
        if head_size is None and hidden_size % num_attention_heads:
            raise DrivetrainError(
                f"hidden_size {hidden_size} is no multiple of {num_attention_heads} heads; give head_size"
            )
        if groups < 1 or num_attention_heads % groups:
            raise DrivetrainError(f"{num_attention_heads} heads are no multiple of {groups} groups")
        self.head_size = hidden_size // num_attention_heads if head_size is None else head_size
        self.query = nn.Linear(hidden_size, num_attention_heads * self.head_size, bias=bias)
        self.key = nn.Linear(hidden_size, groups * self.head_size, bias=bias)
        self.value = nn.Linear(hidden_size, groups * self.head_size, bias=bias)
        self.output = nn.Linear(num_attention_heads * self.head_size, hidden_size, bias=bias)
        self.rotary = rotary
        self.selection = Selection() if selection is None else selection

    def forward(self, x: Tensor, mask: Mask = CAUSAL, positions: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: (T, hidden size), or (B, S, hidden size): then each row is a document of its own, unless ``mask`` has
                documents, which lie over the flattened B x S tokens.
            mask: which tokens see which.
            positions: of the tokens, (T,) or (B, S) int64, for the rotary embedding; None: counted from 0 in each
                document.

        Returns:
            As ``x``.

        Raises:
            DrivetrainError: a document crosses from one row of the batch into the next.
        """
        tokens = x.reshape(-1, x.shape[-1])
        if x.dim() == 3:
            mask = _by_rows(mask, x.shape[0], x.shape[1])
        q, k, v = (
            project(tokens).unflatten(-1, (-1, self.head_size))
            for project in (self.query, self.key, self.value)
        )
        if self.rotary is not None:
            at = _positions(mask, len(tokens)) if positions is None else positions.reshape(-1)
            at = at.to(x.device)
            q, k = self.rotary(q, at), self.rotary(k, at)
        out = self.selection.call(OPERATOR, q=q, k=k, v=v, mask=mask)
        assert isinstance(out, Tensor)
        attended: Tensor = self.output(out.flatten(1))
        return attended.view(x.shape)


# Both build what the host reads; traced, it would be constants of a graph.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_rows(mask: Mask, rows: int, length: int) -> Mask:
    borders = (
        torch.arange(0, rows * length + 1, length, dtype=torch.int32)
        if length
        else torch.zeros(rows + 1).int()
    )
    if mask.documents is None:
        return mask.packed(Documents(borders))
    given = mask.documents.cu_seqlens_q
    inside = borders[borders <= given[-1]]
    if not bool(torch.isin(inside, given).all()):
        row = int((~torch.isin(inside, given)).nonzero()[0])
        raise DrivetrainError(
            f"a document crosses from row {row - 1} of the batch into row {row}; end it at {row * length}"
        )
    return mask


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _positions(mask: Mask, tokens: int) -> Tensor:
    """(T,) int64: numbers from 0 in each document, and 0 behind the last border."""
    if mask.documents is None:
        return torch.arange(tokens)
    borders = mask.documents.cu_seqlens_q.long()
    lengths = torch.cat([borders.diff(), (tokens - borders[-1:])])
    positions = torch.arange(tokens) - borders.repeat_interleave(lengths)
    positions[int(borders[-1]) :] = 0
    return positions
