"""What enters and leaves tensor-parallel layers travels in chunks, each under the product of another."""

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.catalogue.data_parallelism import overlap_in_words
from drivetrain.catalogue.entry import Knob, Optimisation
from drivetrain.catalogue.time_models.communication import CHUNKS
from drivetrain.config import LaunchFacts, Rule, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY", "rows_of_rank"]

_FIELD = "overlap.tp_chunks"
_TP = "parallelism.tensor_model_parallel_size"
_PLAIN = "1"
_FIRST = "4"
"""With which it is tried where nothing is tuned: three quarters of what is sent can hide, and products stay large."""
_MOST = 64
_POWERS = tuple(2**power for power in range(1, 7))
_SPAN = "drivetrain/tp_chunk/"
"""Begins the name of the region in which the collective of a chunk is handed over."""


def rows_of_rank(config: RunConfig) -> int:
    """Rows of a micro-batch that chunks are made of: its tokens, under sequence parallelism a rank's share of them."""
    parallelism = config.parallelism
    tokens = config.training.micro_batch_size * config.model.seq_length
    return tokens // parallelism.tensor_model_parallel_size if parallelism.sequence_parallel else tokens


def _needs_ranks(config: RunConfig, _facts: LaunchFacts) -> str | None:
    if config.parallelism.tensor_model_parallel_size >= 2:
        return None
    return (
        f"{config.overlap.tp_chunks} cuts what tensor-parallel ranks send each other, and {_TP} = 1 has none; nearest "
        f"legal values: {_FIELD} = 1; {_TP} = 2"
    )


def _applies(config: RunConfig, _facts: LaunchFacts) -> str | None:
    rows = rows_of_rank(config)
    return f"a micro-batch has {rows} row on each rank, which is one chunk" if rows < 2 else None


def _on(config: RunConfig, facts: LaunchFacts) -> Mapping[str, Any] | None:
    if config.overlap.tp_chunks != _PLAIN or _needs_ranks(config, facts) or _applies(config, facts):
        return None
    return {_FIELD: _FIRST}


def _numbers(config: RunConfig, _facts: LaunchFacts) -> Sequence[float]:
    return [number for number in _POWERS if number <= rows_of_rank(config)]


def _owned(config: RunConfig, _facts: LaunchFacts) -> str | None:
    if config.overlap.wanted_tp_chunks is None:
        return f"{_FIELD} = {config.overlap.tp_chunks}: `drivetrain ops tune` chooses by the shape of each product"
    return None


def _evidence(_config: RunConfig, seen: Observation, account: Account | None) -> Evidence:
    if "ranges" in seen.missing:
        return Evidence("unknown", "the trace has no ranges, by which chunks would show")
    begun = {
        name.removeprefix(_SPAN): count.calls for name, count in seen.ranges.items() if name.startswith(_SPAN)
    }
    if begun:
        words = ", ".join(f"{count} of {kind} rows" for kind, count in sorted(begun.items()))
        return Evidence("shown", f"collectives of chunks: {words}{overlap_in_words(account)}")
    if "drivetrain/forward" in seen.ranges:
        return Evidence("absent", "forward passes were recorded, and no collective of a chunk")
    return Evidence("unknown", "no forward pass was recorded in the window")


ENTRY = Optimisation(
    name="tp_chunks",
    summary="tensor-parallel layers send in chunks, under their products",
    sources=(
        "Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition (ASPLOS)",
        "MindSpeed, computation over communication (CoC)",
    ),
    field=_FIELD,
    requested=lambda config: config.overlap.tp_chunks != _PLAIN,
    on=_on,
    off=lambda _config: {_FIELD: _PLAIN},
    # A product of fewer rows may be another kernel's, which sums in another order.
    numerics="round-off",
    treats=("communication",),
    evidence=_evidence,
    time_model=CHUNKS,
    applies=_applies,
    # One number for all products; a number for each shape is `ops tune`'s.
    knobs=(Knob(_FIELD, 2, _MOST, whole=True, scale="log", values=_numbers, refused=_owned, as_text=True),),
    requires=(
        Rule(
            "tp-chunks-need-ranks",
            (_FIELD, _TP),
            _needs_ranks,
            f"{_FIELD} other than 1 needs {_TP} of 2 or more.",
        ),
    ),
    evidence_rule=(
        f"shown: regions `{_SPAN}<kind>` in the window, one for each collective of a chunk; absent: forward passes "
        "without any"
    ),
)
