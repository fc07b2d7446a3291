"""The first screen of a diagnosis: the verdict, where the points went, the one thing to do next, and how sure it is.

The same parts serve the terminal (``screen_lines``) and the HTML pages (``screen_blocks``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from drivetrain.diagnose import Diagnosis, Finding
from drivetrain.diagnose.next_step import NextStep
from drivetrain.diagnose.picture import Picture
from drivetrain.measure.waterfall import Waterfall
from drivetrain.report.blocks import Block, Cell, Facts, Paragraph, Tone
from drivetrain.report.memory_text import bytes_words
from drivetrain.report.palette import colour_of, group_of
from drivetrain.report.styled import Line, Span, label_lines, line

__all__ = ["Share", "points_of", "screen_blocks", "screen_lines", "verdict"]

_SURE: Mapping[str, str] = {
    "high": "high: the records hold this time itself",
    "medium": "medium: computed from recorded times",
    "low": "low: an upper bound, or read from names and shapes",
}
_GATES: Mapping[str, str] = {
    "exact": "trains the same to the bit",
    "round-off": "trains the same but for rounding",
    "statistical": "changes training: the loss must be compared",
}
_INDENT = 10
_BAR = 60
_MOST = 6
_SMALL = 0.5
"""Parts of a hundred below which groups are joined."""


@dataclass(frozen=True)
class Share:
    """One part of the hundred."""

    name: str
    points: float
    colour: str


def points_of(made: Waterfall) -> list[Share]:
    """The bars of a waterfall by group: MFU first, then the losses, the largest first; the smallest joined."""
    sums: dict[str, float] = {}
    colours: dict[str, str] = {}
    for bar in made.bars:
        name = _group(bar.kind, bar.class_name, bar.name)
        sums[name] = sums.get(name, 0.0) + bar.points
        colours.setdefault(name, colour_of(bar.kind, bar.class_name))
    first = [name for name in sums if name == "MFU"]
    rest = sorted((name for name in sums if name != "MFU"), key=lambda name: -sums[name])
    shown = [*first, *rest[:_MOST]]
    shown = [name for name in shown if name == "MFU" or abs(sums[name]) >= _SMALL]
    others = [name for name in rest if name not in shown]
    found = [Share(name, sums[name], colours[name]) for name in shown]
    if others:
        words = others[0] if len(others) == 1 else f"{len(others)} smaller parts"
        found.append(Share(words, sum(sums[name] for name in others), "#999999"))
    return found


def _group(kind: str, class_name: str | None, name: str) -> str:
    if kind == "mfu":
        return "MFU"
    if kind == "peak_not_achievable":
        return "peak that this device does not reach"
    if kind == "peak_and_shortfall":
        return "matrix products and attention below peak"
    if kind == "shortfall":
        return "compute slower than it could be"
    if kind == "memory_bound":
        return "memory-bound work"
    return group_of(class_name) if class_name is not None else name


def verdict(picture: Picture) -> tuple[str, Tone]:
    """In one sentence what is wrong, or that nothing is."""
    diagnosis = picture.diagnosis
    losses = [one for one in diagnosis.of("loss") if one.cost_ns is not None]
    if not losses:
        if diagnosis.of("loss"):
            return "no loss of known cost; what could be lost is listed below", "plain"
        if any(one.severity == "error" for one in diagnosis.health):
            return "the records are damaged: no loss can be relied on", "bad"
        return "nothing is lost that this diagnosis knows", "good"
    worst = losses[0]
    step = "step" if diagnosis.is_step else "trace"
    share = f"{worst.share:.1%} of a {step}" if worst.share is not None else "time"
    points = "" if worst.points is None else f", {worst.points:.1f} MFU points"
    words = f"{share}{points} to {_name(worst)}: {worst.text}"
    tone: Tone = (
        "bad" if (worst.share or 0.0) > 0.25 else "doubtful" if (worst.share or 0.0) >= 0.1 else "plain"
    )
    return words, tone


def _name(finding: Finding) -> str:
    return finding.subject if finding.subject == finding.cause else f"{finding.subject} ({finding.cause})"


def _gain(step: NextStep) -> str | None:
    """What it would bring, in words."""
    if step.kind != "change":
        return None
    if step.bound is None and step.estimate is None:
        return "unknown: nobody measured what the setting costs"
    parts = []
    if step.estimate is not None:
        rule = f" ({step.estimate_rule})" if step.estimate_rule else ""
        parts.append(f"about {step.estimate:.2f}x faster is expected{rule}")
    if step.bound is not None:
        parts.append(f"at most {step.bound:.2f}x, if all of this loss disappeared")
    if step.memory_bytes is not None:
        sign = "+" if step.memory_bytes >= 0 else "-"
        parts.append(f"memory {sign}{bytes_words(abs(step.memory_bytes))} on a device")
    return "; ".join(parts)


def _sure(picture: Picture) -> str | None:
    step = picture.next_step
    if step.confidence is None:
        return None
    return f"{_SURE[step.confidence]}; {picture.diagnosis.window or 'the whole trace'}"


def _risk(step: NextStep) -> str | None:
    """What the change may do to training."""
    return None if step.numerics is None else f"gate {step.numerics}: {_GATES[step.numerics]}"


def _also(diagnosis: Diagnosis) -> Iterator[str]:
    """What a person must not overlook before believing the rest."""
    for kind, words in (
        ("not_in_effect", "asked for and not in effect"),
        ("setting", "set so that it costs time"),
        ("withheld", "cannot be relied on"),
    ):
        found = [one.subject for one in diagnosis.findings if one.kind == kind]
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            yield f"{words}: {', '.join(found[:3])}{more}"
    serious = [one for one in diagnosis.health if one.severity in ("error", "warning")]
    if serious:
        more = f" (and {len(serious) - 1} more)" if len(serious) > 1 else ""
        yield f"about the records: {serious[0].message}{more}"


# ---- a terminal -------------------------------------------------------------------------------------------------


def screen_lines(picture: Picture, width: int = 80) -> list[Line]:
    """The screen, no line longer than ``width`` but for commands and names, which stay whole."""
    diagnosis, step = picture.diagnosis, picture.next_step
    unit = "ms a step" if diagnosis.is_step else "ms, no steps found"
    lines = [line(f"Diagnosis of {diagnosis.subject}", "bold")]
    mfu = "" if diagnosis.mfu is None else f", MFU {diagnosis.mfu:.1f}"
    lines += [line(f"{diagnosis.window}: {diagnosis.mean_ns / 1e6:,.1f} {unit}{mfu}", "dim"), ()]
    words, tone = verdict(picture)
    lines += label_lines("Lost", words, width=width, indent=_INDENT, style="" if tone == "plain" else tone)
    if picture.waterfall is not None:
        lines += _points_lines(picture.waterfall, width)
    lines += label_lines("Do next", step.what, width=width, indent=_INDENT)
    if step.command is not None:
        lines.append((Span(" " * _INDENT), Span(step.command, "command")))
    if step.after:
        lines += label_lines("", step.after, width=width, indent=_INDENT, style="dim")
    for label, text in (("Gain", _gain(step)), ("Risk", _risk(step)), ("Sure", _sure(picture))):
        if text is not None:
            lines += label_lines(label, text, width=width, indent=_INDENT)
    for label, also in zip(("Also", *[""] * 9), _also(diagnosis), strict=False):
        lines += label_lines(label, also, width=width, indent=_INDENT)
    for label, (what, command) in zip(("To learn", *[""] * 9), step.known, strict=False):
        lines += label_lines(label, what, width=width, indent=_INDENT)
        if command is not None:
            lines.append((Span(" " * _INDENT), Span(command, "command")))
    return lines


def _points_lines(made: Waterfall, width: int) -> Iterator[Line]:
    shares = points_of(made)
    room = min(_BAR, width - _INDENT)
    counted = made.unit == "mfu_points"
    label = "Points" if counted else "Time"
    unit = "of 100 MFU points" if counted else "% of the time; MFU is unknown"
    yield (Span(f"{label:<{_INDENT}}", "bold"), *_stacked(shares, room))
    yield (Span(" " * _INDENT), Span(unit, "dim"))
    for letter, share in zip(_LETTERS, shares, strict=False):
        yield (
            Span(" " * _INDENT),
            Span(letter, share.colour),
            Span(f" {share.points:5.1f}  {share.name}"),
        )


_LETTERS = "█▓▒░#=+-:"
"""What each part is drawn with: they are told apart without colours, too."""


def _stacked(shares: Sequence[Share], room: int) -> Iterator[Span]:
    """One bar of all parts; negative ones (a finding says why) have no length."""
    whole = sum(max(share.points, 0.0) for share in shares) or 1.0
    drawn, end = 0, 0.0
    for letter, share in zip(_LETTERS, shares, strict=False):
        end += max(share.points, 0.0)
        length = round(end / whole * room) - drawn
        drawn += length
        if length > 0:
            yield Span(letter * length, share.colour)


# ---- a page -----------------------------------------------------------------------------------------------------


def screen_blocks(picture: Picture) -> list[Block]:
    """The same as blocks of a page; the points are the waterfall's, which stands below."""
    diagnosis, step = picture.diagnosis, picture.next_step
    words, tone = verdict(picture)
    blocks: list[Block] = [Paragraph(f"Lost: {words}", tone)]
    pairs: list[tuple[str, Cell]] = []
    if picture.waterfall is not None:
        unit = "MFU points" if picture.waterfall.unit == "mfu_points" else "% of the time"
        shares = ", ".join(f"{share.points:.1f} {share.name}" for share in points_of(picture.waterfall))
        pairs.append((f"Where the 100 {unit} went", Cell(shares)))
    pairs.append(("Do next", Cell(step.what, note=step.after or "")))
    if step.command is not None:
        pairs.append(("Command", Cell(step.command, code=True)))
    for label, text in (("Gain", _gain(step)), ("Risk", _risk(step)), ("How sure", _sure(picture))):
        if text is not None:
            pairs.append((label, Cell(text)))
    pairs += [("Also", Cell(also, "doubtful")) for also in _also(diagnosis)]
    for what, command in step.known:
        pairs.append(("To learn more", Cell(what, note=command or "")))
    return [*blocks, Facts(pairs)]
