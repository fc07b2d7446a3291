"""An imported configuration as a file: what was converted, with its source beside it, and what is missing."""

from collections.abc import Iterator

import tomlkit

from drivetrain.addresses import withheld
from drivetrain.config.importing.importer import Imported
from drivetrain.config.leaves import leaf_values
from drivetrain.config.load import parse_config
from drivetrain.config.serialise import FORMAT

__all__ = ["imported_toml"]


def imported_toml(imported: Imported) -> str:
    """TOML that reads back to ``imported.config``, and says in comments what decided each field."""
    conversion = imported.conversion
    rules = {one.field: one.rule for one in (*conversion.defaults, *conversion.taken)}
    given = {override.partition("=")[0].strip() for override in imported.overrides}
    lines = [f"# {_one_line(f'Arguments of {conversion.source.trainer} from {conversion.source.where}.')}"]
    lines += list(_missing(imported))
    lines += [f"schema = {FORMAT}"]
    section = None
    for leaf, value in leaf_values(imported.config):
        if leaf.path not in conversion.values and leaf.path not in given:
            continue
        if leaf.section != section:
            section = leaf.section
            lines += ["", f"[{section}]"]
        why = (
            "given beside the file"
            if leaf.path in given
            else conversion.origins.get(leaf.path, "follows from the field before it")
        )
        rule = rules.get(leaf.path, "") if leaf.path not in given else ""
        comment = _one_line(f"{why}: {rule}" if rule else why)
        if value is None:
            lines.append(f"# {leaf.name} = none  # {comment}")
            continue
        text = tomlkit.item(withheld(value) if isinstance(value, str) else value).as_string()
        lines.append(f"{leaf.name} = {text}  # {comment}")
    text = "\n".join(lines) + "\n"
    assert parse_config(text) == imported.config, "the written file is another configuration"
    return text


def _missing(imported: Imported) -> Iterator[str]:
    for one in imported.missing:
        yield f"# not supported ({one.effect}): {_one_line(f'{one.name} {one.given}'.strip())}: {_one_line(one.reason)}"
    for unknown in imported.conversion.unknown:
        yield f"# unknown: {_one_line(f'{unknown.name} {unknown.given}'.strip())}"


def _one_line(text: str) -> str:
    """Without what would end a comment, or may not stand in one."""
    flat = " ".join(text.split())
    return "".join(char if char.isprintable() else "?" for char in flat)[:400]
