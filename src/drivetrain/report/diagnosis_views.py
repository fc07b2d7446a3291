"""A diagnosis from where somebody stands who does not know the cause: by symptom, and in the order of a search."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from drivetrain.diagnose import Diagnosis, Finding
from drivetrain.diagnose.causes import CAUSES, SEARCH
from drivetrain.diagnose.charts import BAD, GOOD, communication_verdict
from drivetrain.diagnose.diagnosis import EXPLAINS
from drivetrain.diagnose.picture import Picture
from drivetrain.report.charts_text import charts_lines
from drivetrain.report.diagnosis_text import findings_lines, first_remedy
from drivetrain.report.first_screen import screen_lines
from drivetrain.report.styled import Line, line

__all__ = ["VIEWS", "communication_verdict", "search_text", "symptoms_text"]

_SEARCH_BELOW = 30.0
"""MFU near or below which the order of search is meant (SOURCES A18)."""


def symptoms_text(diagnosis: Diagnosis) -> str:
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
    """A class that another finding explains, by half of its cost or more, is no symptom of its own."""
    explained = {
        finding.part_of: finding.cost_ns
        for finding in sorted(diagnosis.of("loss"), key=lambda one: one.cost_ns or 0.0)
        if finding.part_of is not None and finding.cost_ns is not None
    }

    def is_told(whole: Finding) -> bool:
        cost = whole.cost_ns
        return (
            whole.part_of is None
            and cost is not None
            and explained.get(whole.subject, 0.0) >= EXPLAINS * cost
        )

    return [one for one in diagnosis.findings if one.kind != "withheld" and not is_told(one)]


def search_text(diagnosis: Diagnosis) -> str:
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
        lines += ["", f"{number}. {title}: {_together(diagnosis, mine)}"]
        for finding in mine:
            lines.append(f"   {_cost(finding)}{finding.cause}, {finding.subject}")
            lines.append(f"     {first_remedy(finding)}")
    return "\n".join(lines)


def _together(diagnosis: Diagnosis, findings: Sequence[Finding]) -> str:
    """What an area costs, no time counted twice: of the parts of a loss elsewhere the largest alone."""
    if not findings:
        return "nothing found"
    wholes = [one for one in findings if one.part_of is None and one.cost_ns is not None]
    parts: dict[str, float] = {}
    for one in findings:
        if one.part_of is None or one.cost_ns is None:
            continue
        told = [name for whole in wholes for name in whole.subject.split(" and ")]
        if not any(f"{name}.".startswith(f"{one.part_of}.") for name in told):
            parts[one.part_of] = max(parts.get(one.part_of, 0.0), one.cost_ns)
    known = sum(one.cost_ns or 0.0 for one in wholes) + sum(parts.values())
    of_step = known / diagnosis.mean_ns if diagnosis.mean_ns else 0.0
    words = f"{known / 1e6:,.2f} ms, {of_step:.1%} of a step" if wholes or parts else ""
    unknown = sum(one.cost_ns is None for one in findings)
    if unknown:
        words += f"{', and ' if words else ''}{unknown} of unknown cost"
    return words


def _cost(finding: Finding) -> str:
    return "" if finding.cost_ns is None else f"{finding.cost_ns / 1e6:,.2f} ms: "


def _text_lines(make: Callable[[Diagnosis], str]) -> Callable[[Picture, int], list[Line]]:
    """A view that is plain text; its first line is its title."""

    def lines(picture: Picture, _width: int) -> list[Line]:
        first, *rest = make(picture.diagnosis).split("\n")
        return [line(first, "bold"), *map(line, rest)]

    return lines


def _losses(picture: Picture, width: int) -> list[Line]:
    """What to do next on the first screen, below it all losses."""
    return [*screen_lines(picture, width), (), *map(line, findings_lines(picture.diagnosis))]


def _charts(picture: Picture, width: int) -> list[Line]:
    return [
        line(f"Diagnosis of {picture.diagnosis.subject}: three charts", "bold"),
        (),
        *charts_lines(picture.charts, width),
    ]


VIEWS: Mapping[str, Callable[[Picture, int], list[Line]]] = {
    "losses": _losses,
    "symptoms": _text_lines(symptoms_text),
    "search": _text_lines(search_text),
    "charts": _charts,
}
"""Name of a view → its lines, for a number of columns."""
