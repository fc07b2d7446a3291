"""What a run's own records say of its operators: who served, where another backend was asked for."""

from collections.abc import Sequence

from drivetrain.config.fusion import operator_fields
from drivetrain.measure.optimisation import OptimisationRecord
from drivetrain.trace.health import Finding

__all__ = ["operator_findings"]


def operator_findings(records: Sequence[OptimisationRecord]) -> tuple[Finding, ...]:
    """A finding of the run's account for each operator that was not served as it was asked for.

    ``operator_fallback`` (a warning): calls were served by another backend than the one named. ``operator_unused``
    (a warning): it is not in effect for another reason. ``operator_choice`` (a note): ``auto`` could not take what
    was tuned.

    Args:
        records: the newest ones of the run; others than operators' are passed over.
    """
    fields = {f"fusion.{name}" for name in operator_fields()}
    found = []
    for record in records:
        if record.field not in fields or not record.requested:
            continue
        others = record.served_otherwise
        reason = f": {record.reason}" if record.reason is not None else ""
        if others:
            by = ", ".join(f"{calls:,} by {backend}" for backend, calls in sorted(others.items()))
            message = f"{record.asked} was asked for; of {sum(record.served.values()):,} calls {by}{reason}"
            found.append(Finding("operator_fallback", "warning", message, sum(others.values())))
        elif record.without_effect:
            why = reason or (f": {record.evidence.why}" if record.evidence is not None else "")
            found.append(Finding("operator_unused", "warning", f"{record.asked} is not in effect{why}", 1))
        elif reason:
            found.append(Finding("operator_choice", "note", f"{record.asked}{reason}", 1))
    return tuple(found)
