"""Arguments for a recorded call: drawn in its dtypes, laid out as it had them, of magnitudes as in training."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.ops._tuned_key import TOKEN_ARGUMENTS, token_count
from drivetrain.engine.ops.attention.mask import Documents, Mask
from drivetrain.engine.ops.operator import Case
from drivetrain.engine.ops.signature import Argument, Signature

__all__ = ["MOST_GRADED", "case_of", "drawn_arguments", "graded_size", "main_dtype", "with_tokens"]

MOST_GRADED = 1 << 24
"""Elements of the largest tensor that grading against float64 may make: a few of these exist at once, 128 MiB each."""


def main_dtype(signature: Signature) -> torch.dtype:
    """The dtype of the first floating-point argument: that of the activations."""
    return signature.dtypes[0]


def case_of(signature: Signature) -> Case:
    """The call as one of a numerics grid. Its dtypes are the recorded ones, whatever it is asked for."""

    def make(_: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        return drawn_arguments(signature, generator)

    return Case(str(signature), make, (main_dtype(signature),))


def drawn_arguments(signature: Signature, generator: torch.Generator) -> dict[str, Any]:
    """The call's arguments by name, tensors on the CPU."""
    tensors = {
        name: _laid_out(_drawn(signature, name, one, generator), one).requires_grad_(one.requires_grad)
        for name, one in signature.arguments
    }
    return {**tensors, **dict(signature.options)}


def _drawn(signature: Signature, name: str, argument: Argument, generator: torch.Generator) -> Tensor:
    values = _DRAWS.get((signature.operator, name), _normal)(signature, argument, generator)
    return values.to(argument.dtype)


def _normal(signature: Signature, argument: Argument, generator: torch.Generator) -> Tensor:
    assert argument.dtype.is_floating_point, (
        f"{signature}: nothing is known of its {argument.dtype} arguments"
    )
    return torch.randn(argument.shape, generator=generator)


def _around_one(_: Signature, argument: Argument, generator: torch.Generator) -> Tensor:
    return 1.0 + 0.5 * torch.randn(argument.shape, generator=generator)


def _matrix(_: Signature, argument: Argument, generator: torch.Generator) -> Tensor:
    """Products with it are about as large as what is multiplied."""
    return torch.randn(argument.shape, generator=generator).div_(math.sqrt(argument.shape[-1]))


def _expert_matrices(_: Signature, argument: Argument, generator: torch.Generator) -> Tensor:
    return torch.randn(argument.shape, generator=generator).div_(math.sqrt(argument.shape[1]))


def _cosines(_: Signature, argument: Argument, generator: torch.Generator) -> Tensor:
    return torch.rand(argument.shape, generator=generator).mul_(2 * math.pi).cos_()


def _labels(signature: Signature, argument: Argument, generator: torch.Generator) -> Tensor:
    weight = signature.argument("weight")
    assert weight is not None
    labels = torch.randint(weight.shape[0], argument.shape, generator=generator)
    ignored = signature.option("ignore_index")
    # A sixteenth is ignored, as padding and the ends of documents are.
    labels[torch.rand(argument.shape, generator=generator) < 1 / 16] = (
        ignored if isinstance(ignored, int) else -100
    )
    return labels


def _weights_of_tokens(_: Signature, argument: Argument, generator: torch.Generator) -> Tensor:
    return (torch.rand(argument.shape, generator=generator) > 1 / 16).float()


def _seed(_: Signature, argument: Argument, generator: torch.Generator) -> Tensor:
    return torch.randint(2**62, argument.shape, generator=generator)


def _ends(signature: Signature, argument: Argument, generator: torch.Generator) -> Tensor:
    """Experts of unequal numbers of rows, which together are all."""
    rows, experts = token_count(signature), argument.shape[0]
    inner = torch.randint(rows + 1, (experts - 1,), generator=generator).sort().values
    return torch.cat([inner, torch.tensor([rows])])


_Draw = Callable[[Signature, Argument, torch.Generator], Tensor]
_DRAWS: Mapping[tuple[str, str], _Draw] = {
    **{
        (norm, "weight"): _around_one for norm in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
    },
    ("linear", "weight"): _matrix,
    **{("qkv_product", name): _matrix for name in ("query", "key", "value")},
    **{("gate_up_product", name): _matrix for name in ("gate", "up")},
    ("linear_cross_entropy", "weight"): _matrix,
    ("linear_cross_entropy", "labels"): _labels,
    ("linear_cross_entropy", "token_weights"): _weights_of_tokens,
    ("grouped_product", "weight"): _expert_matrices,
    ("grouped_product", "ends"): _ends,
    ("bias_dropout_add", "seed"): _seed,
    ("rotary", "cosine"): _cosines,
    ("rotary", "sine"): _cosines,
}
"""What is not drawn from the normal distribution. Cosine and sine need not belong together: no backend relies on it."""


def _laid_out(values: Tensor, argument: Argument) -> Tensor:
    """Without gaps; or with one behind each row, as part of a joined product has them."""
    if argument.contiguous or values.dim() == 0:
        return values
    wider = torch.zeros((values.shape[0], 2, *values.shape[1:]), dtype=values.dtype)
    wider[:, 0] = values
    return wider[:, 0]


def with_tokens(signature: Signature, tokens: int) -> Signature:
    """The same call with fewer tokens: rows are cut off the end, and the documents that lie there."""
    now = token_count(signature)
    assert 0 < tokens <= now
    counted = TOKEN_ARGUMENTS.get(signature.operator, {})

    def cut(name: str, argument: Argument) -> Argument:
        if name not in counted:
            return argument
        rows = argument.shape[: len(argument.shape) - counted[name]]
        assert math.prod(rows) == now, f"{signature} has arguments of several numbers of tokens"
        # Further dimensions of rows become one: what is computed of a row does not depend on its place.
        return replace(argument, shape=(tokens, *argument.shape[len(rows) :]))

    arguments = tuple((name, cut(name, one)) for name, one in signature.arguments)
    options = tuple(
        (name, _cut_mask(value, tokens) if isinstance(value, Mask) else value)
        for name, value in signature.options
    )
    return replace(signature, arguments=arguments, options=options)


def _cut_mask(mask: Mask, tokens: int) -> Mask:
    if mask.documents is None:
        return mask
    borders = [border for border in mask.documents.borders_q if border < tokens] + [tokens]
    prefix = mask.prefix
    if prefix is not None and not isinstance(prefix, int):
        prefix = list(prefix)[: len(borders) - 1]
    return replace(mask, documents=Documents(borders), prefix=prefix)


def graded_size(signature: Signature, most: int = MOST_GRADED) -> int:
    """The number of tokens with which a call is graded: its own, or where float64 would take too much memory, half of
    them as often as that needs; 0 where it has no tokens, or several numbers of them."""
    tokens = token_count(signature)
    if tokens == 0 or not _is_cut_easily(signature, tokens):
        return 0
    while tokens > 2 and _elements(with_tokens(signature, tokens)) > most:
        tokens //= 2
    return tokens


def _is_cut_easily(signature: Signature, tokens: int) -> bool:
    counted = TOKEN_ARGUMENTS[signature.operator]
    same = all(
        math.prod(one.shape[: len(one.shape) - counted[name]]) == tokens
        for name, one in signature.arguments
        if name in counted
    )
    masks = [value for _, value in signature.options if isinstance(value, Mask)]
    return same and not any(mask.documents is not None and mask.documents.crosses for mask in masks)


def _elements(signature: Signature) -> int:
    """Of the largest tensor that the reference makes."""
    tokens = token_count(signature)
    if signature.operator == "attention":
        q, mask = signature.argument("q"), signature.option("mask")
        assert q is not None
        documents = mask.documents if isinstance(mask, Mask) else None
        borders = [0, tokens] if documents is None else documents.borders_q
        # The reference's gradient keeps the scores of all documents.
        squares = sum((last - first) ** 2 for first, last in pairwise(borders))
        return max(squares * q.shape[1], math.prod(q.shape))
    widest = max(math.prod(one.shape) for _, one in signature.arguments)
    outputs = [
        tokens * one.shape[0]
        for name, one in signature.arguments
        if name not in TOKEN_ARGUMENTS[signature.operator] and len(one.shape) == 2
    ]
    return max(widest, *outputs, 0)
