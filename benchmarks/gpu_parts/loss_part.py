"""Part ``loss``: output matrix and cross-entropy, forward and backward, beside its three matrix products alone.

The products (logits; gradients of the hidden states and of the matrix) are most of the time, and no operator's merit.
What a backend takes beyond them is memory-bound: it has to read the logits once and write their gradients once, which
is what the copy moves. Gradients are computed in forward by some backends, so that forward alone compares nothing.
"""

from statistics import median
from typing import Any

import torch

from drivetrain.engine.ops.discovery import operator_named
from drivetrain.measure.flops import matrix_product_flops
from gpu_parts.bandwidth_part import TARGET, calls_of, copy_call, verdict_of
from gpu_parts.clock import Call, interleaved
from gpu_parts.context import Context, attempt, drawn_by, is_ours
from gpu_parts.record import COPY, DRY, PRODUCTS, Row, times_in_words

__all__ = ["run"]

SIZES = {"tokens": 8192, "hidden": 2048, "vocabulary": 32000}
TINY = {"tokens": 8, "hidden": 16, "vocabulary": 32}


def run(context: Context) -> None:
    """One size, all backends."""
    sizes = TINY if context.dry else SIZES
    context.record.tell(sizes=sizes, dtype="bf16", rule=(__doc__ or "").strip(), target=TARGET)
    operator = operator_named("linear_cross_entropy")
    what = "linear_cross_entropy forward + backward"
    tokens, hidden, vocabulary = sizes["tokens"], sizes["hidden"], sizes["vocabulary"]

    def arguments() -> dict[str, Any]:
        drawn = drawn_by(context, torch.bfloat16)
        # Logits of about the size of a model's that has learned something, not of the root of its width.
        weight = (drawn(vocabulary, hidden).detach() * hidden**-0.5).requires_grad_()
        labels = torch.randint(vocabulary, (tokens,), generator=context.generator(), device=context.device)
        return {"hidden": drawn(tokens, hidden), "weight": weight, "labels": labels}

    given = attempt(context, what, "arguments", arguments)
    if given is None:
        return
    calls = calls_of(context, operator, what, given)
    logits_bytes = tokens * vocabulary * given["hidden"].element_size()
    sides: dict[str, Call] = {COPY: copy_call(context.device, 2 * logits_bytes)}
    sides[PRODUCTS] = _products(given)
    sides |= {backend.name: both for backend, (_, both) in calls.items()}
    peaks = {side: context.clock.peak_bytes(call) for side, call in sides.items()}
    turns = interleaved(context.clock, sides, context.budget)
    flops = 3 * matrix_product_flops(1, tokens, vocabulary, hidden)
    for side, turn in turns.items():
        backend = operator.backend(side)
        ours = None if backend is None else is_ours(operator, backend)
        said, figures = DRY, {}
        if turn.times:
            took = median(turn.times)
            figures = {"flops": flops, "peak_bytes": peaks[side], "host_s": turn.host_s}
            said = times_in_words(turn.times, dry=False)
            if side == PRODUCTS:
                said += f", {flops / took / 1e12:.0f} TFLOP/s"
            if side == COPY:
                said += f", {2 * logits_bytes / took / 1e9:,.0f} GB/s"
            if backend is not None:
                rest = took - median(turns[PRODUCTS].times)
                said += f", {_of_the_rest(rest, median(turns[COPY].times), figures)}"
                said += f", {(peaks[side] or 0) / 2**20:,.0f} MiB at the peak"
        context.record.add(Row(what, side, said, verdict_of(ours, figures), ours, turn.times, figures))


def _products(given: dict[str, Any]) -> Call:
    hidden, weight = given["hidden"].detach(), given["weight"].detach()
    logits = hidden @ weight.t()
    of_hidden, of_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def call() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=of_hidden)
        torch.mm(logits.t(), hidden, out=of_weight)

    return call


def _of_the_rest(rest: float, copied: float, figures: dict[str, Any]) -> str:
    figures["beyond_products_s"] = rest
    if rest <= 0:
        # The products in the backend are cut otherwise, and may be faster so.
        return "nothing beyond the products"
    figures["share_of_copy"] = copied / rest
    return f"{rest * 1e3:.3f} ms beyond the products, {copied / rest:.0%} of a copy"
