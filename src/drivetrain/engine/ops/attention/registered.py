"""The chunked and the Triton backend as operators of torch: compiled code calls them without breaking its graph.

A mask travels flattened into what such operators take. Borders stay tensors: another packing compiles nothing anew.
Both share one backward operator, the chunked recomputation.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain.engine.ops.attention import chunked
from drivetrain.engine.ops.attention.call import check_call, softmax_scale
from drivetrain.engine.ops.attention.dropout import draw_seed
from drivetrain.engine.ops.attention.mask import CAUSAL, Alignment, Documents, Dropout, Mask, Span

__all__ = ["attention_chunked", "attention_triton"]


class _Flat(NamedTuple):
    """A mask as an operator takes it: 0, an empty list or text where something is absent."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    prefix: list[int]
    slopes: Tensor | None
    seed: Tensor
    causal: bool
    window: int
    alignment: str
    softcap: float
    dropout: float
    scale: float


def _flattened(q: Tensor, mask: Mask, scale: float | None) -> _Flat:
    prefix: list[int] = []
    if mask.prefix is not None:
        prefix = [mask.prefix] if isinstance(mask.prefix, int) else list(mask.prefix)
    dropout = mask.dropout
    if dropout is None:
        seed = torch.zeros((), dtype=torch.int64)
    else:
        seed = draw_seed() if dropout.seed is None else torch.tensor(dropout.seed)
    return _Flat(
        None if mask.documents is None else mask.documents.cu_seqlens_q,
        None if mask.documents is None else mask.documents.cu_seqlens_k,
        prefix,
        mask.slopes,
        seed,
        mask.causal,
        mask.window or 0,
        mask.alignment or "",
        mask.softcap or 0.0,
        0.0 if dropout is None else dropout.probability,
        softmax_scale(q, scale),
    )


def _unflattened(q: Tensor, k: Tensor, v: Tensor, flat: _Flat) -> tuple[list[Span], chunked.Rule]:
    documents = None
    if flat.cu_seqlens_q is not None:
        assert flat.cu_seqlens_k is not None
        documents = Documents(flat.cu_seqlens_q, flat.cu_seqlens_k)
    prefix: int | list[int] | None = flat.prefix or None
    if len(flat.prefix) == 1:
        prefix = flat.prefix[0]
    alignment: Alignment | None = None
    if flat.alignment:
        alignment = "top_left" if flat.alignment == "top_left" else "bottom_right"
    seed = int(flat.seed)
    mask = Mask(
        causal=flat.causal,
        window=flat.window or None,
        prefix=prefix,
        documents=documents,
        alignment=alignment,
        slopes=flat.slopes,
        softcap=flat.softcap or None,
        dropout=Dropout(flat.dropout, seed) if flat.dropout else None,
    )
    return check_call(q, k, v, mask), chunked.Rule(mask, seed, flat.scale)


@torch.library.custom_op("drivetrain::attention_chunked", mutates_args=())
def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    prefix: list[int],
    slopes: Tensor | None,
    seed: Tensor,
    causal: bool,
    window: int,
    alignment: str,
    softcap: float,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    flat = _Flat(
        cu_seqlens_q, cu_seqlens_k, prefix, slopes, seed, causal, window, alignment, softcap, dropout, scale
    )
    return chunked.forward(q, k, v, *_unflattened(q, k, v, flat))


@torch.library.custom_op("drivetrain::attention_triton", mutates_args=())
def _triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    prefix: list[int],
    slopes: Tensor | None,
    seed: Tensor,
    causal: bool,
    window: int,
    alignment: str,
    softcap: float,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from drivetrain.engine.ops.attention.triton_launch import forward

    flat = _Flat(
        cu_seqlens_q, cu_seqlens_k, prefix, slopes, seed, causal, window, alignment, softcap, dropout, scale
    )
    return forward(q, k, v, *_unflattened(q, k, v, flat))


@torch.library.custom_op("drivetrain::attention_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    prefix: list[int],
    slopes: Tensor | None,
    seed: Tensor,
    causal: bool,
    window: int,
    alignment: str,
    softcap: float,
    dropout: float,
    scale: float,
    wide: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    flat = _Flat(
        cu_seqlens_q, cu_seqlens_k, prefix, slopes, seed, causal, window, alignment, softcap, dropout, scale
    )
    spans, rule = _unflattened(q, k, v, flat)
    return chunked.backward(gradient, q, k, v, out, log, spans, rule._replace(wide=wide))


def _fake_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    sums = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=sums)


def _fake_backward(
    _gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, prefix, slopes, seed, *rest = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k, slopes, seed)
    ctx.prefix, ctx.rest = prefix, rest


def _gradients_of(wide: bool) -> Callable[..., tuple[Tensor | None, ...]]:
    def gradients(ctx: Any, gradient: Tensor, _of_log: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, log, cu_seqlens_q, cu_seqlens_k, slopes, seed = ctx.saved_tensors
        borders = cu_seqlens_q, cu_seqlens_k
        found = _backward(gradient, q, k, v, out, log, *borders, ctx.prefix, slopes, seed, *ctx.rest, wide)
        return (*found, *(None,) * 11)

    return gradients


_backward.register_fake(_fake_backward)
for _operator, _wide in ((_chunked, False), (_triton, True)):
    _operator.register_fake(_fake_forward)
    _operator.register_autograd(_gradients_of(_wide), setup_context=_keep)


def attention_chunked(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask = CAUSAL, scale: float | None = None
) -> Tensor:
    """As the reference, in memory linear in the number of tokens."""
    out: Tensor = _chunked(q, k, v, *_flattened(q, mask, scale))[0]
    return out


def attention_triton(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask = CAUSAL, scale: float | None = None
) -> Tensor:
    """As the reference: forward in one kernel, backward by the chunked recomputation."""
    out: Tensor = _triton(q, k, v, *_flattened(q, mask, scale))[0]
    return out
