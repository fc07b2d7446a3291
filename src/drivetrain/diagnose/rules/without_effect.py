"""Optimisations that were requested and are not in effect, or operators served in part by others than was asked."""

from collections.abc import Iterator

from drivetrain.catalogue import catalogue
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.remedies import treats
from drivetrain.diagnose.rule import Rule
from drivetrain.measure.optimisation import OptimisationRecord

__all__ = ["RULE"]


def _detect(facts: Facts) -> Iterator[Finding]:
    for record in facts.records:
        if record.without_effect or (record.requested and record.served_otherwise):
            yield _finding(facts, record)


def _finding(facts: Facts, record: OptimisationRecord) -> Finding:
    value = str(record.value).lower() if isinstance(record.value, bool) else record.value
    what = "does not show in the profiled steps" if record.active else "is not in effect"
    if record.served_otherwise:
        others = ", ".join(f"{calls:,} by {name}" for name, calls in sorted(record.served_otherwise.items()))
        what = f"did not serve all calls: of {sum(record.served.values()):,} {others}"
    evidence = []
    if record.reason is not None:
        evidence.append(Evidence(record.reason, "optimisation record"))
    if record.evidence is not None:
        evidence.append(Evidence(f"{record.evidence.kind}: {record.evidence.why}", "profiled window"))
    treated = _treated_ns(facts, record.name)
    if treated:
        text = f"what it treats takes {treated / 1e6:.3f} ms of {facts.mean.window_ns / 1e6:.3f} ms"
        evidence.append(Evidence(text, "account"))
    return Finding(
        rule="without_effect",
        kind="not_in_effect",
        subject=record.name,
        cause="optimisation.not_in_effect",
        text=f"{record.field} = {value} was requested and {what}",
        evidence=tuple(evidence),
        unknown={
            "cost_ns": "what it would have saved was not measured",
            "points": "what it would have saved was not measured",
        },
    )


def _treated_ns(facts: Facts, name: str) -> float:
    entries = [entry for entry in catalogue() if entry.name == name]
    return sum(ns for one, ns in facts.mean.classes.items() if any(treats(entry, one) for entry in entries))


RULE = Rule("without_effect", ("optimisation.not_in_effect",), ("configuration",), _detect)
