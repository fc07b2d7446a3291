"""A call as JSON and back: what a process that tries a backend is told. Nothing is pickled."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from drivetrain.engine.ops.attention.mask import Documents, Dropout, Mask
from drivetrain.engine.ops.signature import Argument, Signature

__all__ = ["described", "signature_from", "undescribable"]

_PLAIN = (str, bool, int, float)


def undescribable(signature: Signature) -> str | None:
    """Why a call cannot be made again from its description; None where it can."""
    if any(name.endswith("]") for name, _ in signature.arguments):
        return "it is given lists of tensors, which the tuner does not draw"
    for name, value in signature.options:
        if not isinstance(value, (*_PLAIN, Mask)):
            return f"its option {name} is a {type(value).__name__}, which the tuner cannot hand to another process"
        if isinstance(value, Mask) and value.dropout is not None and not value.seeded:
            return (
                "attention weights are dropped by draws from torch's generator: no two backends drop the same, so none "
                "can be graded against another"
            )
    return None


def described(signature: Signature) -> dict[str, Any]:
    """A document of plain values; :func:`undescribable` must have said None."""
    return {
        "operator": signature.operator,
        "device": signature.device,
        "arguments": {
            name: {
                "shape": list(one.shape),
                "dtype": str(one.dtype).removeprefix("torch."),
                "contiguous": one.contiguous,
                "requires_grad": one.requires_grad,
            }
            for name, one in signature.arguments
        },
        "options": {
            name: {"mask": _of_mask(value)} if isinstance(value, Mask) else value
            for name, value in signature.options
        },
    }


def signature_from(document: Mapping[str, Any]) -> Signature:
    """The call that :func:`described` was given."""
    arguments = tuple(
        (
            name,
            Argument(
                tuple(one["shape"]), _dtype(one["dtype"]), bool(one["contiguous"]), bool(one["requires_grad"])
            ),
        )
        for name, one in document["arguments"].items()
    )
    options: tuple[tuple[str, Hashable], ...] = tuple(
        (name, _mask(value["mask"]) if isinstance(value, dict) else value)
        for name, value in document["options"].items()
    )
    return Signature(document["operator"], document["device"], arguments, options)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _of_mask(mask: Mask) -> dict[str, Any]:
    documents, dropout = mask.documents, mask.dropout
    prefix = mask.prefix
    return {
        "causal": mask.causal,
        "window": mask.window,
        "prefix": prefix if prefix is None or isinstance(prefix, int) else list(prefix),
        "documents": None if documents is None else [documents.borders_q, documents.borders_k],
        "alignment": mask.alignment,
        "slopes": None if mask.slopes is None else mask.slopes.tolist(),
        "softcap": mask.softcap,
        "dropout": None if dropout is None else [dropout.probability, dropout.seed],
    }


def _mask(document: Mapping[str, Any]) -> Mask:
    borders, slopes, dropout = document["documents"], document["slopes"], document["dropout"]
    return Mask(
        causal=document["causal"],
        window=document["window"],
        prefix=document["prefix"],
        documents=None if borders is None else Documents(*borders),
        alignment=document["alignment"],
        slopes=None if slopes is None else torch.tensor(slopes, dtype=torch.float32),
        softcap=document["softcap"],
        dropout=None if dropout is None else Dropout(*dropout),
    )
