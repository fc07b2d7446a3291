"""The self-attention of a Llama layer: projections, rotary embedding, attention, output projection.

Its attention is one of our backends, or torch's SDPA with one S x S mask. What is measured is memory, by
``benchmarks/attention_memory.py``: bytes of tensors alive in forward and backward, counted on tensors without memory,
and the memory of a process that computes with real ones. Torch is imported when a layer is built.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from harness.attention_workloads import document_lengths

__all__ = [
    "DTYPES",
    "MASKS",
    "ONE_MASK",
    "Counted",
    "MaskKind",
    "Refused",
    "Shape",
    "Step",
    "counted",
    "lengths_of",
    "step_of",
]

MaskKind = Literal["causal", "documents"]
MASKS: tuple[MaskKind, ...] = ("causal", "documents")
DTYPES = ("bfloat16", "float32")
ONE_MASK = "S x S mask"
"""The peer, in the place of a backend's name."""


@dataclass(frozen=True)
class Shape:
    """Of the layer: tokens S, query heads, key groups, width of a head; hidden size is heads x width."""

    tokens: int = 32_768
    heads: int = 8
    groups: int = 8
    width: int = 64

    def __str__(self) -> str:
        return f"{self.heads} heads of {self.width}, {self.groups} key groups"


@dataclass(frozen=True)
class Refused:
    """A backend that does not serve the call, and why."""

    why: str


@dataclass(frozen=True)
class Counted:
    """Bytes of tensors.

    Attributes:
        peak: most that were alive at once in forward and backward, input, parameters and gradients included.
        kept: alive between forward and backward above input, parameters and output: what each further layer adds.
    """

    peak: int
    kept: int


@dataclass(frozen=True)
class Step:
    """A layer.

    Attributes:
        given: input and parameters.
        forward: to the output.
        backward: of that output to the gradients of what is given.
    """

    given: list[Any]
    forward: Callable[[], Any]
    backward: Callable[[Any], list[Any]]


def lengths_of(kind: MaskKind, tokens: int, seed: int = 0) -> list[int]:
    """Of the documents: one, or log-normal ones with a mean of 512."""
    return [tokens] if kind == "causal" else document_lengths(tokens, seed)


def step_of(backend: str, kind: MaskKind, dtype: str, shape: Shape, seed: int = 0) -> Step | Refused:
    """The layer whose attention is ``backend``; inside FakeTensorMode its tensors have no memory."""
    import torch
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from drivetrain.engine.ops import rotary
    from drivetrain.engine.ops.attention import CAUSAL, OPERATOR, Documents, Mask
    from drivetrain.engine.ops.modules_elementwise import RotaryEmbedding
    from drivetrain.engine.ops.signature import signature_of

    lengths = lengths_of(kind, shape.tokens, seed)
    with unset_fake_temporarily():
        # Borders are numbers that the host reads, also where other tensors have no memory.
        mask = CAUSAL if kind == "causal" else Mask(documents=Documents.of_lengths(lengths))
    generator = torch.Generator().manual_seed(seed)
    hidden, number = shape.heads * shape.width, getattr(torch, dtype)

    def drawn(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(sizes, generator=generator) * scale).to(number).requires_grad_()

    rope = RotaryEmbedding(shape.width)
    narrow = shape.groups * shape.width
    query, key, value, output = (
        drawn(rows, hidden, scale=hidden**-0.5) for rows in (hidden, narrow, narrow, hidden)
    )
    x, upstream = drawn(shape.tokens, hidden), drawn(shape.tokens, hidden).detach()
    positions = torch.cat([torch.arange(length) for length in lengths])

    def one_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        document = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
        order = torch.arange(shape.tokens)
        seen = order[:, None] >= order
        seen &= document[:, None] == document
        q, k, v = (one.transpose(0, 1)[None] for one in (q, k, v))
        grouped = shape.heads != shape.groups
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)[0].transpose(0, 1)

    attend: Callable[..., Any] = one_mask
    if backend != ONE_MASK:
        found = OPERATOR.backend(backend)
        assert found is not None, backend
        like = {
            name: torch.empty(shape.tokens, count, shape.width, dtype=number, requires_grad=True)
            for name, count in (("q", shape.heads), ("k", shape.groups), ("v", shape.groups))
        }
        why = found.supports(signature_of(OPERATOR.name, {**like, "mask": mask}))
        if why is not None:
            return Refused(why)
        attend = lambda q, k, v: found.call(q=q, k=k, v=v, mask=mask)  # noqa: E731
    turned_by = rotary.OPERATOR.backend("eager")
    assert turned_by is not None

    leaves = [x, query, key, value, output]

    def forward() -> torch.Tensor:
        cosine, sine = rope.angles(positions, torch.float32)
        q, k, v = (F.linear(x, one).unflatten(1, (-1, shape.width)) for one in (query, key, value))
        q, k = (turned_by.call(x=one, cosine=cosine, sine=sine, style=rope.style) for one in (q, k))
        return F.linear(attend(q, k, v).flatten(1), output)

    return Step(leaves, forward, lambda out: list(torch.autograd.grad(out, leaves, upstream)))


def counted(backend: str, kind: MaskKind, dtype: str, shape: Shape, seed: int = 0) -> Counted | Refused:
    """Bytes of tensors of a step; what an operator of torch allocates and frees before it returns is not seen."""
    # Its cases are real tensors: imported for the first time where none are real, it would not be.
    from torch._subclasses.fake_tensor import FakeTensorMode

    import drivetrain.engine.ops.attention
    from drivetrain.engine.memory import LiveBytes

    assert drivetrain.engine.ops.attention.OPERATOR.backend("eager") is not None
    # The borders of documents are real.
    with FakeTensorMode(allow_non_fake_inputs=True):
        step = step_of(backend, kind, dtype, shape, seed)
        if isinstance(step, Refused):
            return step
        with LiveBytes() as live:
            out = step.forward()
            kept = live.live_bytes - sum(one.untyped_storage().nbytes() for one in (*step.given, out))
            step.backward(out)
        return Counted(live.peak_bytes, kept)
