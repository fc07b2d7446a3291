"""The presets are what their names say."""

import re

import pytest

from drivetrain.config import idle_fields, load_config, preset_names, total_tokens, violations
from drivetrain.measure.parameters import parameter_count

EXPECTED = {
    *("llama-2m", "llama-10m", "llama-50m", "llama-125m"),
    *("llama2-7b", "llama2-13b", "llama3-8b", "llama3-70b", "llama3-405b"),
    *("gpt2-124m", "gpt3-175b"),
}

# Numbers of parameters of the published weights.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "gpt2-124m": 124_439_808,
}


def test_every_promised_preset_exists() -> None:
    assert set(preset_names()) == EXPECTED


def test_presets_are_listed_by_family_and_size() -> None:
    llamas = [name for name in preset_names() if name.startswith("llama-")]
    assert llamas == ["llama-2m", "llama-10m", "llama-50m", "llama-125m"]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_preset_breaks_no_rule_on_one_process(name: str) -> None:
    loaded = load_config(name)
    assert violations(loaded.config) == []
    assert idle_fields(loaded.config) == []
    assert loaded.name == name


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_preset_has_about_the_parameters_of_its_name(name: str) -> None:
    size = re.fullmatch(r".*-(\d+)([mb])", name)
    assert size is not None
    promised = int(size[1]) * {"m": 10**6, "b": 10**9}[size[2]]
    total = parameter_count(load_config(name).config.model).total
    assert abs(total / promised - 1) < 0.15


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_published_model_has_exactly_its_parameters(name: str) -> None:
    assert parameter_count(load_config(name).config.model).total == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "trillions"),
    [("llama2-7b", 2.0), ("llama2-13b", 2.0), ("llama3-8b", 15.0), ("llama3-405b", 15.6), ("gpt3-175b", 0.3)],
)
def test_a_published_model_trains_on_as_many_tokens_as_published(name: str, trillions: float) -> None:
    assert total_tokens(load_config(name).config) == pytest.approx(trillions * 1e12, rel=1e-3)


def test_the_smallest_preset_is_minutes_on_two_cores() -> None:
    # 2M tokens at the 10-15k tokens/s of two slow cores are about three minutes.
    assert total_tokens(load_config("llama-2m").config) <= 2.1e6


@pytest.mark.parametrize("name", ["llama-2m", "llama-10m", "llama-50m", "llama-125m"])
def test_widths_suit_vector_units(name: str) -> None:
    model = load_config(name).config.model
    assert model.ffn_size % 64 == 0
    assert model.head_size in (32, 64)
    assert not model.untie_embeddings_and_output_weights
