"""A diagnosis in a page: what to do next, what is lost, and the three charts."""

from collections.abc import Sequence

from drivetrain.diagnose import Finding
from drivetrain.diagnose.charts import StepChart
from drivetrain.diagnose.picture import Picture
from drivetrain.report.blocks import Block, Cell, Figure, Paragraph, Report, Section, Table, section
from drivetrain.report.charts_svg import communication_svg, data_gap_svg, kernels_svg
from drivetrain.report.charts_text import communication_lines, data_gap_lines, kernel_lines
from drivetrain.report.diagnosis_text import first_remedy
from drivetrain.report.first_screen import screen_blocks
from drivetrain.report.styled import plain
from drivetrain.report.waterfall import waterfall_svg, waterfall_text

__all__ = ["charts_section", "diagnosis_report", "losses_section", "next_section"]

_MOST = 12


def next_section(picture: Picture | None, note: str) -> list[Block]:
    """The verdict and the one thing to do next; without a diagnosis why there is none."""
    if picture is not None:
        return screen_blocks(picture)
    return [Paragraph(f"No diagnosis: {note}.", "muted")] if note else []


def losses_section(picture: Picture | None) -> list[Block]:
    """A row for each finding, in the diagnosis' order; nothing without a diagnosis."""
    if picture is None:
        return []
    findings = picture.diagnosis.findings
    if not findings:
        return [Paragraph("No loss of 1% of a step or more was found.", "muted")]
    rows = [_row(finding) for finding in findings[:_MOST]]
    left = len(findings) - len(rows)
    table = Table(
        ["loss", "ms", "points", "share", "what happens", "first remedy"],
        rows,
        frozenset({1, 2, 3}),
        caption="What is not in effect first, then settings, then losses with the largest first. A part belongs to the "
        "loss it names, and is not added to it.",
    )
    more = [Paragraph(f"{left} more: drivetrain diagnose --json has all of them.", "muted")] if left else []
    return [table, *more]


def _row(finding: Finding) -> list[Cell]:
    part = "" if finding.part_of is None else f"part of {finding.part_of}"
    seen = "; ".join(one.text for one in finding.evidence[:2] if one.source not in ("hint", "account"))
    return [
        Cell(finding.subject, "bad" if finding.kind == "not_in_effect" else "plain", note=part),
        Cell("?" if finding.cost_ns is None else f"{finding.cost_ns / 1e6:,.2f}"),
        Cell("-" if finding.points is None else f"{finding.points:.1f}"),
        Cell("?" if finding.share is None else f"{finding.share:.1%}"),
        Cell(finding.text, note=seen),
        Cell(first_remedy(finding), "muted"),
    ]


def charts_section(picture: Picture | None) -> list[Block]:
    """The three charts; what is withheld says why in its place. Nothing without a diagnosis."""
    if picture is None:
        return []
    gap, kernels, exposed = picture.charts.data_gap, picture.charts.kernels, picture.charts.communication
    blocks: list[Block] = []
    if gap.withheld is not None:
        blocks.append(Paragraph(f"Data gap: withheld. {_sentence(gap.withheld)}", "muted"))
    else:
        caption = f"Data gap: what each step waits for its batch; {_source(gap)}."
        blocks.append(Figure(data_gap_svg(gap), plain(data_gap_lines(gap)), caption))
    if kernels.withheld is not None:
        blocks.append(Paragraph(f"Kernels: withheld. {_sentence(kernels.withheld)}", "muted"))
    else:
        what = "Kernels" if kernels.on_device else "Operators"
        caption = (
            f"{what} with the most time, {kernels.source}: the first {len(kernels.kernels)} of {kernels.names} take "
            f"{kernels.shown_share:.1%} of the summed time."
        )
        blocks.append(Figure(kernels_svg(kernels), plain(kernel_lines(kernels)), caption))
    if exposed.withheld is not None:
        blocks.append(Paragraph(f"Communication share: withheld. {_sentence(exposed.withheld)}", "muted"))
    else:
        caption = f"Communication share: exposed against hidden; {_source(exposed)}."
        blocks.append(Figure(communication_svg(exposed), plain(communication_lines(exposed)), caption))
    return blocks


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _source(chart: StepChart) -> str:
    return "; ".join(filter(None, (chart.source, chart.note)))


def diagnosis_report(picture: Picture) -> Report:
    """The page of ``drivetrain diagnose --html``."""
    diagnosis = picture.diagnosis
    unit = "ms a step" if diagnosis.is_step else "ms, no steps found"
    subtitle = [diagnosis.window, f"{diagnosis.mean_ns / 1e6:,.1f} {unit}"]
    if diagnosis.mfu is not None:
        subtitle.append(f"MFU {diagnosis.mfu:.1f}")
    sections: Sequence[Section] = [
        section("What is lost", lambda: losses_section(picture)),
        section("Where the time went", lambda: _waterfall(picture)),
        section("Three charts", lambda: charts_section(picture)),
    ]
    word = "no MFU" if diagnosis.mfu is None else f"MFU {diagnosis.mfu:.1f}"
    return Report("diagnosis", diagnosis.subject, word, "plain", subtitle, sections, screen_blocks(picture))


def _waterfall(picture: Picture) -> list[Block]:
    made = picture.waterfall
    if made is None:
        return [Paragraph("The window has no length, so it has no waterfall.", "muted")]
    return [Figure(waterfall_svg(made, "Waterfall"), waterfall_text(made))]
