"""Communication: what could hide under computation, and what need not travel.

Times of collectives are those of a run's own steps without the profiler (``docs/overlap.md``), as shares of a step; or,
where the account is all there is, what of it is exposed. Where gloo computes on the cores that the model computes on,
hidden communication is not free: without a spare core the unfavourable end of what overlaps is no gain at all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.catalogue.data_parallelism import TRANSFERS
from drivetrain.catalogue.time_models.facts import TimeFacts
from drivetrain.catalogue.time_models.model import MeanStep, TimeModel, mean_step, pipelined_ns, predicted
from drivetrain.config import RunConfig
from drivetrain.config.layout import model_ranks
from drivetrain.measure.optimisation import NoPrediction, Prediction
from drivetrain.measure.parameters import parameter_count

__all__ = [
    "ASYNC_GRADIENTS",
    "BUCKETS",
    "CHUNKS",
    "FUSED_CALLS",
    "NARROW_GRADIENTS",
    "PARAMETER_GATHER",
    "PREFETCH",
]

_TREATS = ("communication",)
_TP_TRANSFERS = ("communication.tp.transfer", "communication.tp.unsplit")
_NO_STEPS = NoPrediction("the account has no steps")
_NO_FLIGHTS = NoPrediction("the run's summary does not say how long its collectives were under way")
_GRADIENT_BYTES = 4
_PACK_BYTES = 12
"""Of a gradient: 4 read and 2 written before it travels, 2 and 4 behind."""
_BACKWARD_COLLECTIVES = 1 / 2
"""A layer has as many collectives of tensor parallelism in its backward pass as in its forward pass."""
_OF_WEIGHTS = 1 / 3
"""Share of a product's three forms (output, gradients of input and of weight) that is the gradient of the weight."""


@dataclass(frozen=True)
class _Collectives:
    """One kind of collectives of one group in a mean step, in ns."""

    calls: float
    wire_ns: float
    exposed_ns: float
    fixed_ns: float | None


def _collectives(facts: TimeFacts, step: MeanStep, group: str, kind: str) -> _Collectives | None:
    found = facts.communication
    if found is None or not found.get("step_s"):
        return None
    one: Mapping[str, Any] | None = found["groups"].get(group, {}).get("kinds", {}).get(kind)
    if one is None or not one["calls"] or one["exposed_s"] is None:
        return None
    scale = step.window_ns / found["step_s"]
    fixed = one["fixed_s_per_call"]
    return _Collectives(
        one["calls"],
        one["wire_s"] * scale,
        one["exposed_s"] * scale,
        None if fixed is None else fixed * scale,
    )


def _overlapping(
    facts: TimeFacts, step: MeanStep, saved: float, rule: str, *, on_device: bool = False
) -> Prediction | NoPrediction:
    """With the range that cores leave open: none is spare, and what is hidden may cost as much as it saves."""
    if on_device or (facts.spare_cores or 0) >= 1:
        return predicted(step, _TREATS, saved, rule)
    return predicted(
        step,
        _TREATS,
        saved,
        f"{rule}; at worst nothing, where sending takes the cores that compute",
        low_ns=min(0.0, saved),
        high_ns=saved,
    )


def _number(config: RunConfig, megabytes: float) -> int:
    """Buckets of so many MB; 0 stands for one that holds everything."""
    gradients = _GRADIENT_BYTES * parameter_count(config.model).total / model_ranks(config)
    return 1 if megabytes == 0 else max(1, math.ceil(gradients / (megabytes * 1e6)))


def _buckets(facts: TimeFacts, after: RunConfig) -> Prediction | NoPrediction:
    """Gradients under way for W ns and the last micro-batch's backward pass of B ns, in n pieces:
    ``max(W, B) + min(W, B) / n`` (one piece: ``W + B``). A further call costs what calls cost whatever their size."""
    step = mean_step(facts.account)
    if step is None:
        return _NO_STEPS
    if facts.config.parallelism.zero_stage > 1:
        return NoPrediction("how reductions of shards lie under backward is not known")
    found = None
    for kind in ("all_reduce", "all_to_all"):
        found = found or _collectives(facts, step, "dp", kind)
    seconds = None if facts.communication is None else facts.communication.get("backward_s")
    if found is None or facts.communication is None or seconds is None:
        return _NO_FLIGHTS
    backward = seconds * step.window_ns / facts.communication["step_s"]
    before = _number(facts.config, facts.config.overlap.bucket_size_mb)
    now = _number(after, after.overlap.bucket_size_mb)
    if before == now:
        return NoPrediction(f"{now} buckets of gradients either way")
    if before > 1 and found.fixed_ns is None:
        return NoPrediction("what a call costs whatever its size is not known: all have one size")
    calls = (found.fixed_ns or 0.0) * (now - before)
    saved = pipelined_ns(found.wire_ns, backward, before) - pipelined_ns(found.wire_ns, backward, now) - calls
    rule = (
        f"gradients are under way for {found.wire_ns / 1e6:.3g} ms and backward takes {backward / 1e6:.3g} ms: "
        f"{now} pieces instead of {before}"
    )
    return _overlapping(facts, step, min(saved, found.exposed_ns), rule)


def _narrow_gradients(facts: TimeFacts, after: RunConfig) -> Prediction | NoPrediction:
    """Half of the exposed transfer E, less packing: 12 bytes of a gradient over the measured bandwidth. At best, where
    the exposed part is the end of W ns under way, ``min(E, W / 2)``."""
    del after
    step = mean_step(facts.account)
    if step is None:
        return _NO_STEPS
    exposed = step.ns_of(TRANSFERS)
    if not exposed:
        return NoPrediction("no transfer between data-parallel ranks is exposed in the profiled steps")
    if facts.memory_bandwidth is None:
        return NoPrediction(
            "memory bandwidth of this machine, for packing, is not measured: drivetrain bench memory"
        )
    gradients = parameter_count(facts.config.model).total / model_ranks(facts.config)
    packing = 1e9 * _PACK_BYTES * gradients / facts.memory_bandwidth
    rule = (
        f"half of {exposed / 1e6:.3g} ms a step of exposed transfer, less {packing / 1e6:.3g} ms for packing"
    )
    found = _collectives(facts, step, "dp", "all_reduce")
    if found is None:
        return predicted(step, TRANSFERS, exposed / 2 - packing, rule)
    best = max(exposed / 2, min(exposed, found.wire_ns / 2))
    return predicted(
        step,
        TRANSFERS,
        exposed / 2 - packing,
        f"{rule}; at best {best / 1e6:.3g} ms, where that is the end of {found.wire_ns / 1e6:.3g} ms under way",
        low_ns=exposed / 2 - packing,
        high_ns=best - packing,
    )


def _forward_ns(facts: TimeFacts) -> float | None:
    """Forward passes of a step; None where no span tells."""
    seen = None if facts.observed is None else facts.observed.ranges.get("drivetrain/forward")
    if seen is None or facts.observed is None or not seen.calls:
        return None
    return seen.ns / max(1, facts.observed.num_steps)


def _parameter_gather(facts: TimeFacts, after: RunConfig) -> Prediction | NoPrediction:
    """Parameters that are waited for at the end of a step, G ns, and the next first forward pass, F ns, in as many
    pieces as there are layers: ``G + F - (max(G, F) + min(G, F) / layers)``."""
    del after
    step = mean_step(facts.account)
    if step is None:
        return _NO_STEPS
    forward = _forward_ns(facts)
    if facts.observed is None or forward is None:
        return NoPrediction("the trace has no forward pass under which parameters could travel")
    waits = facts.observed.ranges.get("drivetrain/gather/blocking")
    if waits is None:
        return NoPrediction("no wait for updated parameters was recorded")
    passes = facts.observed.ranges["drivetrain/forward"].calls / max(1, facts.observed.num_steps)
    gather, first = waits.ns / max(1, facts.observed.num_steps), forward / passes
    saved = gather + first - pipelined_ns(gather, first, facts.config.model.num_layers)
    rule = (
        f"parameters are waited for {gather / 1e6:.3g} ms a step, and a forward pass takes {first / 1e6:.3g} ms: in "
        f"{facts.config.model.num_layers} pieces"
    )
    return _overlapping(facts, step, min(saved, gather), rule)


def _prefetch(facts: TimeFacts, after: RunConfig) -> Prediction | NoPrediction:
    """Of gathers of shards, half are forward's (backward has its own, asked for ahead already): as
    :func:`_parameter_gather`, with the exposed part of them, over all forward passes."""
    del after
    step = mean_step(facts.account)
    if step is None:
        return _NO_STEPS
    if facts.config.overlap.prefetch_blocks:
        return NoPrediction("how far ahead is enough is not known")
    found = None
    for group in ("dp_shard", "dp"):
        found = found or _collectives(facts, step, group, "all_gather")
    forward = _forward_ns(facts)
    if found is None or forward is None:
        return _NO_FLIGHTS
    gathers = min(found.exposed_ns, found.wire_ns / 2)
    saved = gathers + forward - pipelined_ns(gathers, forward, facts.config.model.num_layers)
    rule = (
        f"gathers of forward passes are waited for {gathers / 1e6:.3g} ms a step at most, and forward takes "
        f"{forward / 1e6:.3g} ms: in {facts.config.model.num_layers} pieces"
    )
    return _overlapping(facts, step, min(saved, gathers), rule)


def _tensor_parallel(facts: TimeFacts, step: MeanStep) -> tuple[float, float] | None:
    """Exposed transfers of tensor parallelism and products of the layers that it spreads, in ns; None without any."""
    exposed = step.ns_of(_TP_TRANSFERS)
    parameters = parameter_count(facts.config.model)
    layers = parameters.block_matrices / (parameters.block_matrices + parameters.output_product)
    products = layers * step.ns_of(("compute.matmul",))
    return (exposed, products) if exposed and products else None


_NO_TP = NoPrediction("no transfer of tensor parallelism is exposed in the profiled steps")


def _chunks(facts: TimeFacts, after: RunConfig) -> Prediction | NoPrediction:
    """Exposed transfers C and products M of the layers, in n chunks: ``C + M - (max(C, M) + min(C, M) / n)``. Products
    of fewer rows are taken to be as fast."""
    step = mean_step(facts.account)
    if step is None:
        return _NO_STEPS
    chunks = after.overlap.wanted_tp_chunks
    if chunks is None or facts.config.overlap.wanted_tp_chunks is None:
        return NoPrediction("how many chunks each shape was tuned to is not known here")
    if facts.config.overlap.wanted_tp_chunks > 1:
        return NoPrediction("what is exposed of chunks does not tell what further ones would hide")
    found = _tensor_parallel(facts, step)
    if found is None:
        return _NO_TP
    exposed, products = found
    saved = exposed + products - pipelined_ns(exposed, products, chunks)
    rule = (
        f"{exposed / 1e6:.3g} ms a step of exposed transfers and {products / 1e6:.3g} ms of the layers' products in "
        f"{chunks} chunks; products of fewer rows as fast"
    )
    return _overlapping(facts, step, min(saved, exposed), rule)


def _fused_calls(facts: TimeFacts, after: RunConfig) -> Prediction | NoPrediction:
    """As :func:`_chunks`: torch's fused operators go in as many pieces as ranks share a layer."""
    step = mean_step(facts.account)
    if step is None:
        return _NO_STEPS
    found = _tensor_parallel(facts, step)
    if found is None:
        return _NO_TP
    exposed, products = found
    ranks = after.parallelism.tensor_model_parallel_size
    saved = exposed + products - pipelined_ns(exposed, products, ranks)
    rule = (
        f"{exposed / 1e6:.3g} ms a step of exposed transfers and {products / 1e6:.3g} ms of the layers' products in "
        f"{ranks} pieces, one of a rank; never held against a trial"
    )
    return _overlapping(facts, step, min(saved, exposed), rule, on_device=True)


def _async_gradients(facts: TimeFacts, after: RunConfig) -> Prediction | NoPrediction:
    """Half of the exposed transfers are backward's, and may hide under the gradients of weights, a third of the layers'
    products: ``min(C / 2, M / 3)``."""
    del after
    step = mean_step(facts.account)
    if step is None:
        return _NO_STEPS
    found = _tensor_parallel(facts, step)
    if found is None:
        return _NO_TP
    exposed, products = found
    saved = min(exposed * _BACKWARD_COLLECTIVES, products * _OF_WEIGHTS)
    rule = (
        f"half of {exposed / 1e6:.3g} ms a step of exposed transfers are backward's, under the gradients of weights, "
        f"{products * _OF_WEIGHTS / 1e6:.3g} ms"
    )
    return _overlapping(facts, step, saved, rule)


BUCKETS = TimeModel(
    "gradients under way and the last micro-batch's backward pass, as measured without the profiler, in as many pieces "
    "as there are buckets: the longer of both and one piece of the shorter; further calls at their measured fixed cost",
    _buckets,
)
NARROW_GRADIENTS = TimeModel(
    "half of the exposed transfer between data-parallel ranks, less packing by measured bandwidth",
    _narrow_gradients,
)
PARAMETER_GATHER = TimeModel(
    "the wait for updated parameters and the first forward pass, in as many pieces as there are layers",
    _parameter_gather,
)
PREFETCH = TimeModel(
    "exposed gathers of forward passes and forward itself, in as many pieces as there are layers", _prefetch
)
CHUNKS = TimeModel(
    "exposed transfers of tensor parallelism and the layers' products, in as many pieces as there are chunks: the "
    "longer of both and one piece of the shorter",
    _chunks,
)
FUSED_CALLS = TimeModel(
    "as of tp_chunks, with as many pieces as ranks share a layer; never held against a trial", _fused_calls
)
ASYNC_GRADIENTS = TimeModel(
    "half of the exposed transfers of tensor parallelism, as far as the gradients of weights take as long",
    _async_gradients,
)
