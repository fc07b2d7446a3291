"""A diagnosis for a terminal: what is not in effect, the losses with the largest first, what cannot be said."""

from collections.abc import Iterator, Sequence

from drivetrain.diagnose import LEAST_SHARE, Diagnosis, Finding, Remedy
from drivetrain.diagnose.causes import CAUSES
from drivetrain.diagnose.published import Nearest
from drivetrain.diagnose.remedies import UNKNOWN_SETTINGS

__all__ = ["diagnosis_text", "findings_lines", "first_remedy"]

_MOST = 10
_DIFFERENCES = 6
_REMEDIES = 3
_INDENT = " " * 31


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """The whole text."""
    return "\n".join([f"Diagnosis of {diagnosis.subject}", *_head(diagnosis), "", *findings_lines(diagnosis)])


def findings_lines(diagnosis: Diagnosis) -> list[str]:
    """All findings, the nearest published run, and how much was not looked for."""
    lines: list[str] = []
    for title, kind in (
        ("asked for, and not in effect", "not_in_effect"),
        ("set so that it costs time", "setting"),
        ("figures that cannot be relied on", "withheld"),
    ):
        found = [finding for finding in diagnosis.findings if finding.kind == kind]
        if found:
            lines.append(title)
        for finding in found:
            lines.append(f"  {finding.subject}: {finding.text}")
            lines += [f"      {one.text} ({one.source})" for one in finding.evidence]
            if kind == "setting":
                lines.append(f"      {first_remedy(finding)}")
        if found:
            lines.append("")
    lines += [*_losses(diagnosis), "", *_nearest(diagnosis.nearest)]
    if diagnosis.not_asked:
        lines += [
            "",
            f"not looked for, {len(diagnosis.not_asked)} rules: the records lack what they need (--json says what)",
        ]
    return lines


def first_remedy(finding: Finding) -> str:
    """What to do about a finding first, in one line."""
    if finding.remedies:
        return f"try {_remedy(finding.remedies[0])}"
    return finding.no_remedy or CAUSES[finding.cause].advice


def _nearest(nearest: Nearest) -> Iterator[str]:
    run = nearest.run
    mfu = "" if run.mfu is None else f", MFU {run.mfu:.1f} ({run.mfu_rule})"
    if not nearest.comparable:
        yield "nearest published run: none is near this job, or too little is known of it (--json has those far away)"
        return
    yield f"nearest published run: {run.name}{mfu}"
    yield f"  {run.source}; compared by {', '.join(nearest.compared) or 'nothing'}"
    if nearest.gap is None:
        yield f"  no gap: {nearest.why_no_gap}"
    else:
        yield (
            f"  {nearest.gap:+.1f} points against {nearest.mfu:.1f} here; what can be counted explains "
            f"{nearest.explained:+.1f}"
        )
    for one in nearest.differences[:_DIFFERENCES]:
        points = "" if one.mfu_points is None else f", {one.mfu_points:+.1f} points"
        yield f"    {one.what}: {_figure(one.ours)} here, {_figure(one.theirs)} there{points}"
    if nearest.then is not None and nearest.then.change:
        reached = "" if nearest.then.mfu is None else f", to MFU {nearest.then.mfu:g}"
        yield f"  what was done there next: {nearest.then.change}{reached}"


def _figure(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _head(diagnosis: Diagnosis) -> Iterator[str]:
    unit = "ms a step" if diagnosis.is_step else "ms, no steps found"
    mfu = "" if diagnosis.mfu is None else f", MFU {diagnosis.mfu:.1f}"
    yield f"{diagnosis.window}: {diagnosis.mean_ns / 1e6:,.1f} {unit}{mfu}"
    if diagnosis.mfu_reason is not None:
        yield diagnosis.mfu_reason


def _losses(diagnosis: Diagnosis) -> Iterator[str]:
    losses = diagnosis.of("loss")
    if not losses:
        yield f"no loss of {LEAST_SHARE:.0%} of a step or more was found"
    else:
        yield f"losses, largest first; below {LEAST_SHARE:.0%} of a step nothing is claimed"
        # The columns of the rows below.
        yield f"  {'ms':>9} {'points':>8} {'share':>7}"
    for finding in losses[:_MOST]:
        yield from _loss(finding)
    if len(losses) > _MOST:
        yield f"  and {len(losses) - _MOST} more, all in --json"
    yield from _said_once(losses)
    whole = [finding for finding in diagnosis.small if finding.part_of is None]
    if whole:
        share = sum(finding.share or 0.0 for finding in whole)
        yield f"  {len(whole)} smaller classes, {share:.1%} together"


def _said_once(losses: Sequence[Finding]) -> Iterator[str]:
    """What holds for several rows."""
    hints = dict.fromkeys(one.text for finding in losses for one in finding.evidence if one.source == "hint")
    yield from (f"  {hint}" for hint in hints)
    if any(remedy.note == UNKNOWN_SETTINGS for finding in losses for remedy in finding.remedies):
        yield "  the settings of these traces are unknown: what is proposed may be in use already"


def _loss(finding: Finding) -> Iterator[str]:
    cost = "?" if finding.cost_ns is None else f"{finding.cost_ns / 1e6:,.2f}"
    points = "-" if finding.points is None else f"{finding.points:.1f}"
    share = "?" if finding.share is None else f"{finding.share:.1%}"
    part = "" if finding.part_of is None else f" (part of {finding.part_of})"
    yield f"  {cost:>9} {points:>8} {share:>7}  {finding.subject}: {finding.text}{part}"
    if finding.rule != "account_classes":
        # A class's own evidence is the row itself; a hint is said once, below.
        yield from (f"{_INDENT}{one.text} ({one.source})" for one in finding.evidence if one.source != "hint")
    if finding.remedies:
        more = len(finding.remedies) - _REMEDIES
        rest = f", and {more} more in --json" if more > 0 else ""
        first, *others = finding.remedies[:_REMEDIES]
        # A finding's remedies have one bound: it is said once.
        said = [_remedy(first), *(_remedy(one, with_bound=one.ratio != first.ratio) for one in others)]
        yield f"{_INDENT}try {', '.join(said)}{rest}"
    elif finding.part_of is None and finding.no_remedy is not None:
        yield f"{_INDENT}{finding.no_remedy}"


def _remedy(remedy: Remedy, *, with_bound: bool = True) -> str:
    changes = (
        remedy.field
        if remedy.change is None
        else " ".join(f"{leaf}={_written(value)}" for leaf, value in remedy.change.items())
    )
    bound = "" if remedy.ratio is None or not with_bound else f", at most {remedy.ratio:.2f}x"
    expected = "" if remedy.estimate in (None, remedy.ratio) else f", about {remedy.estimate:.2f}x expected"
    note = "" if remedy.note in (None, UNKNOWN_SETTINGS) else f", {remedy.note}"
    if remedy.name is None:
        more = (bound + expected + note).removeprefix(", ")
        return f"{changes} ({more})" if more else changes
    return f"{remedy.name} ({changes}{bound}{expected}{note})"


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
