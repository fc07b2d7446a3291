"""Norms, dropout, rotary embedding and gated MLPs as modules for anybody's model; each is usable alone.

Which backend serves is a :class:`Selection`'s matter: without one, torch's own operators. Parameters are initialised.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drivetrain.engine.ops import (
    add_layer_norm,
    add_rms_norm,
    bias_dropout_add,
    glu,
    layer_norm,
    rms_norm,
    rotary,
)
from drivetrain.engine.ops._dropout_mask import threshold_of
from drivetrain.engine.ops._norm_formulas import AFTER_WEIGHT
from drivetrain.engine.ops.operator import Outputs
from drivetrain.engine.ops.selection import Selection
from drivetrain.errors import DrivetrainError

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "BiasDropoutAdd",
    "GatedMLP",
    "LayerNorm",
    "LlamaScaling",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
]


def _one(outputs: Outputs) -> Tensor:
    assert isinstance(outputs, Tensor)
    return outputs


def _two(outputs: Outputs) -> tuple[Tensor, Tensor]:
    first, second = outputs
    return first, second


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + epsilon) * (weight + offset)`` over the last dimension.

    Args:
        size: features, D.
        epsilon: added to the mean square.
        offset: 1 for Gemma's form, whose weight starts at 0; the weight starts at 1 - offset.
        casting: ``after_weight``, or ``before_weight`` as in the Llama code of transformers.
        selection: chooses the backend of ``rms_norm``.
    """

    def __init__(
        self,
        size: int,
        epsilon: float = 1e-6,
        *,
        offset: float = 0.0,
        casting: str = AFTER_WEIGHT,
        selection: Selection | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.epsilon, self.offset, self.casting = epsilon, offset, casting
        self.selection = selection or Selection()

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to the same shape and dtype."""
        given = {"epsilon": self.epsilon, "offset": self.offset, "casting": self.casting}
        return _one(self.selection.call(rms_norm.OPERATOR, x=x, weight=self.weight, **given))


class AddRMSNorm(RMSNorm):
    """``RMSNorm`` of ``x + residual``; backend of ``add_rms_norm``."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(..., D) each; returns the norm in the dtype of x, and the sum."""
        given = {"epsilon": self.epsilon, "offset": self.offset, "casting": self.casting}
        return _two(
            self.selection.call(add_rms_norm.OPERATOR, x=x, residual=residual, weight=self.weight, **given)
        )


class LayerNorm(nn.Module):
    """``(x - mean) / sqrt(variance + epsilon) * weight + bias`` over the last dimension.

    Args:
        size: features, D.
        epsilon: added to the variance.
        bias: whether there is one.
        selection: chooses the backend of ``layer_norm``.
    """

    def __init__(
        self, size: int, epsilon: float = 1e-5, *, bias: bool = True, selection: Selection | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None
        self.epsilon = epsilon
        self.selection = selection or Selection()

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to the same shape and dtype."""
        given = {"weight": self.weight, "bias": self.bias, "epsilon": self.epsilon}
        return _one(self.selection.call(layer_norm.OPERATOR, x=x, **given))


class AddLayerNorm(LayerNorm):
    """``LayerNorm`` of ``x + residual``; backend of ``add_layer_norm``."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(..., D) each; returns the norm in the dtype of x, and the sum."""
        given = {"weight": self.weight, "bias": self.bias, "epsilon": self.epsilon}
        return _two(self.selection.call(add_layer_norm.OPERATOR, x=x, residual=residual, **given))


class BiasDropoutAdd(nn.Module):
    """``residual + dropout(x + bias)``; while not training nothing is dropped.

    Args:
        probability: that an element is dropped.
        selection: chooses the backend of ``bias_dropout_add``.

    Raises:
        DrivetrainError: the probability is none.
    """

    def __init__(self, probability: float, *, selection: Selection | None = None) -> None:
        super().__init__()
        threshold_of(probability)
        self.probability = probability
        self.selection = selection or Selection()

    def forward(
        self, x: Tensor, residual: Tensor, bias: Tensor | None = None, seed: Tensor | None = None
    ) -> Tensor:
        """(..., D) each, bias (D,), to (..., D).

        Args:
            seed: one int64 that decides what is dropped. Without it, one is drawn from torch's generator of the device:
                activations that are computed again then need that generator's state restored, as checkpointing does.
        """
        if seed is None:
            seed = torch.randint(1 << 62, (1,), device=x.device)
        probability = self.probability if self.training else 0.0
        given = {"residual": residual, "seed": seed, "bias": bias, "probability": probability}
        return _one(self.selection.call(bias_dropout_add.OPERATOR, x=x, **given))


@dataclass(frozen=True)
class LlamaScaling:
    """The frequencies of Llama 3.1 for long contexts (arXiv:2407.21783): slow pairs slower by a factor.

    Attributes:
        factor: by which they are slowed.
        low, high: turns within the former context: pairs with fewer than ``low`` are slowed by all of the factor, those
            with more than ``high`` not at all, those between by a blend.
        context: tokens of the former context.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    context: int = 8192

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and 0 < self.low < self.high and self.context > 0):
            raise DrivetrainError(
                f"{self}: factor is at least 1, low above 0 and below high, context above 0"
            )

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Radians per position of each pair, and what becomes of them."""
        turns = self.context * frequencies / (2 * math.pi)
        share = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return frequencies / self.factor * (1 - share) + frequencies * share


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by their positions; it has no parameters.

    Args:
        head_size: features of a head, K.
        base: of the frequencies ``base^(-2i/R)``.
        rotary_size: features that are turned, R, from the first on; all where it is not given.
        style: ``half`` (Llama, GPT-NeoX) or ``interleaved`` (GPT-J).
        scaling: of the frequencies.
        selection: chooses the backend of ``rotary``.

    Raises:
        DrivetrainError: R is odd, or above K.
    """

    def __init__(
        self,
        head_size: int,
        base: float = 10_000.0,
        *,
        rotary_size: int | None = None,
        style: str = rotary.HALF,
        scaling: LlamaScaling | None = None,
        selection: Selection | None = None,
    ) -> None:
        super().__init__()
        turned = head_size if rotary_size is None else rotary_size
        if turned % 2 or not 0 < turned <= head_size:
            raise DrivetrainError(
                f"{turned} rotary features of {head_size}: an even number from 2 to all of them"
            )
        if style not in (rotary.HALF, rotary.INTERLEAVED):
            raise DrivetrainError(f"style is {style!r}; there are {rotary.HALF} and {rotary.INTERLEAVED}")
        self.rotary_size, self.base, self.style, self.scaling = turned, base, style, scaling
        self.selection = selection or Selection()

    def angles(self, position_ids: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Cosine and sine, (..., R/2) in ``dtype``, of tokens at ``position_ids`` (...) int64."""
        exponents = torch.arange(0, self.rotary_size, 2, device=position_ids.device, dtype=dtype)
        frequencies = self.base ** (-exponents / self.rotary_size)
        if self.scaling is not None:
            frequencies = self.scaling.scaled(frequencies)
        angles = position_ids.to(dtype).unsqueeze(-1) * frequencies
        return angles.cos(), angles.sin()

    def forward(self, query: Tensor, key: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (..., H, K) and keys (..., G, K), turned, for tokens at ``position_ids`` (...) int64."""
        cosine, sine = self.angles(position_ids, torch.promote_types(query.dtype, torch.float32))
        given = {"cosine": cosine, "sine": sine, "style": self.style}
        turned = [_one(self.selection.call(rotary.OPERATOR, x=x, **given)) for x in (query, key)]
        return turned[0], turned[1]


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` with gate and up in one product.

    Args:
        hidden_size, ffn_hidden_size: features outside, D, and between, F.
        activation: ``silu`` (SwiGLU), ``gelu_tanh`` or ``gelu_erf`` (GeGLU).
        bias: whether the products have biases.
        selection: chooses the backend of ``glu``.

    Raises:
        DrivetrainError: there is no such activation.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        selection: Selection | None = None,
    ) -> None:
        super().__init__()
        glu.check_activation(activation)
        self.gate_up = nn.Linear(hidden_size, 2 * ffn_hidden_size, bias=bias)
        self.down = nn.Linear(ffn_hidden_size, hidden_size, bias=bias)
        self.activation = activation
        self.selection = selection or Selection()

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to the same shape and dtype. Rows 0 to F - 1 of ``gate_up.weight`` are the gate's."""
        packed = self.gate_up(x)
        gated = _one(self.selection.call(glu.OPERATOR, gate=packed, activation=self.activation))
        out: Tensor = self.down(gated)
        return out


class SwiGLU(GatedMLP):
    """``down(silu(gate(x)) * up(x))``; Shazeer, arXiv:2002.05202."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        bias: bool = False,
        selection: Selection | None = None,
    ) -> None:
        super().__init__(hidden_size, ffn_hidden_size, bias=bias, selection=selection)
