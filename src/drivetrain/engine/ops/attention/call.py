"""What every backend asks of a call before it computes, and what it reads off a signature."""

import torch
from torch import Tensor

from drivetrain.engine.ops.attention.mask import CAUSAL, Mask, Span
from drivetrain.engine.ops.signature import Signature
from drivetrain.errors import DrivetrainError

__all__ = ["check_call", "crosses", "mask_of", "softmax_scale", "zeros"]


def check_call(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> list[Span]:
    """The documents of a call whose shapes fit together.

    Raises:
        DrivetrainError: they do not.
    """
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape:
        raise DrivetrainError(
            f"attention takes queries (Tq, H, K) and keys and values (Tk, G, K); it was given {tuple(q.shape)}, "
            f"{tuple(k.shape)} and {tuple(v.shape)}"
        )
    if q.shape[2] != k.shape[2]:
        raise DrivetrainError(f"queries are {q.shape[2]} wide, keys {k.shape[2]}")
    heads, groups = q.shape[1], k.shape[1]
    if groups == 0 or heads % groups:
        raise DrivetrainError(f"{heads} query heads are no multiple of {groups} key heads")
    if not q.dtype == k.dtype == v.dtype:
        raise DrivetrainError(f"queries are {q.dtype}, keys {k.dtype}, values {v.dtype}; give all the same")
    if mask.slopes is not None and len(mask.slopes) != heads:
        raise DrivetrainError(f"{len(mask.slopes)} slopes for {heads} query heads; give one for each")
    return mask.spans(q.shape[0], k.shape[0])


def softmax_scale(q: Tensor, scale: float | None) -> float:
    """The factor of the products of queries with keys: 1/sqrt(K) where none is given."""
    return float(q.shape[-1] ** -0.5) if scale is None else scale


def zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What attention to nothing gives: zeros like q that hang on all three, whatever they hold, with zero gradients."""
    never = torch.zeros((), dtype=torch.bool, device=q.device)
    return torch.where(never, q + (k.sum() + v.sum()), 0.0)


def mask_of(signature: Signature) -> Mask:
    """The mask of a call."""
    mask = signature.option("mask")
    if mask is None:
        return CAUSAL
    assert isinstance(mask, Mask)
    return mask


def crosses(signature: Signature) -> bool:
    """Whether a document of the call has not as many keys as queries."""
    q, k = signature.argument("q"), signature.argument("k")
    assert q is not None
    assert k is not None
    return mask_of(signature).crosses(q.shape[0], k.shape[0])
