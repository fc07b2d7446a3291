"""Projections, experts and the loss over a vocabulary as modules for anybody's model; each is usable alone.

Which backend serves is a :class:`Selection`'s matter: without one, torch's own operators, but for the loss, whose point
is not to hold all logits. Parameters are initialised as those of ``torch.nn.Linear`` are.
"""

from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.engine.ops import glu, grouped_product, linear_cross_entropy, qkv_product
from drivetrain.engine.ops._cross_entropy_checks import IGNORE_INDEX
from drivetrain.engine.ops.selection import Selection
from drivetrain.errors import DrivetrainError

__all__ = ["GroupedExperts", "LinearCrossEntropy", "QKVProjection", "mean_loss"]


def _initialised(*shape: int, features: int) -> nn.Parameter:
    bound = features**-0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


def mean_loss(total: Tensor, count: Tensor) -> Tensor:
    """``total / count``, and 0 with zero gradients where nothing was counted.

    Over several micro-batches or ranks, add up both first.
    """
    return total / torch.where(count == 0, torch.ones_like(count), count)


class LinearCrossEntropy(nn.Module):
    """Output matrix and cross-entropy, without the logits of all tokens at once.

    Args:
        size: features of its input, D.
        words: of the vocabulary, V.
        weight: (V, D), an embedding's that is shared; None: one of its own.
        ignore_index: the label of tokens that do not count.
        z_loss: factor of the squared logarithm of the normaliser.
        chunk_rows: tokens whose logits exist at once; 0: as many as 32 Mi logits make.
        selection: chooses the backend of ``linear_cross_entropy``; without it, ``chunked``.

    Raises:
        DrivetrainError: the shared weight has another shape.
    """

    def __init__(
        self,
        size: int,
        words: int,
        *,
        weight: nn.Parameter | None = None,
        ignore_index: int = IGNORE_INDEX,
        z_loss: float = 0.0,
        chunk_rows: int = 0,
        selection: Selection | None = None,
    ) -> None:
        super().__init__()
        if weight is not None and weight.shape != (words, size):
            raise DrivetrainError(
                f"LinearCrossEntropy: the weight has the shape {tuple(weight.shape)}; it has to be ({words}, {size})"
            )
        self.weight = _initialised(words, size, features=size) if weight is None else weight
        self.ignore_index, self.z_loss, self.chunk_rows = ignore_index, z_loss, chunk_rows
        self.selection = selection or Selection(requested={"linear_cross_entropy": "chunked"})

    def forward(
        self, hidden: Tensor, labels: Tensor, token_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(..., D), labels (...) int64 and weights (...) to the weighted sum and the sum of the weights.

        Both are fp32, or fp64 for fp64; :func:`mean_loss` divides.
        """
        given: dict[str, Any] = {
            "ignore_index": self.ignore_index,
            "z_loss": self.z_loss,
            "chunk_rows": self.chunk_rows,
        }
        if token_weights is not None:
            given["token_weights"] = token_weights.reshape(-1)
        total, count = self.selection.call(
            linear_cross_entropy.OPERATOR,
            hidden=hidden.reshape(-1, hidden.shape[-1]),
            weight=self.weight,
            labels=labels.reshape(-1),
            **given,
        )
        return total, count

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) to (..., V): for text generation."""
        return nn.functional.linear(hidden, self.weight)


class QKVProjection(nn.Module):
    """Queries, keys and values of attention, each with a weight of its own.

    Args:
        size: features of its input, D.
        heads: of queries, H.
        groups: heads of keys and values, G.
        width: features of a head, W.
        selection: chooses the backend of ``qkv_product``.

    Raises:
        DrivetrainError: the heads of queries cannot share those of keys evenly.
    """

    def __init__(
        self, size: int, heads: int, groups: int, width: int, *, selection: Selection | None = None
    ) -> None:
        super().__init__()
        if groups < 1 or heads % groups:
            raise DrivetrainError(
                f"QKVProjection: {heads} heads of queries cannot share {groups} of keys evenly"
            )
        self.query = _initialised(heads * width, size, features=size)
        self.key = _initialised(groups * width, size, features=size)
        self.value = _initialised(groups * width, size, features=size)
        self.width = width
        self.selection = selection or Selection()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(..., D) to (..., H, W), (..., G, W) and (..., G, W)."""
        query, key, value = (
            one.unflatten(-1, (-1, self.width))
            for one in self.selection.call(
                qkv_product.OPERATOR, x=x, query=self.query, key=self.key, value=self.value
            )
        )
        return query, key, value


class GroupedExperts(nn.Module):
    """Gated MLPs, of which each token has its own few; their products are grouped by expert.

    Args:
        size: features of its input and output, D.
        between: features in between, I.
        experts: how many, E.
        activation: of the gate, as of ``glu``.
        selection: chooses the backends of ``grouped_product`` and ``glu``.
    """

    def __init__(
        self,
        size: int,
        between: int,
        experts: int,
        *,
        activation: str = "silu",
        selection: Selection | None = None,
    ) -> None:
        super().__init__()
        self.gate_up = _initialised(experts, size, 2 * between, features=size)
        self.down = _initialised(experts, between, size, features=between)
        self.activation = activation
        self.selection = selection or Selection()

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """The sum over the chosen experts of their outputs times their shares.

        Args:
            x: (T, D).
            chosen: (T, k) int64, experts from 0 to E - 1; -1 is none, and its share is not looked at. On a GPU others
                are not noticed, and are none as well.
            shares: (T, k), floating point.

        Returns:
            (T, D) in the dtype of x; equal calls give equal bits.

        Raises:
            DrivetrainError: shapes do not fit, or on a CPU there is no such expert.
        """
        experts = self.gate_up.shape[0]
        _check_routing(x, chosen, shares, experts)
        tokens, each = chosen.shape
        held = (chosen >= 0) & (chosen < experts)
        expert = torch.where(held, chosen, experts).reshape(-1)
        ordered, order = expert.sort(stable=True)
        places = order.argsort()
        ends = torch.searchsorted(ordered, torch.arange(experts, device=x.device), right=True)
        rows = _permuted(x[:, None].expand(tokens, each, x.shape[-1]).flatten(0, 1), order, places)
        given = {"ends": ends.to(torch.int32)}
        packed = self.selection.call(grouped_product.OPERATOR, x=rows, weight=self.gate_up, **given)
        gated = self.selection.call(glu.OPERATOR, gate=packed, activation=self.activation)
        out = self.selection.call(grouped_product.OPERATOR, x=gated, weight=self.down, **given)
        assert isinstance(out, Tensor)
        wide = torch.promote_types(x.dtype, torch.float32)
        of_token = _permuted(out, places, order).unflatten(0, (tokens, each)).to(wide)
        weights = torch.where(held, shares.to(wide), 0.0)
        y: Tensor = (of_token * weights[..., None]).sum(1).to(x.dtype)
        return y


def _check_routing(x: Tensor, chosen: Tensor, shares: Tensor, experts: int) -> None:
    if chosen.dim() != 2 or chosen.shape != shares.shape or chosen.shape[:1] != x.shape[:1]:
        raise DrivetrainError(
            f"GroupedExperts: x has the shape {tuple(x.shape)}, chosen {tuple(chosen.shape)}, shares "
            f"{tuple(shares.shape)}; they have to be (T, D), (T, k) and (T, k)"
        )
    if chosen.device.type == "cpu" and not torch.compiler.is_compiling() and chosen.numel():
        first, last = int(chosen.min()), int(chosen.max())
        if first < -1 or last >= experts:
            raise DrivetrainError(
                f"GroupedExperts: experts from {first} to {last} were chosen; there are 0 to {experts - 1}, "
                "and -1 for none"
            )


def _permuted(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    rows: Tensor = _Permuted.apply(x, order, places)  # type: ignore[no-untyped-call]
    return rows


class _Permuted(torch.autograd.Function):
    """``x[order]``. Torch's gradient of an index adds, on a GPU in any sequence; of a permutation it is another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order, places)
        return x[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        order, places = ctx.saved_tensors
        return _permuted(gradient, places, order), None, None
