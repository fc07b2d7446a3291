"""The five dimensions of a run, each figure with the rule behind it or the reason why it is unknown."""

import math
from collections.abc import Mapping
from typing import Any

from drivetrain.archive.compare import ratio
from drivetrain.archive.dimensions import DIMENSIONS, Figure, RunFigures, format_value
from drivetrain.measure.metrics import METRICS
from drivetrain.report.blocks import Block, Cell, Paragraph, Table, Tile, Tiles, Tone
from drivetrain.report.run_records import RunRecords

__all__ = ["figure_words", "figures_section", "headline_tiles", "rule_of"]

_DEFINITIONS = {
    "tokens_per_second": "throughput/tokens_per_sec",
    "effective_tokens_per_second": "throughput/effective_tokens_per_sec",
    "step_time_s.p50": "time/step_s",
    "step_time_s.p90": "time/step_s",
    "step_time_s.max": "time/step_s",
    "data_wait_frac": "time/data_wait_frac",
    "mfu": "throughput/device/mfu",
    "hfu": "throughput/device/hfu",
    "communication_exposed_frac": "time/comm_exposed_frac",
    "final_loss": "train/loss",
    "validation_loss": "eval/loss",
    "validation_bits_per_byte": "eval/bits_per_byte",
}
_HEADLINES = (
    "tokens_per_second",
    "step_time_s.p50",
    "mfu",
    "peak_memory_bytes",
    "final_loss",
    "validation_bits_per_byte",
)


def figure_words(figure: Figure, value: float | None) -> str:
    """A figure with its unit, where its label does not say it: ``18,823``, ``25.8%``, ``3.4011 nat/token``."""
    if value is not None and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    words = format_value(value, figure.unit)
    return words if value is None or figure.unit != "nat/token" else f"{words} nat/token"


def _tone(value: float | None) -> Tone:
    return "bad" if value is not None and not math.isfinite(value) else "plain"


def rule_of(figure: Figure, records: RunRecords) -> str:
    """How a figure is counted: the run's own rule where it states one, else the registry's definition."""
    stated: Mapping[str, Any] = (records.summary or {}).get("mfu_rule") or {}
    if figure.key == "peak_memory_bytes":
        return str((records.summary or {}).get("memory_rule") or "largest peak of the logged steps")
    definition = METRICS[_DEFINITIONS[figure.key]].definition.rstrip(".")
    if figure.key in ("mfu", "hfu") and stated.get("flops_rule"):
        extra = " with recomputed FLOPs added" if figure.key == "hfu" else ""
        return f"{stated['flops_rule']}{extra}; peak: {stated.get('peak_source') or 'none'}"
    if figure.key == "tokens_per_second" and stated.get("token_rule"):
        return f"{stated['token_rule']}, over the steps' wall time"
    return definition


def figures_section(records: RunRecords) -> list[Block]:
    """The table; with a column for the parent and the ratio to it where there is one."""
    figures = records.figures
    if figures is None:
        return [Paragraph("None of the five dimensions can be read; what is wrong is said above.", "bad")]
    parent = records.parent.figures if records.parent is not None else None
    headings = ["dimension", "figure", "value", "rule, or why unknown"]
    if parent is not None:
        headings[3:3] = ["parent", "run / parent"]
    rows, shown, said = [], "", ""
    for figure in DIMENSIONS:
        value = figures.values[figure.key]
        cells = [
            Cell(figure.dimension if figure.dimension != shown else "", "muted"),
            Cell(figure.label, whole=True),
            Cell(figure_words(figure, value), _tone(value)),
        ]
        if parent is not None:
            cells += [
                Cell(figure_words(figure, parent.values[figure.key])),
                Cell(_ratio(value, parent.values[figure.key])),
            ]
        rule = _rule_or_reason(figure, value, figures, records)
        rows.append([*cells, Cell("as above" if rule == said else rule, "muted")])
        shown, said = figure.dimension, rule
    numeric = frozenset({2} if parent is None else {2, 3, 4})
    return [Table(headings, rows, numeric), *_window(records, figures)]


def _rule_or_reason(figure: Figure, value: float | None, figures: RunFigures, records: RunRecords) -> str:
    if value is not None:
        return rule_of(figure, records)
    why = figures.reasons.get(figure.key) or figures.reasons.get(figure.key.partition(".")[0])
    return f"unknown: {why}" if why else "unknown: the run does not say why"


def _window(records: RunRecords, figures: RunFigures) -> list[Block]:
    if figures.source == "metrics":
        text = (
            "Computed from the logged steps, those with a tag left out of rates and times: "
            "there is no summary of the last segment."
        )
        return [Paragraph(text, "muted")]
    window = ((records.summary or {}).get("mfu_rule") or {}).get("window")
    return [Paragraph(f"Window: {window}.", "muted")] if window else []


def _ratio(value: float | None, reference: float | None) -> str:
    found = ratio(value, reference)
    return "-" if found is None else f"{found:.3f}x"


def headline_tiles(records: RunRecords) -> list[Block]:
    """The figures that are looked at first."""
    figures = records.figures
    if figures is None:
        return []
    parent = records.parent.figures if records.parent is not None else None
    tiles = []
    for figure in DIMENSIONS:
        if figure.key in _HEADLINES:
            value = figures.values[figure.key]
            note = "" if value is not None else "why: see the table"
            if parent is not None and (found := ratio(value, parent.values[figure.key])) is not None:
                note = f"{found:.3f}x the parent's"
            label = f"{figure.label}, nat/token" if figure.unit == "nat/token" else figure.label
            shown = figure_words(figure, value).removesuffix(" nat/token")
            tiles.append(Tile(_capital(label), shown, note, _tone(value)))
    return [Tiles(tiles)]


def _capital(words: str) -> str:
    return words if words.startswith("tokens") or words.isupper() else words[:1].upper() + words[1:]
