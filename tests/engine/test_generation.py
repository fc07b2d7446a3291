"""Text from a model: what the sampler accepts, and that its draws are repeatable."""

from typing import Any

import pytest
import torch

from drivetrain.config import ModelConfig
from drivetrain.engine.generation import generate
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.errors import DrivetrainError

MODEL = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=32)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    decoder = Decoder(MODEL, torch.float32)
    initialize(decoder, 1)
    return decoder


def draw(decoder: Decoder, **changes: Any) -> list[int]:
    settings: dict[str, Any] = {
        "max_new_tokens": 12,
        "context_length": 8,
        "temperature": 1.0,
        "top_k": 0,
        "seed": 3,
        "end_id": None,
        "vocab_size": 32,
    }
    return list(generate(decoder, [1, 2], **{**settings, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"temperature": 1e-320},
        {"temperature": -1.0},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 10**30},
    ],
)
def test_settings_that_nothing_can_be_drawn_with_are_refused(
    decoder: Decoder, changes: dict[str, Any]
) -> None:
    with pytest.raises(DrivetrainError):
        draw(decoder, **changes)


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1.0, 1e4])
def test_every_legal_temperature_draws_the_same_tokens_for_the_same_seed(
    decoder: Decoder, temperature: float
) -> None:
    tokens = draw(decoder, temperature=temperature)
    assert len(tokens) == 12
    assert all(0 <= token < 32 for token in tokens)
    assert tokens == draw(decoder, temperature=temperature)


def test_the_lowest_temperature_takes_the_likeliest_token(decoder: Decoder) -> None:
    assert draw(decoder, temperature=1e-4) == draw(decoder, temperature=0.0)
