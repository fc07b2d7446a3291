"""ALiBi and the borders of packed documents never become a matrix of tokens by tokens: counted in live bytes.

What the allocator hands out is recorded, so that buffers inside of a kernel or of an operator of our own count too.
Backends that run on a CPU are tried where docs/ops-attention.md says that they need no memory of that size.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drivetrain.engine.ops.attention import CAUSAL, OPERATOR, Documents, Mask
from drivetrain.engine.ops.attention.cases import alibi_slopes

TOKENS, HEADS, WIDTH = 4096, 2, 16
ONE_MASK = TOKENS**2
"""Bytes of the smallest matrix that says of each pair of tokens whether one sees the other: booleans, for all heads."""
PACKED = Documents.of_lengths([700, 512, 512, 300, 1000, 47, 1025])
ALIBI = Mask(slopes=alibi_slopes(HEADS))
ALIBI_IN_DOCUMENTS = Mask(documents=PACKED, slopes=alibi_slopes(HEADS))
IN_DOCUMENTS = Mask(documents=PACKED)


def most_allocated(work: Callable[[], object]) -> int:
    """Most bytes alive at once of what ``work`` allocates."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        work()
    events = profile.profiler.kineto_results.events()
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    assert changes, "nothing was recorded"
    live = most = 0
    for _, nbytes in changes:
        live += nbytes
        most = max(most, live)
    return most


def forward_and_backward(backend: str, mask: Mask, dtype: torch.dtype, tokens: int = TOKENS) -> int:
    """Most bytes that attention of one layer has alive, its output and gradients included."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (torch.randn(tokens, HEADS, WIDTH, generator=generator).to(dtype) for _ in range(4))
    given = [one.requires_grad_() for one in (q, k, v)]
    serving = OPERATOR.backend(backend)
    assert serving is not None

    def work() -> list[Tensor]:
        out = serving.call(q=q, k=k, v=v, mask=mask)
        return list(torch.autograd.grad(out, given, upstream))

    return most_allocated(work)


@pytest.mark.parametrize(
    ("backend", "mask", "dtype"),
    [
        ("eager", IN_DOCUMENTS, torch.float32),
        ("eager", IN_DOCUMENTS, torch.bfloat16),
        ("eager", ALIBI, torch.bfloat16),
        ("eager", ALIBI_IN_DOCUMENTS, torch.float16),
        ("products", IN_DOCUMENTS, torch.bfloat16),
        ("chunked", IN_DOCUMENTS, torch.float32),
        ("chunked", ALIBI, torch.float32),
        ("chunked", ALIBI_IN_DOCUMENTS, torch.bfloat16),
    ],
    ids=str,
)
def test_no_matrix_of_tokens_by_tokens_is_made(backend: str, mask: Mask, dtype: torch.dtype) -> None:
    assert forward_and_backward(backend, mask, dtype) < ONE_MASK


@pytest.mark.parametrize(
    ("backend", "mask", "dtype"), [("dense", CAUSAL, torch.float32), ("eager", ALIBI, torch.float32)], ids=str
)
def test_the_count_sees_a_bias_or_scores_that_are_made(backend: str, mask: Mask, dtype: torch.dtype) -> None:
    """Both are said to need them."""
    tokens = 1024
    assert forward_and_backward(backend, mask, dtype, tokens) > tokens**2
