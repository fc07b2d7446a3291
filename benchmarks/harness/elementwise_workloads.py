"""Workloads of the elementwise operators: the compiled backend against torch's own operators, both used well.

Sizes are those of a model of about a billion parameters: 4,096 tokens, 2,048 features, 5,632 between, 16 heads of
128 and 4 of keys. Torch is imported when a workload is built.
"""

from collections.abc import Callable, Mapping
from typing import Any

from harness.sides import Sides

__all__ = ["TOKENS", "elementwise_workloads"]

TOKENS = 4096
HIDDEN, BETWEEN, HEADS, GROUPS, WIDTH = 2048, 5632, 16, 4, 128
DROPOUT = 0.1

TARGETS: Mapping[tuple[str, str], float] = {
    ("add_rms_norm", "float32"): 2.2,
    ("add_rms_norm", "bfloat16"): 3.5,
    ("glu", "float32"): 2.0,
    ("glu", "bfloat16"): 2.0,
    ("rotary", "float32"): 2.0,
    ("rotary", "bfloat16"): 2.0,
}
"""What is claimed. Of everything else the figures are for information."""

IN_WORDS = {
    "rms_norm": f"RMSNorm of {HIDDEN} features",
    "add_rms_norm": f"residual and RMSNorm of {HIDDEN} features",
    "layer_norm": f"LayerNorm of {HIDDEN} features",
    "add_layer_norm": f"residual and LayerNorm of {HIDDEN} features",
    "bias_dropout_add": f"bias, dropout of {DROPOUT:g} and residual, {HIDDEN} features",
    "glu": f"SwiGLU of a packed product, 2 x {BETWEEN} features",
    "glu of two": f"SwiGLU of two tensors of {BETWEEN} features",
    "rotary": f"rotary embedding of {HEADS} heads of queries and {GROUPS} of keys, {WIDTH} features each",
}


def elementwise_workloads() -> dict[str, Callable[[int], Sides]]:
    """By key, what builds the two sides of a workload for a number of tokens."""
    return {
        f"{what} {dtype}": lambda tokens, what=what, dtype=dtype: build(what, dtype, tokens)
        for what in IN_WORDS
        for dtype in ("float32", "bfloat16")
    }


def build(what: str, dtype_name: str, tokens: int) -> Sides:
    """One workload; ``what`` is a key of :data:`IN_WORDS`."""
    import torch

    dtype = getattr(torch, dtype_name)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    calls = _calls(what, drawn, tokens)
    ours, theirs = (_forward_and_backward(*call) for call in calls)
    return Sides(
        name=f"{IN_WORDS[what]}, {dtype_name}",
        ours=ours,
        theirs=theirs,
        target=TARGETS.get((what, dtype_name), 0.0),
        note=f"forward and backward of {tokens} tokens",
        peer="torch eager, F.dropout" if what == "bias_dropout_add" else "torch eager",
        same_results=what != "bias_dropout_add",
    )


def _calls(what: str, drawn: Callable[..., Any], tokens: int) -> list[tuple[Callable[[], Any], list[Any]]]:
    """For each side a function to the outputs, and the tensors whose gradients are wanted."""
    import torch
    import torch.nn.functional as F

    from drivetrain.engine.ops.discovery import operator_named

    operator = operator_named(what.split()[0])
    backends = [operator.backend(name) for name in ("inductor", "eager")]

    if what == "rotary":
        query, key = drawn(tokens, HEADS, WIDTH), drawn(tokens, GROUPS, WIDTH)
        exponents = torch.arange(0, WIDTH, 2) / WIDTH
        angles = torch.arange(tokens)[:, None] * 10_000.0**-exponents
        turn = {"cosine": angles.cos().to(query.dtype), "sine": angles.sin().to(query.dtype)}
        return [
            (lambda one=one: (one.call(x=query, **turn), one.call(x=key, **turn)), [query, key])
            for one in backends
            if one is not None
        ]
    x, residual = drawn(tokens, HIDDEN), drawn(tokens, HIDDEN)
    weight, bias = drawn(HIDDEN), drawn(HIDDEN)
    given = {
        "rms_norm": lambda: {"x": x, "weight": weight},
        "add_rms_norm": lambda: {"x": x, "residual": residual, "weight": weight},
        "layer_norm": lambda: {"x": x, "weight": weight, "bias": bias},
        "add_layer_norm": lambda: {"x": x, "residual": residual, "weight": weight, "bias": bias},
        "bias_dropout_add": lambda: {"x": x, "residual": residual, "bias": bias},
        "glu": lambda: {"gate": drawn(tokens, 2 * BETWEEN)},
        "glu of two": lambda: {"gate": drawn(tokens, BETWEEN), "up": drawn(tokens, BETWEEN)},
    }[what]()
    leaves = list(given.values())
    if what == "bias_dropout_add":
        seed = torch.tensor([1])
        ours = backends[0]
        assert ours is not None
        return [
            (lambda: ours.call(**given, seed=seed, probability=DROPOUT), leaves),
            (lambda: residual + F.dropout(x + bias, DROPOUT), leaves),
        ]
    return [(lambda one=one: one.call(**given), leaves) for one in backends if one is not None]


def _forward_and_backward(call: Callable[[], Any], leaves: list[Any]) -> Callable[[], Any]:
    """Outputs and gradients of one call; incoming gradients are drawn once."""
    import torch

    with torch.no_grad():
        outputs = call()
    shapes = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in shapes]

    def once() -> Any:
        found = call()
        found = (found,) if isinstance(found, torch.Tensor) else found
        return (*found, *torch.autograd.grad(found, leaves, incoming))

    return once
