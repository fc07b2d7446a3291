"""Weights are moved by exactly one unit in the last place of the compute dtype, the same on every rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.config import ModelConfig
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.parallel.gradient_sync import Held
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.perturbation import perturb_weights, unit_in_the_last_place

MODEL = ModelConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=8,
    vocab_size=50,
    add_bias_linear=True,
)


def decoder() -> Decoder:
    made = Decoder(MODEL, torch.bfloat16)
    initialize(made, 3)
    return made


def whole(made: Decoder) -> dict[str, Held]:
    """The parameters as a rank holds them that holds all."""
    return {name: Held(value, Placement(tuple(value.shape))) for name, value in made.named_parameters()}


@given(st.floats(min_value=2.0**-100, max_value=2.0**100, width=32))
def test_the_unit_is_the_distance_to_the_next_number(value: float) -> None:
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        rounded = torch.tensor([value], dtype=torch.float32).to(dtype)
        following = (rounded.view(bits) + 1).view(dtype)
        unit = unit_in_the_last_place(rounded.float(), dtype)
        assert unit.item() == following.double().item() - rounded.double().item()
        assert torch.equal(unit, unit_in_the_last_place(-rounded.float(), dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_moves_by_one_unit_up_or_down(dtype: torch.dtype) -> None:
    before, after = decoder(), decoder()
    perturb_weights(whole(after), 5, dtype)
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        moved = (new - old).detach().abs()
        unit = unit_in_the_last_place(old.detach(), dtype)
        if name.endswith("bias"):
            assert torch.equal(new, old), "a weight of 0 has no neighbour that matters"
        else:
            # One rounding of the fp32 sum, where it crosses into the next binade.
            assert torch.allclose(moved, unit, rtol=1e-4, atol=0), name
            assert (moved > 0).all()
            up = ((new - old) > 0).float().mean()
            assert 0.1 < up < 0.9 or new.numel() < 32, "both directions"


def test_the_signs_are_those_of_the_seed() -> None:
    first, again, other = decoder(), decoder(), decoder()
    torch.manual_seed(1)
    perturb_weights(whole(first), 5, torch.bfloat16)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    perturb_weights(whole(again), 5, torch.bfloat16)
    assert torch.equal(state, torch.get_rng_state()), "nothing is drawn from the run's generators"
    perturb_weights(whole(other), 6, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_a_unit_of_the_compute_dtype_survives_the_cast() -> None:
    before, after = decoder(), decoder()
    perturb_weights(whole(after), 5, torch.bfloat16)
    same = (before.embedding.weight.bfloat16() == after.embedding.weight.bfloat16()).float().mean()
    assert same < 0.01
