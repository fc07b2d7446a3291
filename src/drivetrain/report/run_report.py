"""The report of one run, put together from its records."""

from typing import Any

from drivetrain.archive.dimensions import DIMENSIONS
from drivetrain.archive.encoding import SCHEMA
from drivetrain.report.blocks import Block, Bullets, Cell, Paragraph, Report, section
from drivetrain.report.ladder_report import STATUS_TONES, ladder_blocks
from drivetrain.report.run_records import RunRecords
from drivetrain.report.section_account import account_section
from drivetrain.report.section_changes import changes_section
from drivetrain.report.section_communication import communication_section
from drivetrain.report.section_curves import loss_section, step_time_section
from drivetrain.report.section_diagnosis import charts_section, losses_section, next_section
from drivetrain.report.section_figures import figures_section, headline_tiles
from drivetrain.report.section_optimisations import optimisations_section, without_effect
from drivetrain.report.section_provenance import events_section, moment_words, provenance_section

__all__ = ["run_report", "summary_document"]

_UNFINISHED = {
    "running": "This run is still running: its figures cover what it has done so far.",
    "lost": "This run is lost: its process ended without a word. Its figures cover what it had logged.",
    "interrupted": "This run was interrupted: its figures cover what it has done.",
    "killed": "This run was killed: its figures cover what it had logged.",
    "failed": "This run failed: its figures cover what it had logged.",
    "diverged": "This run diverged: its figures are of a training that went wrong.",
    "unknown": "What became of this run cannot be read.",
}


def run_report(records: RunRecords) -> Report:
    """Every section; those without anything to say are left out by the renderers."""
    tone = STATUS_TONES.get(records.status, "doubtful")
    sections = [
        section("What to do next", lambda: next_section(records.picture, records.picture_note)),
        section("Five dimensions", lambda: figures_section(records)),
        section("What changed", lambda: changes_section(records)),
        section("Where the time went", lambda: account_section(records)),
        section("What is lost", lambda: losses_section(records.picture)),
        section("Three charts", lambda: charts_section(records.picture)),
        section("Communication", lambda: communication_section(records)),
        section("Loss and gradient norm", lambda: loss_section(records)),
        section("Step time", lambda: step_time_section(records)),
        section("Optimisations", lambda: optimisations_section(records.optimisations)),
        section("The ladder", lambda: _ladder(records)),
        section("Events", lambda: events_section(records)),
        section("Provenance", lambda: provenance_section(records)),
    ]
    name = records.run.name
    return Report("run", name, records.status, tone, _subtitle(records), sections, _lead(records))


def _subtitle(records: RunRecords) -> list[str]:
    devices = records.manifest["devices"]
    asked = records.train_iters
    steps = f"step {records.last_step or 0:,}" + ("" if asked is None else f" of {asked:,}")
    tokens = records.figures.tokens if records.figures is not None else None
    facts = [records.run.id, moment_words(str(records.manifest["created"])), steps]
    if tokens is not None:
        facts.append(f"{tokens:,} tokens")
    facts.append(
        f"{devices.get('count') or '?'} x {devices.get('name') or devices.get('type') or 'unknown device'}"
    )
    if len(records.segments) > 1:
        facts.append(f"{len(records.segments)} segments")
    return facts


def _lead(records: RunRecords) -> list[Block]:
    """What must be known before any figure is believed, then the figures."""
    blocks: list[Block] = []
    if records.status in _UNFINISHED:
        reason = f" Reason: {records.reason}." if records.reason else ""
        tone = STATUS_TONES[records.status]
        blocks.append(
            Paragraph(_UNFINISHED[records.status] + reason, "doubtful" if tone == "plain" else tone)
        )
    if records.faults:
        blocks.append(Paragraph("Some pieces of this run cannot be read, and are missing below:", "bad"))
        blocks.append(Bullets([Cell(fault, "bad") for fault in records.faults]))
    findings = _findings(records)
    # The summary's findings already tell of some, with their reason; a refuted one is known only after a window.
    untold = [
        record
        for record in records.optimisations
        if not any(finding.startswith(f"{record.field} ") for finding in findings)
    ]
    blocks += without_effect(untold)
    blocks += [Paragraph(f"Finding: {finding}", "doubtful") for finding in findings]
    return [*blocks, *headline_tiles(records)]


def _findings(records: RunRecords) -> list[str]:
    found = (records.summary or {}).get("findings")
    return [str(finding) for finding in found] if isinstance(found, list) else []


def _ladder(records: RunRecords) -> list[Block]:
    if records.tune is None:
        return []
    place = _place(records)
    words = f"This run belongs to the ladder {records.tune.id}{place}."
    return [Paragraph(words), *ladder_blocks(records.tune.document)]


def _place(records: RunRecords) -> str:
    """Which part of the ladder the run played, where the document says so."""
    assert records.tune is not None
    document, name = records.tune.document, records.run.path.name

    def is_this(path: Any) -> bool:
        return isinstance(path, str) and path.rstrip("/").rpartition("/")[2] == name

    for part in ("baseline", "final"):
        if is_this((document.get(part) or {}).get("run")):
            return f", as its {part}"
    for part, words in (("steps", "step"), ("leave_one_out", "removal")):
        for position, step in enumerate(document.get(part) or (), start=1):
            for block in step.get("blocks") or ():
                if is_this(block.get("run")):
                    side = "the candidate" if block.get("side") == "B" else "the parent"
                    index = position if step.get("index") is None else step["index"]
                    return f", in {words} {index} as a block of {side}"
    return ""


def summary_document(records: RunRecords) -> dict[str, Any]:
    """The run's ``summary.json``; where there is none, the same figures from its logged steps.

    ``status`` is the derived one; ``source`` says where the figures come from, ``faults`` what could not be read.
    """
    common = {
        "schema": SCHEMA,
        "run": str(records.run.path),
        "id": records.run.id,
        "status": records.status,
        "partial": records.status != "finished",
    }
    figures = records.figures
    faults = {"faults": list(records.faults)}
    if records.summary is not None:
        return {**records.summary, **common, "source": "summary", **faults}
    document: dict[str, Any] = {**common, "source": "metrics", **faults, "steps": records.last_step}
    if figures is None:
        return {**document, "reasons": {}}
    document["tokens"] = figures.tokens
    for figure in DIMENSIONS:
        group, _, leaf = figure.key.partition(".")
        if leaf:
            document.setdefault(group, {})[leaf] = figures.values[figure.key]
        else:
            document[group] = figures.values[figure.key]
    return {
        **document,
        "optimisations": [record.to_document() for record in records.optimisations],
        "reasons": dict(figures.reasons),
    }
