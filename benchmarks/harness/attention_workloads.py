"""Workloads of attention: packed documents, one by one against one mask over all tokens.

Each gives the two sides as functions of no arguments that run forward and backward once on tensors of their own; who
times them, and how, is ``benchmarks/operators.py``. Torch is imported when a workload is built.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from harness.claims import Claim, claim_of_ratios
from harness.sides import Sides

__all__ = [
    "LENGTHS",
    "SEEDS",
    "attention_workloads",
    "document_lengths",
    "live_bytes",
    "live_bytes_claim",
    "packed_documents",
]

LENGTHS = {4096: 3.5, 2048: 0.0}
"""Tokens, and what is claimed: that many times as fast. 0: for information."""

SEEDS = (0, 1, 2)
"""Of the packings of one call. How much the borders save depends on where they lie."""

MEAN, SIGMA = 512, 0.5
HEADS, WIDTH = 8, 128


def attention_workloads() -> dict[str, Callable[[], Sides]]:
    """By key, what builds the two sides of a workload."""
    return {
        f"packed documents {tokens}": lambda tokens=tokens: packed_documents(tokens)  # type: ignore[misc]
        for tokens in LENGTHS
    }


def document_lengths(tokens: int, seed: int) -> list[int]:
    """Log-normal lengths with a mean of 512 and sigma 0.5 that fill ``tokens``; the last document is cut off there."""
    drawn = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        length = max(1, round(drawn.lognormvariate(math.log(MEAN) - SIGMA**2 / 2, SIGMA)))
        lengths.append(min(length, tokens - sum(lengths)))
    return lengths


def packed_documents(
    tokens: int, seeds: Sequence[int] = SEEDS, heads: int = HEADS, width: int = WIDTH
) -> Sides:
    """Causal attention within packed documents in bf16: document by document, and with one S x S mask.

    A call computes one packing for each seed, and returns the results of all, one after the other.
    """
    import torch

    built = [_sides(tokens, seed, heads, width, torch.device("cpu")) for seed in seeds]
    documents = ", ".join(str(len(document_lengths(tokens, seed))) for seed in seeds)
    return Sides(
        name=f"packed documents, S = {tokens}",
        ours=lambda: [result for ours, _ in built for result in ours()],
        theirs=lambda: [result for _, theirs in built for result in theirs()],
        target=LENGTHS.get(tokens, 0.0),
        note=(
            f"forward and backward of causal attention, bf16, {heads} heads of {width}, {len(seeds)} packings with "
            f"{documents} documents of log-normal length (mean {MEAN}, sigma {SIGMA}); theirs with a boolean mask of "
            "S x S, made before what is timed"
        ),
        peer="torch SDPA with one mask",
    )


def live_bytes(tokens: int, seed: int = 0, heads: int = 8, width: int = 64) -> tuple[int, int]:
    """Most bytes of tensors alive at once in forward and backward: ours, and with the S x S mask, made inside.

    Counted on tensors without memory, so that 32,768 tokens take no time; what a kernel allocates and frees before it
    returns is on neither side.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Its cases are real tensors: imported for the first time where none are real, it would not be.
    import drivetrain.engine.ops.attention
    from drivetrain.engine.memory import LiveBytes

    assert drivetrain.engine.ops.attention.OPERATOR.backend("eager") is not None

    peaks = []
    for side in (0, 1):
        with FakeTensorMode():
            call = _sides(tokens, seed, heads, width, torch.device("cpu"), mask_inside=True)[side]
            with LiveBytes() as live:
                call()
            peaks.append(live.peak_bytes)
    return peaks[0], peaks[1]


def live_bytes_claim(tokens: int = 32768) -> Claim:
    """That the live bytes of attention are at most half, for the packing of each seed."""
    import torch

    peaks = [live_bytes(tokens, seed) for seed in SEEDS]
    mebibytes = ", ".join(f"{ours / 2**20:.0f} against {theirs / 2**20:.0f}" for ours, theirs in peaks)
    return claim_of_ratios(
        f"packed documents, S = {tokens}: live bytes at most 1/2 of the peer's",
        "torch SDPA with one mask",
        torch.__version__,
        [theirs / ours for ours, theirs in peaks],
        target=2.0,
        note=(
            f"peak of forward and backward of one layer's attention, bf16, 8 heads of 64, MiB: {mebibytes}; inputs, "
            "outputs and gradients included on both sides; counted on tensors without memory"
        ),
    )


def _sides(
    tokens: int, seed: int, heads: int, width: int, device: Any, mask_inside: bool = False
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import torch
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from drivetrain.engine.ops.attention import OPERATOR, Documents, Mask

    lengths = document_lengths(tokens, seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, heads, width)
    q, k, v, upstream = (torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(4))
    for one in (q, k, v):
        one.requires_grad_()
    # Borders are numbers that the host reads, also where other tensors have no memory.
    with unset_fake_temporarily():
        mask = Mask(documents=Documents.of_lengths(lengths))
    eager = OPERATOR.backend("eager")
    assert eager is not None

    def seen() -> Any:
        document = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
        positions = torch.arange(tokens)
        return (document[:, None] == document) & (positions[:, None] >= positions)

    made = None if mask_inside else seen()

    def ours() -> Any:
        out = eager.call(q, k, v, mask)
        assert isinstance(out, torch.Tensor)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), upstream))

    def theirs() -> Any:
        one_mask = seen() if made is None else made
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=one_mask)[0].transpose(0, 1)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), upstream))

    return ours, theirs
