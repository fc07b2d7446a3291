"""What happened during a run, and where it came from."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.archive.dimensions import format_value
from drivetrain.archive.encoding import dumps
from drivetrain.report.blocks import Block, Bullets, Cell, Facts, Paragraph, Preformatted, Table
from drivetrain.report.ladder_rows import value_in_words
from drivetrain.report.run_records import RunRecords
from drivetrain.report.svg import legal

__all__ = ["events_section", "moment_words", "provenance_section"]

_COMMON = frozenset({"schema", "time", "segment", "kind"})
_LOUD = {"warning": "doubtful", "alarm": "bad"}
_MOST_EVENTS = 200
"""More rows than this nobody reads; how many are left out is said."""
_MOST_LOUD = 20
_LONGEST = 300


def events_section(records: RunRecords) -> list[Block]:
    """Warnings, alarms and restarts first; everything else in a table to be opened."""
    if not records.events:
        return [Paragraph("No event has been recorded.", "muted")]
    loud = [event for event in records.events if event["kind"] in _LOUD]
    items = [
        Cell(f"{event['kind']}: {_short(str(event.get('message') or _details(event)))}", _tone(event["kind"]))
        for event in loud[:_MOST_LOUD]
    ]
    if len(loud) > _MOST_LOUD:
        items.append(Cell(f"and {len(loud) - _MOST_LOUD} more warnings and alarms", "doubtful"))
    items += [
        Cell(f"restarted: segment {segment.index} begins with step {value_in_words(segment.start_step)}")
        for segment in records.segments[1:]
    ]
    blocks: list[Block] = [Bullets(items)] if items else [Paragraph("No warning, alarm or restart.", "muted")]
    # Optimisation records have a section of their own.
    others = [event for event in records.events if event["kind"] != "optimisation"]
    start = others[0]["time"] if others else 0.0
    shown = (
        others
        if len(others) <= _MOST_EVENTS
        else [*others[: _MOST_EVENTS // 2], *others[-_MOST_EVENTS // 2 :]]
    )
    rows = [
        [
            Cell(f"+{event['time'] - start:,.1f} s", "muted"),
            Cell(str(event["kind"]), _tone(event["kind"])),
            Cell(_short(_details(event))),
        ]
        for event in shown
    ]
    left_out = f", {len(others) - len(shown)} in the middle left out" if len(shown) < len(others) else ""
    if rows:
        blocks.append(
            Table(["time", "event", ""], rows, frozenset({0}), folded=f"All {len(others)} events{left_out}")
        )
    return blocks


def _tone(kind: str) -> Any:
    return _LOUD.get(kind, "plain")


def _details(event: Mapping[str, Any]) -> str:
    own = [(key, value) for key, value in event.items() if key not in _COMMON and value is not None]
    return "  ".join(f"{key}={_words(value)}" for key, value in own)


def _words(value: Any) -> str:
    return dumps(value).decode() if isinstance(value, dict | list) else value_in_words(value)


def _short(words: str) -> str:
    return words if len(words) <= _LONGEST else f"{words[: _LONGEST - 1]}…"


def moment_words(created: str) -> str:
    """An ISO 8601 time as ``2026-11-30 04:22:20 UTC``; as it is where it is none."""
    try:
        moment = datetime.datetime.fromisoformat(created).astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        return created
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def provenance_section(records: RunRecords) -> list[Block]:
    """Code, versions, machine, data, seed, command line; environment and configuration to be opened."""
    manifest = records.manifest
    provenance: Mapping[str, Any] = manifest["provenance"]
    devices, dataset, layout = manifest["devices"], manifest["dataset"], manifest["layout"]
    python, platform = _group(provenance, "python"), _group(provenance, "platform")
    cpu = _group(provenance, "cpu")
    packages = {name: version for name, version in _group(provenance, "packages").items() if version}
    facts = [
        ("code", _code(_group(provenance, "git"))),
        ("command", Cell(_command(provenance.get("command")), code=True)),
        ("working directory", _known(provenance.get("working_directory"), code=True)),
        ("packages", Cell(", ".join(f"{name} {version}" for name, version in packages.items()) or "-")),
        ("Python", Cell(_joined(python.get("implementation"), python.get("version")))),
        ("system", Cell(_joined(platform.get("system"), platform.get("release"), platform.get("machine")))),
        ("host", _known(provenance.get("host"))),
        ("processor", Cell(_cpu(cpu))),
        ("memory", Cell(_memory(provenance.get("memory_bytes")))),
        (
            "devices",
            Cell(
                f"{value_in_words(devices.get('count'))} x {devices.get('name') or devices.get('type') or '-'}"
            ),
        ),
        ("layout", Cell(", ".join(f"{key} {value_in_words(value)}" for key, value in layout.items()) or "-")),
        ("dataset", _known(dataset.get("fingerprint"), code=True, note=str(dataset.get("prefix") or ""))),
        ("seed", _known(manifest.get("seed"))),
        ("configuration hash", _known(manifest.get("config_hash"), code=True)),
        ("run id", _known(manifest.get("id"), code=True)),
        ("folder", _known(records.run.path.resolve(), code=True)),
    ]
    for key, words in (("probe", "probe"), ("perturb_ulp", "perturbed by one ulp, seed")):
        if manifest.get(key) not in (None, False):
            facts.append((words, _known(manifest[key])))
    blocks: list[Block] = [Facts(facts)]
    environment = _group(provenance, "environment")
    if environment:
        rows = [[Cell(name, code=True), Cell(str(value))] for name, value in environment.items()]
        blocks.append(Table(["variable", "value"], rows, folded=f"Environment variables kept: {len(rows)}"))
    if records.configuration:
        blocks.append(Preformatted(_configuration(records.configuration), "The whole configuration"))
    return blocks


def _group(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = document.get(key)
    return found if isinstance(found, dict) else {}


def _known(value: Any, *, code: bool = False, note: str = "") -> Cell:
    return Cell("-", "muted") if value is None else Cell(str(value), code=code, note=note)


def _joined(*words: Any) -> str:
    return " ".join(str(word) for word in words if word) or "-"


def _code(git: Mapping[str, Any]) -> Cell:
    commit = git.get("commit")
    if not commit:
        return Cell(str(git.get("reason") or "unknown"), "doubtful")
    where = f"{commit} ({git.get('branch') or 'detached'})"
    if not git.get("dirty"):
        return Cell(where, note="clean" if git.get("dirty") is False else "")
    parts = []
    if git.get("diff_sha256"):
        parts.append(f"uncommitted changes, SHA-256 of the diff {git['diff_sha256']}")
    if git.get("untracked_count"):
        parts.append(f"untracked files: {git['untracked_count']}")
    return Cell(where, "doubtful", f"dirty: {'; '.join(parts) or 'changes'}")


def _command(words: Any) -> str:
    import shlex

    if not isinstance(words, Sequence) or isinstance(words, str) or not words:
        return "-"
    return legal(shlex.join(map(str, words)))


def _cpu(cpu: Mapping[str, Any]) -> str:
    cores = cpu.get("usable_cores")
    return _joined(cpu.get("model"), None if cores is None else f"({cores} usable cores)")


def _memory(value: Any) -> str:
    return format_value(float(value), "byte") if isinstance(value, int | float) else "-"


def _configuration(tables: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for section, leaves in tables.items():
        if isinstance(leaves, dict):
            lines += [f"[{section}]", *(f"{name} = {_words(value)}" for name, value in leaves.items()), ""]
        else:
            lines += [f"{section} = {_words(leaves)}", ""]
    return "\n".join(lines).rstrip()
