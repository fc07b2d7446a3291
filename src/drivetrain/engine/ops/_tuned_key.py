"""Under which name a call is found in a tuned file: all that changes what is fastest, and how many tokens it has.

Two calls have the same name where they differ in nothing but the number of tokens, or in values. Sizes of the model are
exact: a kernel that is best for 2,048 features may be worst for 2,047. What is fastest changes slowly with the number
of tokens, so that is counted in buckets of powers of two.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from drivetrain.engine.ops.attention.mask import Mask
from drivetrain.engine.ops.signature import Argument, Signature

__all__ = ["TOKEN_ARGUMENTS", "Key", "key_of", "token_count"]

TOKEN_ARGUMENTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "add_layer_norm": {"x": 1, "residual": 1},
        "add_rms_norm": {"x": 1, "residual": 1},
        "attention": {"q": 2, "k": 2, "v": 2},
        "bias_dropout_add": {"x": 1, "residual": 1},
        "gate_up_product": {"x": 1},
        "glu": {"gate": 1, "up": 1},
        "grouped_product": {"x": 1},
        "layer_norm": {"x": 1},
        "linear": {"x": 1},
        "linear_cross_entropy": {"hidden": 1, "labels": 0, "token_weights": 0},
        "qkv_product": {"x": 1},
        "rms_norm": {"x": 1},
        "rotary": {"x": 2, "cosine": 1, "sine": 1},
    }
)
"""By operator and argument, how many of the last dimensions are sizes of the model; those before count tokens.
Arguments and operators that are not named have sizes of the model only."""


@dataclass(frozen=True)
class Key:
    """The name of a call.

    Attributes:
        call: operator, device, dtypes, sizes of the model, layouts, wanted gradients and options, in words.
        tokens: how many; 0 where the operator has none.
    """

    call: str
    tokens: int

    @property
    def bucket(self) -> tuple[int, int]:
        """Least and largest number of tokens that are taken for alike: above one power of two, up to the next."""
        if self.tokens <= 1:
            return self.tokens, self.tokens
        largest = 1 << (self.tokens - 1).bit_length()
        return largest // 2 + 1, largest


def key_of(signature: Signature, *, deterministic: bool | None = None) -> Key:
    """The name of a call with this signature.

    Args:
        deterministic: whether only deterministic algorithms are allowed; absent: what torch is set to.
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    tokens = token_count(signature)
    arguments = [
        f"{name} {_argument_text(signature.operator, name, one, tokens)}" for name, one in signature.arguments
    ]
    options = [f"{name} {_option_text(value)}" for name, value in sorted(signature.options)]
    parts = [*arguments, *options, *(["deterministic"] if deterministic else [])]
    return Key(f"{signature.operator} on {signature.device}: {'; '.join(parts)}", tokens)


def token_count(signature: Signature) -> int:
    """Tokens of a call: rows of the first argument that has any."""
    counted = TOKEN_ARGUMENTS.get(signature.operator, {})
    for name, argument in signature.arguments:
        if name in counted:
            return _rows(argument, counted[name])
    return 0


def _rows(argument: Argument, sizes: int) -> int:
    return math.prod(argument.shape[: len(argument.shape) - sizes])


def _argument_text(operator: str, name: str, argument: Argument, tokens: int) -> str:
    sizes = TOKEN_ARGUMENTS.get(operator, {}).get(name)
    if sizes is None:
        dimensions = [str(size) for size in argument.shape]
    else:
        rows = _rows(argument, sizes)
        kept = argument.shape[len(argument.shape) - sizes :]
        dimensions = ["tokens" if rows == tokens else str(rows), *map(str, kept)]
    dtype = str(argument.dtype).removeprefix("torch.")
    gaps = "" if argument.contiguous else " with gaps"
    return f"{dtype}[{', '.join(dimensions)}]{gaps}{', gradient' if argument.requires_grad else ''}"


def _option_text(value: object) -> str:
    if not isinstance(value, Mask):
        return repr(value)
    if value.documents is None or not value.documents.equal:
        return str(value)
    # Squares of lengths are what attention costs; of packed ones no two micro-batches have the same.
    borders = value.documents.borders_q
    equal = f"equal documents of {borders[1] - borders[0] if len(borders) > 1 else 0}"
    return " + ".join(equal if kind == "documents" else kind for kind in value.kinds)
