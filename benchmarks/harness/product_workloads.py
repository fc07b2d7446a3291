"""Workloads around matrix products: the loss over a vocabulary, products of experts, the gradient of a weight.

Each gives the two sides as functions of no arguments that run forward and backward once on tensors of their own; who
times them, and how, is ``benchmarks/operators.py``. Torch is imported when a workload is built.
"""

from collections.abc import Callable
from typing import Any

from harness.claims import Claim, claim_of_ratios
from harness.sides import Sides

__all__ = [
    "experts",
    "loss_live_bytes",
    "loss_live_bytes_claim",
    "product_workloads",
    "vocabulary_loss",
    "weight_gradient",
]

TOKENS = 4096
HIDDEN, WORDS = 2048, 32_000
EXPERTS, FEATURES, OUTPUTS = 8, 1024, 2048
LOSS_TARGET, MEMORY_TARGET = 1.3, 4.0
"""Of the loss in bf16: that many times as fast, at most one over that of the memory."""


def product_workloads() -> dict[str, Callable[[], Sides]]:
    """By key, what builds the two sides of a workload."""
    return {
        "linear_cross_entropy bfloat16": lambda: vocabulary_loss("bfloat16"),
        "linear_cross_entropy float32": lambda: vocabulary_loss(
            "float32", tokens=2048, hidden=1024, words=16_000
        ),
        "grouped_product bfloat16": lambda: experts("bfloat16"),
        "linear bfloat16": lambda: weight_gradient(HIDDEN, HIDDEN),
        "linear bfloat16 wide": lambda: weight_gradient(11_264, HIDDEN),
    }


def _drawn(dtype_name: str, *shapes: tuple[int, ...]) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(shape, generator=generator) / shape[-1] ** 0.5)
        .to(getattr(torch, dtype_name))
        .requires_grad_()
        for shape in shapes
    ]


def _call(operator: str, backend: str) -> Callable[..., Any]:
    from drivetrain.engine.ops.discovery import operator_named

    found = operator_named(operator).backend(backend)
    assert found is not None
    return found.call


def _labels(tokens: int, words: int) -> Any:
    import torch

    return torch.randint(words, (tokens,), generator=torch.Generator().manual_seed(1))


def vocabulary_loss(
    dtype_name: str,
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
    words: int = WORDS,
    backend: str = "inductor",
) -> Sides:
    """Mean loss and its two gradients: chunked, and of all logits in fp32."""
    import torch

    states, weight = _drawn(dtype_name, (tokens, hidden), (words, hidden))
    labels = _labels(tokens, words)

    def side(call: Callable[..., Any]) -> Callable[[], Any]:
        def once() -> Any:
            total, count = call(hidden=states, weight=weight, labels=labels)
            loss = total / count
            return (loss.detach(), *torch.autograd.grad(loss, (states, weight)))

        return once

    claimed = dtype_name == "bfloat16" and words == WORDS
    return Sides(
        name=f"linear and cross-entropy, V = {words}, {dtype_name}",
        ours=side(_call("linear_cross_entropy", backend)),
        theirs=side(_call("linear_cross_entropy", "eager")),
        target=LOSS_TARGET if claimed else 0.0,
        note=f"forward and backward of {tokens} tokens, {hidden} features, {words} words",
        peer="torch eager, logits in fp32",
    )


def loss_live_bytes(tokens: int = TOKENS, hidden: int = HIDDEN, words: int = WORDS) -> tuple[int, int]:
    """Most bytes of tensors alive at once in forward and backward of the loss in bf16, above its arguments.

    Of ours it is the backend ``chunked``: compiled code cannot be looked into; it keeps the same tensors, and
    fewer between.
    Counted on tensors without memory.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from drivetrain.engine.memory import LiveBytes

    peaks = []
    for backend in ("chunked", "eager"):
        call = _call("linear_cross_entropy", backend)
        with FakeTensorMode():
            states, weight = (
                torch.empty(shape, dtype=torch.bfloat16).requires_grad_()
                for shape in ((tokens, hidden), (words, hidden))
            )
            labels = torch.empty(tokens, dtype=torch.int64)
            with LiveBytes() as live:
                total, count = call(hidden=states, weight=weight, labels=labels)
                torch.autograd.grad(total / count, (states, weight))
        given = sum(one.numel() * one.element_size() for one in (states, weight, labels))
        peaks.append(live.peak_bytes - given)
    return peaks[0], peaks[1]


def loss_live_bytes_claim() -> Claim:
    """That the loss takes at most a quarter of the memory."""
    import torch

    ours, theirs = loss_live_bytes()
    return claim_of_ratios(
        f"linear and cross-entropy, V = {WORDS}: live bytes at most 1/{MEMORY_TARGET:g} of the peer's",
        "torch eager, logits in fp32",
        torch.__version__,
        [theirs / ours],
        target=MEMORY_TARGET,
        note=(
            f"peak of forward and backward of {TOKENS} tokens in bf16, {HIDDEN} features, above the arguments, "
            f"gradients included: {ours / 2**20:.0f} against {theirs / 2**20:.0f} MiB; counted on tensors without "
            "memory"
        ),
    )


def experts(dtype_name: str, tokens: int = TOKENS, features: int = FEATURES, outputs: int = OUTPUTS) -> Sides:
    """Products of experts with uneven numbers of rows: torch's grouped product, guarded, and one product for each."""
    import torch

    x, weight = _drawn(dtype_name, (tokens, features), (EXPERTS, features, outputs))
    shares = torch.arange(1, EXPERTS + 1).cumsum(0)
    ends = (tokens * shares // shares[-1]).to(torch.int32)
    (upstream,) = _drawn(dtype_name, (tokens, outputs))

    def side(call: Callable[..., Any]) -> Callable[[], Any]:
        def once() -> Any:
            y = call(x=x, weight=weight, ends=ends)
            return (y.detach(), *torch.autograd.grad(y, (x, weight), upstream.detach()))

        return once

    return Sides(
        name=f"products of {EXPERTS} experts, {features} to {outputs} features, {dtype_name}",
        ours=side(_call("grouped_product", "torch_grouped_mm")),
        theirs=side(_call("grouped_product", "eager")),
        target=0.0,
        note=f"forward and backward of {tokens} tokens, the largest expert with {EXPERTS} times those of the smallest",
        peer="torch eager, a product for each",
    )


def weight_gradient(outputs: int, features: int, tokens: int = 2048) -> Sides:
    """A linear layer in bf16 whose weight's gradient has an operand copied first, and torch's own."""
    import torch

    x, weight = _drawn("bfloat16", (tokens, features), (outputs, features))
    (upstream,) = _drawn("bfloat16", (tokens, outputs))

    def side(call: Callable[..., Any]) -> Callable[[], Any]:
        def once() -> Any:
            y = call(x=x, weight=weight)
            return (y.detach(), *torch.autograd.grad(y, (x, weight), upstream.detach()))

        return once

    return Sides(
        name=f"linear of {features} to {outputs} features, bfloat16",
        ours=side(_call("linear", "transposed_gradient")),
        theirs=side(_call("linear", "eager")),
        target=0.0,
        note=f"forward and backward of {tokens} tokens",
    )
