"""Bytes that a memory-bound operator has to move, by a written rule for each.

Forward reads each tensor argument once and writes each output once. Backward reads the gradient of each output, reads
again what its formula needs of arguments and outputs, and writes each gradient once; statistics of a row (4 bytes for
thousands) are left out. A gradient that is another tensor unchanged moves nothing. No kernel can do with less but one
that keeps what it has read in the cache between forward and backward, which the sizes rule out; who moves more shows
as a lower share of a copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["RULES", "Traffic", "traffic_of"]


@dataclass(frozen=True)
class _Rule:
    """Of backward.

    Attributes:
        reads: arguments by name, and outputs as ``output N``.
        writes: arguments whose gradients are tensors of their own.
        why: what is particular.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    why: str = ""


RULES: Mapping[str, _Rule] = {
    "rms_norm": _Rule(("x", "weight"), ("x", "weight")),
    "layer_norm": _Rule(("x", "weight"), ("x", "weight", "bias")),
    "add_rms_norm": _Rule(("output 1", "weight"), ("x", "weight"), "x and residual have one gradient"),
    "add_layer_norm": _Rule(
        ("output 1", "weight"), ("x", "weight", "bias"), "x and residual have one gradient"
    ),
    "rotary": _Rule(("cosine", "sine"), ("x",)),
    "glu": _Rule(("gate", "up"), ("gate", "up")),
    "bias_dropout_add": _Rule(
        (), ("x", "bias"), "the residual's gradient is the incoming one; the mask is a function of the seed"
    ),
}
"""By operator. The loss is not here: its products are most of it, see ``loss_part``."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of a call."""

    forward: int
    backward: int

    @property
    def both(self) -> int:
        """Of forward and backward."""
        return self.forward + self.backward


def traffic_of(operator: str, given: Mapping[str, Any], outputs: Sequence[Tensor]) -> Traffic:
    """Of a call of ``operator`` with these arguments, all of which that are to have gradients want them."""
    rule = RULES[operator]
    tensors = {name: one for name, one in given.items() if isinstance(one, Tensor)}
    tensors |= {f"output {number}": one for number, one in enumerate(outputs)}
    size = {name: one.numel() * one.element_size() for name, one in tensors.items()}
    written = sum(size[f"output {number}"] for number in range(len(outputs)))
    read = sum(size[name] for name in given if name in size)
    again = sum(size[name] for name in rule.reads if name in size)
    gradients = sum(size[name] for name in rule.writes if name in size)
    return Traffic(forward=read + written, backward=written + again + gradients)
