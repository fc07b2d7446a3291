"""What ``drivetrain config import`` does: convert, list, write."""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.config.importing import Imported, Taken, Trainer

__all__ = ["ImportOptions", "run_import"]

_NAMES = {"megatron": "Megatron-LM", "mindspeed": "MindSpeed", "torchtitan": "torchtitan"}
_CHANGES = {
    "curve": "another curve",
    "memory": "memory",
    "speed": "speed alone",
    "operation": "nothing of the training",
}
_WIDEST = 60


@dataclass(frozen=True)
class ImportOptions:
    """The options of the verb, as given."""

    source: str | None
    variables: tuple[str, ...]
    devices: int | None
    output: str | None
    overwrite: bool
    allow_missing: bool


def run_import(file: str, overrides: Sequence[str], options: ImportOptions, *, as_json: bool) -> int:
    """The verb; returns the exit code."""
    from drivetrain.archive.atomic import write_text
    from drivetrain.catalogue.rules import all_rules
    from drivetrain.cli.output import show_document
    from drivetrain.config.importing import import_file, imported_toml

    target = None if options.output is None else Path(options.output)
    if target is not None and target.exists() and not options.overwrite:
        raise DrivetrainError(f"{target} is there already; name another file, or give --overwrite")
    imported = import_file(
        Path(file),
        trainer=_trainer(options.source),
        given=_variables(options.variables),
        devices=options.devices,
        overrides=overrides,
        rules=all_rules(),
    )
    refused = imported.changes_training and not options.allow_missing
    text = None if refused else imported_toml(imported)
    for line in _report(imported):
        # What a file holds is shown, and does nothing to a terminal.
        print("".join(char if char.isprintable() or char == "\n" else "?" for char in line), file=sys.stderr)
    if text is not None and target is not None:
        write_text(target, text)
    if as_json:
        written = None if text is None or target is None else str(target)
        show_document({**imported.to_document(), "written": written, "toml": text})
    elif text is not None and target is None:
        sys.stdout.write(text)
    if refused:
        print(
            "\nnothing was written: what is left out changes the training, or may; --allow-missing writes it all the "
            "same, with comments",
            file=sys.stderr,
        )
        return 1
    if target is not None:
        print(f"\n{target}: check it with: drivetrain check {target}", file=sys.stderr)
    return 0


def _trainer(text: str | None) -> "Trainer | None":
    from drivetrain.config import nearest
    from drivetrain.config.importing import TRAINERS

    if text is None:
        return None
    for trainer in TRAINERS:
        if text == trainer:
            return trainer
    alike = nearest(text, TRAINERS)
    raise DrivetrainError(
        f"--from {text}: expected one of {', '.join(TRAINERS)}"
        + (f"; did you mean {alike}?" if alike else "")
    )


def _variables(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*|\d", name):
            raise DrivetrainError(f"--set {text}: expected NAME=VALUE, such as DATA_PATH=corpus/books")
        found[name] = value
    return found


def _report(imported: "Imported") -> Iterator[str]:
    """Every argument in its list."""
    conversion = imported.conversion
    source = conversion.source
    processes = "" if source.processes is None else f", {source.processes} processes"
    yield f"{source.where}: {len(source.arguments)} arguments of {_NAMES[source.trainer]}{processes}"
    yield from _taken("taken over", conversion.taken)
    yield from _taken("the source's defaults, written out", conversion.defaults)
    for override in imported.overrides:
        yield f"  given beside the file: {override}"
    if conversion.same:
        yield f"\nthe same here, or without meaning ({len(conversion.same)}):"
        for same in conversion.same:
            yield f"  {_words(same.name, same.given)}: {same.reason}"
    if imported.missing:
        yield f"\nnot supported here ({len(imported.missing)}):"
        for lacking in imported.missing:
            yield f"  {_words(lacking.name, lacking.given)}: {lacking.reason}; changes {_CHANGES[lacking.effect]}"
    if conversion.unknown:
        yield f"\nunknown ({len(conversion.unknown)}):"
        for unknown in conversion.unknown:
            alike = f"; did you mean {unknown.nearest}?" if unknown.nearest else ""
            known = f"no argument of {_NAMES[source.trainer]} that is known here"
            yield f"  {_words(unknown.name, unknown.given)}: {known}{alike}"


def _taken(title: str, found: "Sequence[Taken]") -> Iterator[str]:
    from drivetrain.config.serialise import value_text

    if not found:
        return
    yield f"\n{title} ({len(found)}):"
    for one in found:
        yield f"  {_words(one.name, one.given)} -> {one.field} = {value_text(one.value)} ({one.rule})"


def _words(name: str, given: str) -> str:
    shown = f"{name} {given}".strip()
    return shown if len(shown) <= _WIDEST else f"{shown[: _WIDEST - 3]}..."
