"""A ladder, whole: every step that was tried, kept or not, what it cost and what it brought."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.archive.tunes import Tune
from drivetrain.report.blocks import (
    Block,
    Bullets,
    Cell,
    Facts,
    Figure,
    Paragraph,
    Preformatted,
    Report,
    Table,
    Tile,
    Tiles,
    Tone,
    section,
)
from drivetrain.report.ladder_figure import (
    class_rungs,
    classes_svg,
    classes_text,
    rungs_svg,
    rungs_text,
    step_time_rungs,
)
from drivetrain.report.ladder_rows import (
    LADDER_HEADINGS,
    LadderRow,
    duration_in_words,
    gate_in_words,
    ladder_rows,
    ratio_in_words,
    removal_rows,
    totals,
    value_in_words,
)
from drivetrain.report.section_provenance import moment_words

__all__ = ["STATUS_TONES", "ladder_blocks", "tune_report"]

STATUS_TONES: Mapping[str, Tone] = {
    "finished": "good",
    "running": "plain",
    "interrupted": "doubtful",
    "failed": "bad",
    "killed": "bad",
    "lost": "bad",
    "diverged": "bad",
    "unknown": "doubtful",
}


def tune_report(tune: Tune) -> Report:
    """The report of a whole tune."""
    document = tune.document
    status = tune.status()
    subtitle = [f"of {document['source']}"] if document.get("source") else []
    if isinstance(document.get("created"), str):
        subtitle.append(moment_words(document["created"]))
    lead: list[Block] = []
    if status != "finished":
        lead.append(Paragraph(_unfinished(status, document), STATUS_TONES.get(status, "doubtful")))
    lead += section("", lambda: _tiles(document)).blocks
    sections = [
        section("The ladder", lambda: ladder_blocks(document)),
        section("Each change removed once", lambda: _leave_one_out(document)),
        section("Final configuration", lambda: _final(tune)),
        section("How it was tuned", lambda: _settings(tune)),
    ]
    return Report("tune", tune.id, status, STATUS_TONES.get(status, "doubtful"), subtitle, sections, lead)


def _unfinished(status: str, document: Mapping[str, Any]) -> str:
    reason = f": {document['reason']}" if document.get("reason") else ""
    return f"This ladder is {status}{reason}. What follows is what it had found by then."


def _tiles(document: Mapping[str, Any]) -> list[Block]:
    baseline, final = document.get("baseline") or {}, document.get("final") or {}
    steps = document.get("steps") or ()
    kept = sum(1 for step in steps if step.get("kept"))
    tiles = []
    speed_up = document.get("speed_up") or {}
    if speed_up.get("ratio") is not None:
        interval = ratio_in_words(speed_up).partition(" ")[2]
        tiles.append(
            Tile(
                "Final against baseline",
                f"{float(speed_up['ratio']):.3f}x",
                f"95% {interval}" if interval else "",
            )
        )
    for label, side in (("Step, baseline", baseline), ("Step, final", final)):
        if side.get("step_s") is not None:
            rate = side.get("tokens_per_second")
            note = "" if rate is None else f"{rate:,.0f} tokens/s"
            tiles.append(Tile(label, f"{1000 * float(side['step_s']):,.1f} ms", note))
    tiles.append(Tile("Changes kept", f"{kept} of {len(steps)}", "tried, negative results included"))
    gate = document.get("final_gate") or {}
    if gate.get("verdict") is not None:
        tone: Tone = "good" if gate["verdict"] == "pass" else "bad"
        tiles.append(
            Tile("Gate against baseline", str(gate["verdict"]), f"{gate.get('tier') or ''} tier", tone)
        )
    if document.get("device_seconds") is not None:
        seconds = float(document["device_seconds"])
        tiles.append(Tile("Device-hours spent", f"{seconds / 3600:.3g}", duration_in_words(seconds)))
    return [Tiles(tiles)]


def ladder_blocks(document: Mapping[str, Any]) -> list[Block]:
    """Figure, table, totals and findings; the same in a tune's report and in those of its runs."""
    blocks: list[Block] = []
    rungs = step_time_rungs(document)
    if len(rungs) > 1:
        caption = "A kept change's bar: geometric mean of the medians of its own blocks, in its own trial."
        blocks.append(Figure(rungs_svg(rungs), rungs_text(rungs), caption))
    classes = class_rungs(document)
    if len(classes) > 1:
        caption = "Of profiled steps, which take longer than others: the profiler's own time is in them."
        blocks.append(Figure(classes_svg(classes), classes_text(classes), caption))
    rows = ladder_rows(document.get("steps") or ())
    if rows:
        blocks.append(_table(rows))
    else:
        blocks.append(Paragraph("No change has been tried.", "muted"))
    found = totals(document)
    if found:
        blocks.append(Facts([(label, Cell(words)) for label, words in found]))
    rule = (document.get("saved") or {}).get("rule")
    if rule:
        blocks.append(Paragraph(f"Saved: {rule}.", "muted"))
    findings = document.get("findings") or ()
    if findings:
        blocks.append(Bullets([Cell(str(finding), "doubtful") for finding in findings]))
    return blocks


_HEADINGS = tuple(heading for heading in LADDER_HEADINGS if heading != "treats")
"""On a page, what a change treats stands below it."""


def _table(rows: tuple[LadderRow, ...]) -> Table:
    def cells(row: LadderRow) -> list[Cell]:
        treats = f"treats {row.treats.replace(' ', ', ')}" if row.treats != "-" else "-"
        below = [words for words in (row.entry, treats, row.cost.replace(" ", "\u00a0")) if words != "-"]
        return [
            Cell(row.index, "muted"),
            Cell(row.change, note="; ".join(below), code=True, whole=True),
            Cell(row.predicted, note=row.predicted_why),
            Cell(row.measured),
            Cell(row.error),
            Cell(row.memory),
            Cell(row.gate, _gate_tone(row.gate), row.gate_why),
            Cell(row.verdict, row.tone, row.why),
        ]

    return Table(_HEADINGS, [cells(row) for row in rows], frozenset({2, 3, 4, 5}))


def _gate_tone(words: str) -> Tone:
    verdict = words.rpartition(" ")[2]
    return (
        "bad" if verdict in ("fail", "suspicious") else "doubtful" if verdict == "inconclusive" else "plain"
    )


def _leave_one_out(document: Mapping[str, Any]) -> list[Block]:
    rows = removal_rows(document.get("leave_one_out") or ())
    if not rows:
        return []
    words = "The final configuration without one kept change; a ratio below 1 says that the change is still worth it."
    return [Paragraph(words, "muted"), _table(rows)]


def _final(tune: Tune) -> list[Block]:
    document = tune.document
    final = document.get("final")
    if not isinstance(final, dict):
        if document.get("status") != "finished":
            return [Paragraph("There is no final configuration yet.", "muted")]
        blocks: list[Block] = [
            Paragraph("No configuration came out of this ladder; its findings say why.", "doubtful")
        ]
        if document.get("final_gate"):
            blocks.append(Facts([("gate", _gate(document["final_gate"]))]))
        return blocks
    blocks = []
    gate = document.get("final_gate") or {}
    facts = [("file", Cell(str(final.get("config") or "-"), code=True)), ("gate", _gate(gate))]
    if gate.get("why"):
        facts.append(("why", Cell(str(gate["why"]))))
    blocks.append(Facts(facts))
    text = _config_text(tune.path, final.get("config"))
    if text is not None:
        blocks.append(Preformatted(text, "The whole configuration, with a comment for each change"))
    return blocks


def _gate(gate: Mapping[str, Any]) -> Cell:
    words = gate_in_words(gate)
    if words == "-":
        return Cell("not held", "doubtful")
    return Cell(words, "good" if gate.get("verdict") == "pass" else "bad")


def _config_text(folder: Path, name: Any) -> str | None:
    """Content of a configuration inside the tune's folder; a document must not point anywhere else."""
    if not isinstance(name, str):
        return None
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        return None
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _inside(folder: Path, run: Any) -> str:
    """A run's path as seen from the tune's folder, where it lies in it."""
    path = Path(str(run)) if run else None
    if path is None:
        return "-"
    return str(path.relative_to(folder.resolve()) if path.is_relative_to(folder.resolve()) else path)


def _settings(tune: Tune) -> list[Block]:
    document = tune.document
    overrides = document.get("overrides") or ()
    facts = [
        ("source", Cell(str(document.get("source") or "-"), code=True)),
        ("overrides", Cell(" ".join(map(str, overrides)) or "-", code=True)),
        ("baseline run", Cell(_inside(tune.path, (document.get("baseline") or {}).get("run")), code=True)),
        ("final run", Cell(_inside(tune.path, (document.get("final") or {}).get("run")), code=True)),
        ("folder", Cell(str(tune.path.resolve()), code=True)),
    ]
    for key, value in document["settings"].items():
        parts = value.items() if isinstance(value, dict) else ((None, value),)
        for part, single in parts:
            label = str(key) if part is None else f"{key}: {part}"
            facts.append((label.replace("_", " "), Cell(value_in_words(single))))
    return [Facts(facts)]
