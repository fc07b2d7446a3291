"""``docs/config.md``, written from the schema, the presets and the rules.

``python -m drivetrain.config.docs`` in the repository's root rewrites it; a test keeps it fresh.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from drivetrain.config.basic_rules import BASIC_RULES
from drivetrain.config.leaves import Leaf, leaves, section_types
from drivetrain.config.load import load_config
from drivetrain.config.presets import preset_names
from drivetrain.config.schema import RunConfig

__all__ = ["PATH", "render"]

PATH = Path("docs") / "config.md"
"""Where the page lies in the repository."""

_INTRODUCTION = """\
# Configuration

This page is generated from the schema: `python -m drivetrain.config.docs` writes it.

A configuration is a preset's name, the path of a TOML file or a run directory, followed by overrides:

```
drivetrain train llama-10m training.train_iters=200 optimizer.lr=1e-3
drivetrain train my.toml data.data_path=corpus/books run.name=books
drivetrain check runs/20261129-141503-llama-10m-3f2a
```

A TOML file has a table for each section. With `preset = "llama-10m"` at its top it starts from a preset and
gives only what differs:

```toml
preset = "llama-10m"

[training]
train_iters = 5000

[data]
data_path = "corpus/books"
```

- An override is `section.field=value`; of two for one field the later wins. Values are TOML; text needs no
  quotes. Whole numbers may be written as `1_000_000` or `1e6`.
- A field whose default is `none` may be absent. The override `none` takes its value away.
- Unknown sections and fields, wrong types and values out of range are errors. All of them are reported at
  once, each with the nearest legal value. Nothing that you wrote is changed in silence.
- A field that another one leaves nothing to decide (`min_lr` with a constant rate) is no error. `drivetrain check`
  and `drivetrain train` name it: `no effect: ...`.
- What is derived because it is absent is shown by `drivetrain check` with the reason. A run directory holds
  the whole configuration in `config.toml`.
"""


def render() -> str:
    """The text of the page."""
    parts = [_INTRODUCTION, _presets()]
    for section, kind in section_types().items():
        note = RunConfig.model_fields[section].description or ""
        parts.append(f"## {section}\n\n{' '.join((kind.__doc__ or note).split())}\n\n{_fields(section)}")
    parts.append(_rules())
    return "\n".join(parts)


def _presets() -> str:
    lines = [
        "## Presets\n",
        "| preset | layers | hidden | heads | groups | FFN | sequence | vocabulary | batch | steps |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in preset_names():
        config = load_config(name).config
        model, training = config.model, config.training
        cells = (
            *(model.num_layers, model.hidden_size, model.num_attention_heads, model.query_groups),
            *(model.ffn_size, model.seq_length, model.vocab_size),
            *(training.global_batch_size, training.train_iters),
        )
        lines.append(f"| `{name}` | " + " | ".join(f"{cell:,}" for cell in cells) + " |")
    lines.append(
        "\nThe batch is in sequences. Without `data.data_path` a preset trains on the source of the Python "
        "standard library, with a tokenizer trained on the spot."
    )
    return "\n".join(lines) + "\n"


def _fields(section: str) -> str:
    lines = ["| field | type | range | default | |", "|---|---|---|---|---|"]
    lines += [
        f"| `{leaf.name}` | {leaf.kind} | {_escape(_range(leaf))} | {_default(leaf)} | {_escape(leaf.help)} |"
        for leaf in leaves().values()
        if leaf.section == section
    ]
    return "\n".join(lines) + "\n"


def _range(leaf: Leaf) -> str:
    if leaf.kind == "choice":
        return ", ".join(f"`{choice}`" for choice in leaf.choices)
    if leaf.kind == "true or false":
        return "`true`, `false`"
    if leaf.pattern is not None:
        return f"`{leaf.pattern}`, such as `{leaf.examples[0]}`"
    if leaf.kind == "text":
        return "not empty"
    return " and ".join(f"{sign} {_number(limit)}" for sign, limit in leaf.bounds)


def _default(leaf: Leaf) -> str:
    if leaf.required:
        return "required"
    if leaf.default is None:
        return "none"
    if isinstance(leaf.default, bool):
        return f"`{str(leaf.default).lower()}`"
    return f"`{leaf.default}`" if isinstance(leaf.default, str) else f"`{_number(leaf.default)}`"


def _number(value: int | float) -> str:
    if value == 2**63 - 1:
        return "2^63 - 1"
    return f"{value:g}" if isinstance(value, float) else f"{value:_}"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def _rules() -> str:
    return "\n".join(
        [
            "## Rules\n",
            "Conditions between fields. `drivetrain check` lists every one that is broken and exits with 1; "
            "the other commands refuse such a configuration.\n",
            "| rule | fields | condition |",
            "|---|---|---|",
            *_rule_rows(),
            "",
        ]
    )


def _rule_rows() -> Iterator[str]:
    for rule in BASIC_RULES:
        fields = ", ".join(f"`{field}`" for field in rule.fields)
        yield f"| `{rule.id}` | {fields} | {_escape(rule.doc)} |"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PATH
    path.write_text(render(), encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)
