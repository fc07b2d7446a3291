"""Part ``attention``: whole sequences and packed documents, all backends beside one S x S mask in torch's SDPA."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.engine.ops.attention import OPERATOR, Documents, Mask
from drivetrain.measure.flops import FLOPS_RULE, attention_pairs
from gpu_parts.bandwidth_part import calls_of
from gpu_parts.clock import Budget, Call, interleaved
from gpu_parts.context import Context, attempt, drawn_by, gradients_call, is_ours
from gpu_parts.record import DRY, Row, times_in_words
from harness.attention_workloads import document_lengths

__all__ = ["ONE_MASK", "run"]

ONE_MASK = "SDPA, one mask"
SIZES = {"tokens": 8192, "sequence": 2048, "heads": 16, "groups": 4, "width": 128}
TINY = {"tokens": 64, "sequence": 32, "heads": 4, "groups": 2, "width": 16}


def run(context: Context) -> None:
    """Both packings, forward alone and with backward."""
    sizes = TINY if context.dry else SIZES
    tokens, sequence = sizes["tokens"], sizes["sequence"]
    packed = [24, 1, 39] if context.dry else document_lengths(tokens, 0)
    packings = {"whole sequences": [sequence] * (tokens // sequence), "packed documents": packed}
    context.record.tell(sizes=sizes, dtype="bf16", flops_rule=FLOPS_RULE, lengths=packings)
    for number, (packing, lengths) in enumerate(packings.items()):
        if context.budget.spent:
            context.record.leave_out(packing, "time was up")
            continue
        _measure(context, packing, lengths, sizes, context.budget.share(len(packings) - number))


def _measure(
    context: Context, packing: str, lengths: Sequence[int], sizes: dict[str, int], budget: Budget
) -> None:
    what = f"attention, {packing}"
    tokens, heads, groups, width = (sizes[name] for name in ("tokens", "heads", "groups", "width"))

    def arguments() -> dict[str, Any]:
        drawn = drawn_by(context, torch.bfloat16)
        mask = Mask(documents=Documents.of_lengths(lengths))
        keys, values = drawn(tokens, groups, width), drawn(tokens, groups, width)
        return {"q": drawn(tokens, heads, width), "k": keys, "v": values, "mask": mask}

    given = attempt(context, what, "arguments", arguments)
    if given is None:
        return
    pairs = {backend.name: calls for backend, calls in calls_of(context, OPERATOR, what, given).items()}
    masked = attempt(context, what, ONE_MASK, lambda: _one_mask(given, lengths, context))
    if masked is not None:
        pairs[ONE_MASK] = masked
    forward = int(4 * attention_pairs(lengths) * heads * width)
    for number, (which, flops) in enumerate((("forward", forward), ("forward + backward", 3 * forward))):
        sides = {name: calls[number] for name, calls in pairs.items()}
        if not sides:
            continue
        peaks = {side: context.clock.peak_bytes(call) for side, call in sides.items()}
        turns = interleaved(context.clock, sides, budget.share(2 - number))
        for side, turn in turns.items():
            backend = OPERATOR.backend(side)
            said, figures = DRY, {}
            if turn.times:
                rate = flops / median(turn.times)
                figures = {
                    "flops": flops,
                    "flops_per_s": rate,
                    "peak_bytes": peaks[side],
                    "host_s": turn.host_s,
                }
                said = f"{times_in_words(turn.times, dry=False)}, {rate / 1e12:.0f} TFLOP/s"
                said += f", {(peaks[side] or 0) / 2**20:,.0f} MiB at the peak"
            ours = None if backend is None else is_ours(OPERATOR, backend)
            context.record.add(Row(f"{what}, {which}", side, said, "information", ours, turn.times, figures))


def _one_mask(given: dict[str, Any], lengths: Sequence[int], context: Context) -> tuple[Call, Call]:
    """What is done without documents: a boolean S x S mask, made before anything is timed. Run once."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(context.device)
    positions = torch.arange(len(document), device=context.device)
    seen = (document[:, None] == document) & (positions[:, None] >= positions)
    q, k, v = (given[name] for name in "qkv")

    def forward() -> Tensor:
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=grouped)
        return out[0].transpose(0, 1)

    both = gradients_call(forward, (q, k, v), [torch.randn_like(q).detach()])
    both()
    return forward, both
