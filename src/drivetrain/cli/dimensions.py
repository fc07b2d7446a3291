"""The five dimensions of one run as text."""

from collections.abc import Mapping
from typing import Any

__all__ = ["five_dimensions"]


def five_dimensions(summary: Mapping[str, Any]) -> str:
    """A line for each dimension, the rules behind MFU, and why a figure is missing."""
    from drivetrain.archive.dimensions import DIMENSIONS, figures_of_summary, format_value

    figures = figures_of_summary(summary)
    grouped: dict[str, list[str]] = {}
    for figure in DIMENSIONS:
        value = figures.values[figure.key]
        unit = (
            f" {figure.unit}"
            if figure.unit in ("token/s", "nat/token", "bit/byte") and value is not None
            else ""
        )
        label = "" if figure.unit == "token/s" and figure.key == "tokens_per_second" else f"{figure.label} "
        grouped.setdefault(figure.dimension, []).append(f"{label}{format_value(value, figure.unit)}{unit}")
    lines = [f"{dimension:20} {', '.join(cells)}" for dimension, cells in grouped.items()]
    rule = summary.get("mfu_rule") or {}
    lines.append(f"{'window':20} {rule.get('window')}")
    if rule.get("peak_source"):
        lines.append(f"{'MFU':20} {rule.get('flops_rule')}; peak: {rule.get('peak_source')}")
    unknown: dict[str, list[str]] = {}
    for key, why in figures.reasons.items():
        unknown.setdefault(why, []).append(key)
    lines.extend(f"{'unknown':20} {', '.join(keys)}: {why}" for why, keys in unknown.items())
    lines.extend(f"{'finding':20} {finding}" for finding in summary.get("findings") or ())
    return "\n".join(lines)
