"""What holds for every configuration, override and file."""

import re
from pathlib import Path

import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st

from configuration_strategies import schema_valid_configs, value_of
from drivetrain.config import (
    RunConfig,
    config_hash,
    differing_leaves,
    leaf_values,
    leaves,
    load_config,
    parse_config,
    to_toml,
)
from drivetrain.errors import ConfigurationError

PATHS = st.sampled_from(sorted(leaves()))
WORDS = st.one_of(
    st.text(max_size=20),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["none", "true", "[", "{a=1}", "'", '"""', "1979-05-27", "0x" + "f" * 5000, "9" * 5000, "1\nb=2"]
    ),
)
TOML_VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.dates(), st.datetimes()),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


def accepted_or_refused(source: str, overrides: list[str]) -> RunConfig | None:
    """Load; a refusal must be a ConfigurationError with words of our own."""
    try:
        return load_config(source, overrides).config
    except ConfigurationError as error:
        problems = error.problems
    assert problems
    text = "\n".join(problems)
    assert not re.search(r"pydantic|Traceback|Input should", text), text
    return None


@given(config=schema_valid_configs())
@settings(max_examples=100)
def test_a_written_configuration_reads_back_the_same(config: RunConfig) -> None:
    text = to_toml(config)
    assert parse_config(text) == config
    assert to_toml(parse_config(text)) == text


@given(config=schema_valid_configs())
@settings(max_examples=20)
def test_a_written_configuration_survives_the_disk(config: RunConfig, tmp_path_factory: object) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / "survives.toml"  # type: ignore[attr-defined]
    path.write_bytes(to_toml(config).encode("utf-8"))
    assert load_config(str(path)).config == config


@given(config=schema_valid_configs(), data=st.data())
@settings(max_examples=50)
def test_the_hash_differs_exactly_when_a_leaf_differs(config: RunConfig, data: st.DataObject) -> None:
    leaf = leaves()[data.draw(PATHS)]
    value = data.draw(value_of(leaf))
    section = getattr(config, leaf.section).model_copy(update={leaf.name: value})
    other = RunConfig.model_validate(
        {**{name: getattr(config, name) for name in RunConfig.model_fields}, leaf.section: section}
    )
    before = getattr(getattr(config, leaf.section), leaf.name)
    if before == value:
        assert differing_leaves(config, other) == {}
        assert config_hash(config) == config_hash(other)
    else:
        assert differing_leaves(config, other) == {leaf.path: (before, value)}
        assert config_hash(config) != config_hash(other)


@given(overrides=st.lists(st.text(max_size=40), max_size=3))
def test_any_text_as_override_is_accepted_or_refused_in_words(overrides: list[str]) -> None:
    accepted_or_refused("llama-2m", overrides)


@given(overrides=st.lists(st.builds("{}={}".format, PATHS, WORDS), max_size=4))
@settings(max_examples=300)
def test_any_value_of_any_leaf_is_accepted_or_refused_in_words(overrides: list[str]) -> None:
    config = accepted_or_refused("llama-2m", overrides)
    if config is not None:
        assert parse_config(to_toml(config)) == config


@given(source=st.text(max_size=30))
def test_any_text_as_source_is_accepted_or_refused_in_words(source: str) -> None:
    accepted_or_refused(source, [])


@given(content=st.binary(max_size=60))
@settings(max_examples=50)
def test_any_bytes_as_file_are_accepted_or_refused_in_words(content: bytes, tmp_path_factory: object) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / "bytes.toml"  # type: ignore[attr-defined]
    path.write_bytes(content)
    accepted_or_refused(str(path), [])


@given(
    content=st.dictionaries(
        st.sampled_from([*RunConfig.model_fields, "preset", "schema"]) | st.text(min_size=1, max_size=5),
        TOML_VALUES
        | st.dictionaries(PATHS.map(lambda path: path.partition(".")[2]), TOML_VALUES, max_size=3),
        max_size=4,
    )
)
@settings(max_examples=100)
def test_any_toml_is_accepted_or_refused_in_words(
    content: dict[str, object], tmp_path_factory: object
) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / "any.toml"  # type: ignore[attr-defined]
    path.write_text(tomlkit.dumps(content), encoding="utf-8")
    accepted_or_refused(str(path), ["model.num_layers=2"])


def test_an_absent_leaf_is_written_as_a_comment() -> None:
    config = load_config("llama-2m").config
    text = to_toml(config)
    for leaf, value in leaf_values(config):
        expected = f"# {leaf.name} = none\n" if value is None else f"{leaf.name} = "
        assert f"\n{expected}" in text
    assert text.startswith("schema = 1\n")
