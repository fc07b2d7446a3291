"""Fallbacks by expectation: what a job was meant to run, held against what its records show.

An operator that falls back does so in silence: its result is right, and only the names of the kernels tell. So the
words ``flash``, ``bf16``, ``fused-optimizer``, … are checked, and where the records show something else, a finding says
what ran instead, how long, and how large a part that was. Times are sums of durations of the recorded steps.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from drivetrain.errors import DrivetrainError
from drivetrain.measure.optimisation import Count, Observation
from drivetrain.trace.classes import CLASS_INDEX
from drivetrain.trace.classify import Classification
from drivetrain.trace.health import Finding, Severity
from drivetrain.trace.observe import observe, observed_rows
from drivetrain.trace.steps import Steps, find_steps
from drivetrain.trace.table import EventTable, Trace

if TYPE_CHECKING:
    from drivetrain.config import RunConfig

__all__ = ["EXPECTATIONS", "checked_words", "expected_findings", "expected_of", "merged_findings"]

LEAST_SHARE = 0.05
"""Share of the time in question below which something else beside what was expected is not worth a word."""
_NAMED = 3


@dataclass(frozen=True, eq=False)
class _Records:
    """What a check reads."""

    events: EventTable
    classes: Classification
    rows: NDArray[np.int64]
    """Rows of the steps."""
    seen: Observation

    @property
    def where(self) -> str:
        """What the records are of, in words."""
        steps = self.seen.num_steps
        return "in the trace" if not steps else f"in {steps} step{'s' if steps > 1 else ''}"

    def time(self, ns: int) -> str:
        """A sum of durations: a step's where there are steps."""
        steps = self.seen.num_steps
        return f"{ns / steps / 1e6:,.3f} ms a step" if steps else f"{ns / 1e6:,.3f} ms"

    def rows_of(self, *names: str) -> NDArray[np.int64]:
        """Rows of some classes of work."""
        wanted = np.isin(self.classes.kind[self.rows], [CLASS_INDEX[name] for name in names])
        return self.rows[wanted]

    def longest(self, rows: NDArray[np.int64]) -> list[str]:
        """The names with the most time among some rows."""
        by_name: Counter[int] = Counter()
        for name, ns in zip(
            self.events.name[rows].tolist(), self.events.duration_ns[rows].tolist(), strict=True
        ):
            by_name[name] += ns
        return [self.events.names[name] for name, _ in by_name.most_common(_NAMED)]


_Check = Callable[[_Records], tuple[str, str] | None]
"""Returns what became of the expectation (``absent``, ``partly``, ``unknown``) and the sentence that says it; None
where the records show what was expected."""


# ---- one check a word -------------------------------------------------------------------------------------------


def _shares(parts: Mapping[str, Count], records: _Records, of: str) -> str:
    total = sum(count.ns for count in parts.values())
    ordered = sorted(parts.items(), key=lambda item: -item[1].ns)
    return ", ".join(
        f"{name} {records.time(count.ns)} ({count.ns / total if total else 0:.0%} of {of})"
        for name, count in ordered
    )


def _among(
    wanted: tuple[str, ...], counts: Mapping[str, Count], records: _Records, *, word: str, of: str, none: str
) -> tuple[str, str] | None:
    """Whether the time of some kind of work went to the wanted sort of it."""
    known = {name: count for name, count in counts.items() if name != "unknown"}
    if not known:
        return "unknown", none
    total = sum(count.ns for count in known.values())
    others = {name: count for name, count in known.items() if name not in wanted}
    other_ns = sum(count.ns for count in others.values())
    if len(others) == len(known):
        return "absent", f"{word} was expected and did not run {records.where}: {_shares(known, records, of)}"
    if total and other_ns / total >= LEAST_SHARE:
        return (
            "partly",
            f"{word} was expected and ran only in part {records.where}: {_shares(known, records, of)}",
        )
    return None


def _flash(records: _Records) -> tuple[str, str] | None:
    if not records.seen.attention:
        if {"operators", "kernels"} <= records.seen.missing:
            return "unknown", "flash attention was expected, but neither operators nor kernels were recorded"
        return (
            "absent",
            f"flash attention was expected, and no attention of any kind was recorded {records.where}",
        )
    return _among(
        ("flash", "cudnn"),
        records.seen.attention,
        records,
        word="flash attention",
        of="attention time",
        none="flash attention was expected; attention ran, but no name tells by which implementation",
    )


def _dtype(dtype: str, records: _Records) -> tuple[str, str] | None:
    why = "record_shapes was off" if "shapes" in records.seen.missing else "no matrix product was recorded"
    if records.seen.matmul_dtypes and "shapes" not in records.seen.missing:
        why = "neither the names of their kernels nor their operators tell"
    return _among(
        (dtype,),
        records.seen.matmul_dtypes,
        records,
        word=f"{dtype} in matrix products",
        of="matrix-product time",
        none=f"{dtype} was expected, but no dtype of a matrix product is known: {why}",
    )


_FUSED_UPDATE = re.compile(
    r"_fused_(adam|sgd|adagrad|lamb|lion)|Fused(Adam|SGD|LAMB|Adagrad|Lion)|fused_adam"
    r"|multi_tensor_(adam|sgd|lamb|adagrad)|(Adam|SGD|LAMB|Adagrad)(W|Stage\d)?Functor"
)
_UPDATE_RANGE = re.compile(r"Optimizer\.step#|drivetrain/optimizer$")


def _fused_optimizer(records: _Records) -> tuple[str, str] | None:
    seen = records.seen
    if any(_FUSED_UPDATE.search(name) for name in (*seen.operators, *seen.kernels)):
        return None
    rows = records.rows_of("compute.optimizer")
    if len(rows) == 0:
        # A range without work in it: the update may have been merged into a compiled graph.
        updates = any(_UPDATE_RANGE.match(name) for name in seen.ranges)
        what = "no work was recorded in the updates" if updates else "no update was recorded"
        return "unknown", f"a fused optimizer was expected, but {what} {records.where}"
    names = records.longest(rows)
    if all(name.startswith("triton_") for name in names):
        return None  # A compiler has fused it.
    ns = int(records.events.duration_ns[rows].sum())
    how = (
        "operators over lists of tensors"
        if any("foreach" in name for name in seen.operators)
        else "operators"
    )
    named = ", ".join(dict.fromkeys(_short(name) for name in names))
    return (
        "absent",
        f"a fused optimizer was expected and did not run {records.where}: the update took {len(rows):,} {how} or "
        f"kernels and {records.time(ns)}, most of it in {named}",
    )


_COMPILED = re.compile(r"Torch-Compiled Region|CompiledFxGraph|CompiledFunction")
_GENERATED = re.compile(r"triton_(poi|per|red|tem|for|mm|unk)_")
_SMALL_WORK = ("compute.elementwise", "compute.activation", "compute.norm", "compute.copy_cast")


def _compile(records: _Records) -> tuple[str, str] | None:
    seen = records.seen
    if any(_COMPILED.search(name) for name in (*seen.ranges, *seen.operators)):
        return None
    if any(_GENERATED.match(name) for name in seen.kernels):
        return None
    if "operators" in seen.missing and "kernels" in seen.missing:
        return "unknown", "compiled code was expected, but neither operators nor kernels were recorded"
    work = np.flatnonzero(records.classes.is_compute()[records.rows])
    whole = int(records.events.duration_ns[records.rows[work]].sum())
    rows = records.rows_of(*_SMALL_WORK)
    ns = int(records.events.duration_ns[rows].sum())
    share = ns / whole if whole else 0.0
    return (
        "absent",
        f"compiled code was expected and none ran {records.where}: {len(rows):,} element-wise operators, norms, "
        f"activations and casts ran one by one, {records.time(ns)} ({share:.0%} of compute)",
    )


def _short(name: str) -> str:
    return name if len(name) <= 60 else f"{name[:59]}…"


EXPECTATIONS: Mapping[str, _Check] = {
    "flash": _flash,
    **{dtype: partial(_dtype, dtype) for dtype in ("bf16", "fp16", "fp8", "tf32")},
    "fused-optimizer": _fused_optimizer,
    "compile": _compile,
}
"""What may be expected → its check."""


# ---- words to findings ------------------------------------------------------------------------------------------


def checked_words(words: Iterable[str]) -> tuple[str, ...]:
    """The words, each once.

    Raises:
        DrivetrainError: one of them is not known; the message names the nearest and all legal ones.
    """
    for word in words:
        if word not in EXPECTATIONS:
            from drivetrain.config.suggest import nearest  # Only a wrong word pays for the schema.

            close = nearest(word, tuple(EXPECTATIONS))
            hint = f"did you mean {close}? " if close is not None else ""
            raise DrivetrainError(f"--expect {word!r} is not known; {hint}Legal: {', '.join(EXPECTATIONS)}")
    return tuple(dict.fromkeys(words))


def expected_of(config: "RunConfig") -> tuple[str, ...]:
    """What a run of ours is meant to show, by its configuration."""
    words = {
        "bf16": config.precision.params_dtype == "bf16",
        "fused-optimizer": config.optimizer.fused,
        "compile": config.fusion.compile,
    }
    return tuple(word for word, is_meant in words.items() if is_meant)


def expected_findings(
    trace: Trace, classes: Classification, words: Sequence[str], steps: Steps | None = None
) -> tuple[Finding, ...]:
    """What of the expected does not show in a trace. ``expected_<word>_absent`` and ``_partly`` (warnings),
    ``_unknown`` (a note: the records do not tell); nothing of a word that is fulfilled.

    Args:
        trace: one rank's.
        classes: its classification.
        words: of :data:`EXPECTATIONS`.
        steps: its steps; found here where None.
    """
    if not words:
        return ()
    steps = find_steps(trace.events) if steps is None else steps
    rows = observed_rows(trace.events, steps)
    records = _Records(trace.events, classes, rows, observe(trace, classes, steps))
    findings = []
    for word in words:
        answer = EXPECTATIONS[word](records)
        if answer is not None:
            kind, message = answer
            severity: Severity = "note" if kind == "unknown" else "warning"
            name = word.replace("-", "_")
            findings.append(Finding(f"expected_{name}_{kind}", severity, message, 1))
    return tuple(findings)


def merged_findings(by_rank: Sequence[tuple[int | None, Sequence[Finding]]]) -> tuple[Finding, ...]:
    """Findings of several ranks: one of all ranks is said once, with the first one's figures.

    Args:
        by_rank: rank (None where unknown) and its findings.
    """
    ranks_of: dict[str, list[int | None]] = {}
    first: dict[str, Finding] = {}
    for rank, findings in by_rank:
        for finding in findings:
            ranks_of.setdefault(finding.id, []).append(rank)
            first.setdefault(finding.id, finding)
    merged = []
    for name, ranks in ranks_of.items():
        finding = replace(first[name], count=len(ranks))
        if len(by_rank) > 1:
            whose = "every rank" if len(ranks) == len(by_rank) else f"ranks {', '.join(map(_rank, ranks))}"
            figures = (
                f"{whose}, figures of rank {_rank(ranks[0])}" if len(ranks) > 1 else f"rank {_rank(ranks[0])}"
            )
            finding = replace(finding, message=f"{figures}: {finding.message}")
        merged.append(finding)
    return tuple(merged)


def _rank(rank: int | None) -> str:
    return "unknown" if rank is None else str(rank)
