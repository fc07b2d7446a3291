"""Part ``bandwidth``: memory-bound operators, all backends in turns with a device copy of the same bytes.

The copy moves as many bytes as the operator by the rule of ``traffic.py``, half of them read and half written. The
share of a copy is the copy's time over the operator's: 1 is as fast as memory allows.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.ops.discovery import operator_named
from drivetrain.engine.ops.operator import Backend, Operator
from gpu_parts.clock import Budget, Call, Turn, interleaved
from gpu_parts.context import (
    Context,
    attempt,
    difference,
    drawn_by,
    gradients_call,
    is_ours,
    servers,
    tensors_of,
)
from gpu_parts.record import COPY, DRY, Row, Verdict, times_in_words
from gpu_parts.traffic import RULES, traffic_of

__all__ = ["TARGET", "WORKLOADS", "copy_call", "given_of", "run"]

PACKED = "glu, packed"
WORKLOADS = (*RULES, PACKED)
"""Operators, and gated units of one tensor that packs gate and up, as one product for both leaves it."""
TARGET = 0.85
"""Of a copy's bandwidth, for the best of our backends."""
DTYPE = torch.bfloat16
DROPOUT = 0.1

SIZES = {"tokens": 32768, "hidden": 2048, "between": 5632, "heads": 16, "width": 128}
"""A layer of about a billion parameters; tensors of 128 MiB and more, larger than the L2 cache of any device."""
TINY = {"tokens": 8, "hidden": 32, "between": 48, "heads": 2, "width": 16}

_ROUNDINGS = 4


def run(context: Context) -> None:
    """Each operator, forward alone and with backward."""
    sizes = TINY if context.dry else SIZES
    context.record.tell(sizes=sizes, dtype="bf16", rule=_bytes_rule(), target=TARGET)
    for number, workload in enumerate(WORKLOADS):
        if context.budget.spent:
            context.record.leave_out(workload, "time was up")
            continue
        _measure(context, workload, sizes, context.budget.share(len(WORKLOADS) - number))


def _bytes_rule() -> str:
    import gpu_parts.traffic

    return (gpu_parts.traffic.__doc__ or "").strip()


def given_of(workload: str, sizes: Mapping[str, int], drawn: Callable[..., Tensor]) -> dict[str, Any]:
    """Arguments of a call of the operator of ``workload``, those that are to have gradients from ``drawn``."""
    operator = _operator_of(workload)
    tokens, hidden = sizes["tokens"], sizes["hidden"]
    if operator == "rotary":
        x = drawn(tokens, sizes["heads"], sizes["width"])
        half = torch.arange(0, sizes["width"], 2, device=x.device) / sizes["width"]
        angles = torch.arange(tokens, device=x.device)[:, None] * 10_000.0**-half
        return {"x": x, "cosine": angles.cos().to(x.dtype), "sine": angles.sin().to(x.dtype)}
    if workload == PACKED:
        return {"gate": drawn(tokens, 2 * sizes["between"])}
    if operator == "glu":
        return {"gate": drawn(tokens, sizes["between"]), "up": drawn(tokens, sizes["between"])}
    given: dict[str, Any] = {"x": drawn(tokens, hidden)}
    if operator.startswith("add_") or operator == "bias_dropout_add":
        given["residual"] = drawn(tokens, hidden)
    if operator == "bias_dropout_add":
        seed = torch.tensor([1], device=given["x"].device)
        return {**given, "bias": drawn(hidden), "seed": seed, "probability": DROPOUT}
    given["weight"] = drawn(hidden)
    if "layer_norm" in operator:
        given["bias"] = drawn(hidden)
    return given


def _operator_of(workload: str) -> str:
    return workload.split(",")[0]


def copy_call(device: torch.device, moved: int) -> Call:
    """A copy on the device that reads ``moved / 2`` bytes and writes as many."""
    source = torch.empty(max(1, moved // 2), dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _measure(context: Context, workload: str, sizes: Mapping[str, int], budget: Budget) -> None:
    operator = operator_named(_operator_of(workload))
    given = attempt(
        context, workload, "arguments", lambda: given_of(workload, sizes, drawn_by(context, DTYPE))
    )
    if given is None:
        return
    calls = calls_of(context, operator, workload, given)
    if not calls:
        return
    outputs = tensors_of(next(iter(calls.values()))[0]())
    traffic = traffic_of(operator.name, given, outputs)
    del outputs
    for number, (which, moved, position) in enumerate(
        (("forward", traffic.forward, 0), ("forward + backward", traffic.both, 1))
    ):
        sides: dict[str, Call] = {COPY: copy_call(context.device, moved)}
        sides |= {backend.name: pair[position] for backend, pair in calls.items()}
        turns = interleaved(context.clock, sides, budget.share(2 - number))
        _tell(context, operator, f"{workload} {which}", moved, turns)


def calls_of(
    context: Context, operator: Operator, what: str, given: Mapping[str, Any]
) -> dict[Backend, tuple[Call, Call]]:
    """Of each backend that serves, computes what ``eager`` does, and does not fail: forward, and with backward.

    Running both once also compiles what is to be compiled.
    """
    leaves = [one for one in given.values() if isinstance(one, Tensor) and one.requires_grad]
    generator = context.generator()
    incoming: list[Tensor] = []
    expected: Sequence[Tensor] = ()
    found: dict[Backend, tuple[Call, Call]] = {}
    # Eager first: the others are held against it.
    for backend in sorted(servers(context, operator, what, given), key=lambda one: one.name != "eager"):
        forward = _forward(backend, given)
        outputs = attempt(context, what, backend.name, forward)
        if outputs is None:
            continue
        if not incoming:
            incoming += [
                torch.randn(one.shape, generator=generator, device=one.device).to(one.dtype)
                for one in tensors_of(outputs)
            ]
        del outputs
        both = gradients_call(forward, leaves, incoming)
        results = attempt(context, what, backend.name, both)
        if results is None:
            continue
        expected = expected or results
        error = difference(results, expected)
        allowed = _ROUNDINGS * torch.finfo(DTYPE).eps
        if not error <= allowed:
            said = f"WRONG: {error:.1e} from eager, relative root mean square, allowed {allowed:.1e}"
            context.record.add(Row(what, backend.name, said, "wrong", is_ours(operator, backend)))
            continue
        found[backend] = (forward, both)
    return found


def _forward(backend: Backend, given: Mapping[str, Any]) -> Call:
    return lambda: backend.call(**given)


def _tell(context: Context, operator: Operator, what: str, moved: int, turns: Mapping[str, Turn]) -> None:
    copied = turns[COPY]
    for side, turn in turns.items():
        backend = operator.backend(side)
        ours = None if backend is None else is_ours(operator, backend)
        figures: dict[str, Any] = {}
        said = DRY
        if turn.times and copied.times:
            share = median(copied.times) / median(turn.times)
            figures = {
                "bytes": moved,
                "bytes_per_s": moved / median(turn.times),
                "share_of_copy": share,
                "host_s": turn.host_s,
            }
            said = f"{times_in_words(turn.times, dry=False)}, {figures['bytes_per_s'] / 1e9:,.0f} GB/s"
            if side != COPY:
                said += f", {share:.0%} of a copy"
        context.record.add(Row(what, side, said, verdict_of(ours, figures), ours, turn.times, figures))


def verdict_of(ours: bool | None, figures: Mapping[str, Any]) -> Verdict:
    """Whether one of our backends reaches the target; anything else is for information."""
    if not ours or "share_of_copy" not in figures:
        return "information"
    return "reached" if figures["share_of_copy"] >= TARGET else "missed"
