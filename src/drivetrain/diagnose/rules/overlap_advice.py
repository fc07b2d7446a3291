"""Buckets of gradients, or chunks of tensor-parallel products, that are too few or too many to hide communication.

Both sides tell. Where the training thread stands waiting for collectives, and nothing was under way for long while it
computed, what travels starts too late: fewer bytes at a time. Where the wire was busy all along and a good part of that
is the fixed cost of a call, there are too many calls: more bytes at a time. Where neither holds, the bytes themselves
take longer than what they could hide under, and no size helps.

The value to try is where the two costs are equal: with `a` seconds a call and `b` seconds a byte, `S` bytes in pieces
of `s` leave about ``b s`` of the last piece exposed and cost ``a S / s`` for their calls; the sum is least at
``s = sqrt(S a / b)``. Without `a` and `b` (all pieces of one size) it is half, or twice, the present one.

What is lost is no more than what another size could bring: where pieces are too large, the time in which nothing
travelled though something could have; where they are too small, what calls cost whatever their size.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from drivetrain.catalogue import catalogue
from drivetrain.catalogue.entry import Knob, Optimisation
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding, Remedy
from drivetrain.diagnose.moving import moved_s
from drivetrain.diagnose.remedies import remedies_for
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE", "Pieces", "Verdict", "judge"]

_FIXED_SHARE = 0.2
"""Share of the time under way above which the fixed costs of calls are worth saving."""
_MOST_CHUNKS = 32
"""As many as `ops tune` tries."""
_BUCKET_CAUSES = {
    "too_large": "communication.buckets_too_large",
    "too_small": "communication.buckets_too_small",
    "too_much": "communication.too_much",
}
_CHUNK_CAUSES = {
    "too_large": "communication.chunks_too_few",
    "too_small": "communication.chunks_too_many",
    "too_much": "communication.too_much",
}
_ROOM = 0.5
"""Part of what is waited for that must have had room under computation for size to be the cause."""


@dataclass(frozen=True)
class Pieces:
    """What travelled in pieces, in a mean step.

    Attributes:
        calls, bytes: of a step.
        wire_s: under way.
        exposed_s: the training thread stood waiting, and all ranks had come.
        room_s: it did not wait, and nothing was under way where something could have been.
        fixed_s_per_call, bytes_per_s: the line through sizes and times; None where there is none.
    """

    calls: float
    bytes: float
    wire_s: float
    exposed_s: float
    room_s: float
    fixed_s_per_call: float | None
    bytes_per_s: float | None

    @property
    def fixed_share(self) -> float | None:
        """Of the time under way, what calls cost whatever their size; None where unknown."""
        if self.fixed_s_per_call is None or not self.wire_s:
            return None
        return min(1.0, self.calls * self.fixed_s_per_call / self.wire_s)

    @property
    def best_bytes(self) -> float | None:
        """Bytes of a piece at which both costs are equal; None where the line is unknown."""
        if self.fixed_s_per_call is None or self.bytes_per_s is None:
            return None
        return math.sqrt(self.bytes * self.fixed_s_per_call * self.bytes_per_s)


@dataclass(frozen=True)
class Verdict:
    """Why communication is not hidden.

    Attributes:
        kind: ``too_large``, ``too_small``, or ``too_much`` bytes for what they could hide under.
        factor: by which to multiply the size of a piece; 1 for ``too_much``.
    """

    kind: str
    factor: float


def judge(pieces: Pieces) -> Verdict:
    """Which of the two sides was idle, and what size to try."""
    present = pieces.bytes / pieces.calls
    best = pieces.best_bytes
    if pieces.room_s >= _ROOM * pieces.exposed_s:
        smaller = best is not None and best < present
        factor = max(0.25, best / present) if smaller and best is not None else 0.5
        return Verdict("too_large", factor)
    if (pieces.fixed_share or 0.0) >= _FIXED_SHARE:
        larger = best is not None and best > present
        factor = min(4.0, best / present) if larger and best is not None else 2.0
        return Verdict("too_small", factor)
    return Verdict("too_much", 1.0)


def _detect(facts: Facts) -> Iterator[Finding]:
    found = facts.communication
    if found is None or facts.config is None or found["exposed_s"] is None or not found["step_s"]:
        return
    buckets = _buckets(facts, found)
    if buckets is not None:
        yield _of_buckets(facts, found, buckets)
    chunks = _chunks(facts, found)
    if chunks is not None:
        yield from _of_chunks(facts, found, chunks)


def _buckets(facts: Facts, found: Mapping[str, Any]) -> Pieces | None:
    """The reductions of gradients that a bucket's size decides on."""
    assert facts.config is not None
    stage = facts.config.parallelism.zero_stage
    if stage == 3 or facts.config.parallelism.pipeline_model_parallel_size > 1:
        return None
    group = "dp_shard" if stage == 2 else "dp"
    kind = "reduce_scatter" if stage == 2 else "all_reduce"
    return _pieces(facts, found, group, kind, "backward_idle_s")


def _chunks(facts: Facts, found: Mapping[str, Any]) -> Pieces | None:
    group = found["groups"].get("tp")
    kinds = {} if group is None else group["kinds"]
    largest = max(kinds, key=lambda kind: kinds[kind]["exposed_s"], default=None)
    return None if largest is None else _pieces(facts, found, "tp", largest, "idle_s")


def _pieces(facts: Facts, found: Mapping[str, Any], group: str, kind: str, room: str) -> Pieces | None:
    figures = found["groups"].get(group, {})
    one = figures.get("kinds", {}).get(kind)
    if one is None or not one["calls"] or not one["bytes"] or figures[room] is None:
        return None
    return Pieces(
        calls=one["calls"],
        bytes=one["bytes"],
        wire_s=one["wire_s"],
        exposed_s=moved_s(facts, group, kind, one["exposed_s"]),
        room_s=figures[room],
        fixed_s_per_call=one["fixed_s_per_call"],
        bytes_per_s=one["bytes_per_s"],
    )


def _of_buckets(facts: Facts, found: Mapping[str, Any], pieces: Pieces) -> Finding:
    assert facts.config is not None
    entry = _entry("ddp_bucket")
    verdict = judge(pieces)
    alone = pieces.calls <= 1
    if alone and verdict.kind == "too_small":
        verdict = Verdict("too_much", 1.0)  # All that there is travels at once: nothing is larger.
    present = facts.config.overlap.bucket_size_mb
    # What travels at a time, not the limit: a bucket may exceed it by its last parameter, or hold all there is.
    sent_mb = pieces.bytes / pieces.calls / 1e6
    value = _value(entry.knobs[0], min(present, sent_mb) if present else sent_mb, verdict.factor)
    words = {
        "too_large": "buckets of gradients are too large: the last is waited for, and nothing travelled for long "
        "while backward computed",
        "too_small": "buckets of gradients are too small: what calls cost whatever their size fills the wire",
        "too_much": "gradients take longer to travel than backward takes to compute: no size of buckets hides them",
    }
    return _finding(
        facts,
        found,
        "buckets of gradients",
        "communication.serial" if alone and verdict.kind == "too_large" else _BUCKET_CAUSES[verdict.kind],
        words[verdict.kind],
        pieces,
        verdict,
        entry,
        {entry.field: value},
    )


def _of_chunks(facts: Facts, found: Mapping[str, Any], pieces: Pieces) -> Iterator[Finding]:
    entry = next((one for one in catalogue() if one.name == "tp_chunks"), None)
    if entry is None or facts.config is None:
        return
    present = facts.config.overlap.wanted_tp_chunks
    if present is None:
        return  # Chosen by shape from a tuned file: not one number that could be another.
    # The last chunk of each product is exposed: sizes are judged product by product.
    verdict = judge(_share_of(pieces, present / pieces.calls))
    # k chunks have 1/k of the bytes each; powers of two, as those that are tuned.
    wanted = 2 ** round(math.log2(max(1.0, present / verdict.factor)))
    if verdict.kind == "too_large":
        wanted = max(wanted, 2 * present)
    elif verdict.kind == "too_small":
        wanted = min(wanted, present // 2)
    value = int(min(max(wanted, 1), _MOST_CHUNKS))
    words = {
        "too_large": "collectives of tensor parallelism travel in too few chunks: products stand while they do",
        "too_small": "collectives of tensor parallelism travel in too many chunks: calls cost more than they hide",
        "too_much": "collectives of tensor parallelism take longer than the products they could hide under",
    }
    yield _finding(
        facts,
        found,
        "chunks of tensor parallelism",
        _CHUNK_CAUSES[verdict.kind],
        words[verdict.kind],
        pieces,
        verdict,
        entry,
        {entry.field: str(value)} if value != present else {},
    )


def _lost_s(pieces: Pieces, verdict: Verdict) -> float:
    """Of what was waited for, the part that the cause makes."""
    if verdict.kind == "too_large":
        return min(pieces.exposed_s, pieces.room_s)
    if verdict.kind == "too_small" and pieces.fixed_s_per_call is not None:
        return min(pieces.exposed_s, pieces.calls * pieces.fixed_s_per_call)
    return pieces.exposed_s


def _share_of(pieces: Pieces, share: float) -> Pieces:
    """A part of what travelled, at the same cost of a call and of a byte."""
    return replace(
        pieces,
        calls=share * pieces.calls,
        bytes=share * pieces.bytes,
        wire_s=share * pieces.wire_s,
        exposed_s=share * pieces.exposed_s,
        room_s=share * pieces.room_s,
    )


def _entry(name: str) -> Optimisation:
    return next(one for one in catalogue() if one.name == name)


def _value(knob: Knob, present: float, factor: float) -> float:
    """Two figures are enough for something to be tried."""
    return float(f"{min(max(present * factor, knob.low), knob.high):.2g}")


def _finding(
    facts: Facts,
    found: Mapping[str, Any],
    subject: str,
    cause: str,
    text: str,
    pieces: Pieces,
    verdict: Verdict,
    entry: Optimisation,
    change: Mapping[str, Any],
) -> Finding:
    # As it was without the profiler, which makes no wire slower.
    cost = 1e9 * _lost_s(pieces, verdict)
    share = facts.share_of(cost)
    remedies: tuple[Remedy, ...]
    none: str | None
    if verdict.kind == "too_much" or not change:
        remedies, none, _ = remedies_for(facts, ["communication"], cost)
    else:
        whole = facts.mean.window_ns
        ratio = whole / (whole - cost) if 0 <= cost < whole else None
        note = "the size to try; what it brings a trial tells, and the ladder searches it"
        remedies = (Remedy(entry.name, entry.field, change, entry.numerics, ratio, note),)
        none = None
    return Finding(
        rule="overlap_advice",
        kind="loss",
        subject=subject,
        cause=cause,
        text=text,
        confidence="medium",
        cost_ns=cost,
        points=facts.points_of(cost),
        share=share,
        evidence=tuple(_evidence(found, pieces)),
        remedies=remedies,
        no_remedy=none,
        part_of="communication",
        unknown=facts.no_points,
    )


def _evidence(found: Mapping[str, Any], pieces: Pieces) -> Iterator[Evidence]:
    source = f"collectives of {found['steps']} steps without the profiler"
    yield Evidence(
        f"{pieces.calls:.3g} a step of {pieces.bytes / pieces.calls / 1e6:.3g} MB each, under way for "
        f"{pieces.wire_s * 1e3:,.1f} ms of {found['step_s'] * 1e3:,.1f} ms",
        source,
    )
    yield Evidence(
        f"computation stood waiting for their bytes for {pieces.exposed_s * 1e3:,.1f} ms; none was under way for "
        f"{pieces.room_s * 1e3:,.1f} ms in which it did not wait",
        source,
    )
    if pieces.fixed_s_per_call is not None and pieces.bytes_per_s is not None:
        yield Evidence(
            f"a call costs {pieces.fixed_s_per_call * 1e3:.3g} ms whatever its size, bytes move at "
            f"{pieces.bytes_per_s / 1e9:.3g} GB/s",
            source,
        )


RULE = Rule(
    "overlap_advice",
    ("communication.serial", *dict.fromkeys((*_BUCKET_CAUSES.values(), *_CHUNK_CAUSES.values()))),
    ("configuration",),
    _detect,
)
