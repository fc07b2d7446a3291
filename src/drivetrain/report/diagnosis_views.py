"""A diagnosis from where somebody stands who does not know the cause: by symptom, and in the order of a search."""

from collections.abc import Callable, Iterator, Mapping

from drivetrain.diagnose import Diagnosis, Finding
from drivetrain.diagnose.causes import CAUSES, SEARCH
from drivetrain.report.diagnosis_text import diagnosis_text, first_remedy

__all__ = ["VIEWS", "communication_verdict"]

GOOD, BAD = 0.10, 0.25
"""Shares of a step in exposed communication below which it is good, and above which it is bad (SOURCES A18)."""
_SEARCH_BELOW = 30.0
"""MFU near or below which the order of search is meant (SOURCES A18)."""


def communication_verdict(share: float) -> str:
    """What a share of exposed communication is worth, in a word."""
    return "good" if share < GOOD else "bad" if share > BAD else "fair"


def _symptoms(diagnosis: Diagnosis) -> str:
    """What is seen, what it comes from here, and what to do first (SOURCES E7); causes that are here alone."""
    return "\n".join(
        [
            f"Diagnosis of {diagnosis.subject}: symptom, cause, first remedy",
            *(line for finding in _without_wholes(diagnosis) for line in _symptom(finding)),
        ]
    )


def _symptom(finding: Finding) -> Iterator[str]:
    cause = CAUSES[finding.cause]
    yield ""
    yield f"{cause.symptom}  [{cause.area}]"
    yield f"  {_cost(finding)}{finding.cause}, {finding.subject}: {finding.text}"
    yield f"  {first_remedy(finding)}"


def _without_wholes(diagnosis: Diagnosis) -> list[Finding]:
    """A class whose cause is named by another finding is no symptom of its own."""
    parts = {finding.part_of for finding in diagnosis.of("loss") if finding.part_of is not None}
    return [
        finding
        for finding in diagnosis.findings
        if finding.kind != "withheld" and not (finding.part_of is None and finding.subject in parts)
    ]


def _search(diagnosis: Diagnosis) -> str:
    """The areas in the order in which an expert looks, each with what it costs and its first finding (SOURCES A18)."""
    share = diagnosis.communication_share
    lines = [
        f"Diagnosis of {diagnosis.subject}: the order of search",
        f"exposed communication {share:.1%} of a step: {communication_verdict(share)} "
        f"(good below {GOOD:.0%}, bad above {BAD:.0%})",
    ]
    if diagnosis.mfu is None:
        lines.append(f"no MFU: {diagnosis.mfu_reason}")
    else:
        meant = "the order is meant for this" if diagnosis.mfu <= _SEARCH_BELOW else "the order still holds"
        lines.append(f"MFU {diagnosis.mfu:.1f}: {meant}")
    for number, (area, title) in enumerate(SEARCH, start=1):
        mine = [
            one for one in diagnosis.findings if CAUSES[one.cause].area == area and one.kind != "withheld"
        ]
        whole = sum(one.cost_ns or 0.0 for one in mine if one.part_of is None)
        of_step = whole / diagnosis.mean_ns if diagnosis.mean_ns else 0.0
        cost = f"{whole / 1e6:,.2f} ms, {of_step:.1%} of a step" if mine else "nothing found"
        lines += ["", f"{number}. {title}: {cost}"]
        for finding in mine:
            lines.append(f"   {_cost(finding)}{finding.cause}, {finding.subject}")
            lines.append(f"     {first_remedy(finding)}")
    return "\n".join(lines)


def _cost(finding: Finding) -> str:
    return "" if finding.cost_ns is None else f"{finding.cost_ns / 1e6:,.2f} ms: "


VIEWS: Mapping[str, Callable[[Diagnosis], str]] = {
    "losses": diagnosis_text,
    "symptoms": _symptoms,
    "search": _search,
}
"""Name of a view → its text."""
