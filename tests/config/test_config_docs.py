"""The page on the configuration is fresh, and each leaf is described, limited and read."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.config import BASIC_RULES, Leaf, leaves, load_config, operator_fields
from drivetrain.config import docs as config_docs
from drivetrain.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "drivetrain"

# A leaf that is derived when absent is read through the property or function that derives it.
READ_THROUGH = {
    "model.ffn_hidden_size": "model.ffn_size",
    "memory.recompute_modules": "memory.recomputed_parts",
    "model.num_query_groups": "model.query_groups",
    "model.kv_channels": "model.head_size",
    "model.max_position_embeddings": "model.max_positions",
    "parallelism.data_parallel_size": "data_parallel_size()",
    "parallelism.tensor_model_parallel_size": "layout_of()",
    "parallelism.pipeline_model_parallel_size": "layout_of()",
    "parallelism.hybrid_shard_size": "layout_of()",
    "parallelism.virtual_pipeline_model_parallel_size": "stage_plan()",
    "parallelism.pipeline_model_parallel_layout": "stage_plan()",
    "data.seed": "data_seed()",
    "profiler.profile_ranks": "profiled_ranks()",
    "lr_schedule.lr_decay_tokens": "decay_tokens()",
    "lr_schedule.lr_wsd_decay_tokens": "wsd_decay_length()",
    **{f"fusion.{name}": "chosen_backend()" for name in operator_fields()},
}


def test_the_page_is_fresh() -> None:
    written = (ROOT / config_docs.PATH).read_text(encoding="utf-8")
    assert written == config_docs.render(), "run: python -m drivetrain.config.docs"


def test_the_page_holds_each_leaf_and_rule_once() -> None:
    page = config_docs.render()
    for leaf in leaves().values():
        section = page.partition(f"\n## {leaf.section}\n")[2].partition("\n## ")[0]
        assert section.count(f"\n| `{leaf.name}` |") == 1, leaf.path
    for rule in BASIC_RULES:
        assert page.count(f"\n| `{rule.id}` |") == 1


@pytest.mark.parametrize("leaf", leaves().values(), ids=lambda leaf: leaf.path)
def test_a_leaf_has_a_docstring(leaf: Leaf) -> None:
    assert leaf.help.endswith(".")
    assert len(leaf.help.split()) >= 3 or leaf.name in leaf.help


@pytest.mark.parametrize("leaf", leaves().values(), ids=lambda leaf: leaf.path)
def test_a_leaf_refuses_what_is_outside_its_range(leaf: Leaf) -> None:
    for override in outside(leaf):
        with pytest.raises(ConfigurationError, match=leaf.path):
            load_config("llama-2m", [f"{leaf.path}={override}"])


def outside(leaf: Leaf) -> Iterator[str]:
    """Values just outside the range of the leaf; a leaf without a range on some side fails here."""
    if leaf.kind in ("whole number", "number"):
        signs = dict(leaf.bounds)
        assert len(signs) == 2, f"{leaf.path} has no range: {leaf.bounds}"
        for sign, limit in signs.items():
            step = {">=": -1, ">": 0, "<=": 1, "<": 0}[sign]
            yield str(limit + step)
    elif leaf.kind == "true or false":
        yield "perhaps"
    elif leaf.kind == "choice":
        assert len(leaf.choices) >= 2
        yield "neither"
    else:
        yield ""


def reads_outside_config() -> set[str]:
    """``section.leaf`` for each attribute read on something named like a section, ``name()`` for each call."""
    found = set()
    for path in SOURCES.rglob("*.py"):
        if path.is_relative_to(SOURCES / "config"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value
                if isinstance(owner, ast.Name):
                    found.add(f"{owner.id}.{node.attr}")
                elif isinstance(owner, ast.Attribute):
                    found.add(f"{owner.attr}.{node.attr}")
            elif isinstance(node, ast.Call):
                function = node.func
                if isinstance(function, ast.Name):
                    found.add(f"{function.id}()")
                elif isinstance(function, ast.Attribute):
                    found.add(f"{function.attr}()")
    return found


def test_each_leaf_has_a_reader() -> None:
    reads = reads_outside_config()
    unread = [path for path in leaves() if path not in reads and READ_THROUGH.get(path, path) not in reads]
    assert not unread, f"nothing outside config/ reads {', '.join(unread)}"
