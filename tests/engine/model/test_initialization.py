"""Initial weights depend on the seed and the parameter's name alone."""

import math

import pytest
import torch
from model_examples import FAMILIES, model_of

from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize


def initial_state(model, seed=7, dtype=torch.float32):
    decoder = Decoder(model, dtype)
    initialize(decoder, seed)
    return decoder.state_dict()


def test_a_deeper_model_starts_with_the_same_first_layers_but_for_the_residual_scale():
    shallow, deep = (initial_state(model_of("llama", num_layers=layers)) for layers in (2, 8))
    for name, tensor in shallow.items():
        scale = 2.0 if name.endswith(("attention.output.weight", "mlp.down.weight")) else 1.0
        torch.testing.assert_close(deep[name] * scale, tensor, rtol=1e-6, atol=0)


def test_numbers_do_not_depend_on_other_parameters_threads_or_compute_dtype():
    plain = initial_state(model_of("llama"))
    other = initial_state(model_of("qwen3", kv_channels=8, num_query_groups=4))
    for name, tensor in plain.items():
        assert torch.equal(tensor, other[name]), name
    for name, tensor in initial_state(model_of("llama"), dtype=torch.float64).items():
        assert torch.equal(tensor, plain[name].double()), name


def test_the_order_of_parameters_and_the_state_of_the_global_generator_do_not_matter():
    wanted = initial_state(model_of("llama"))
    torch.manual_seed(99)
    decoder = Decoder(model_of("llama"), torch.float32)
    for name in list(decoder._modules)[::-1]:
        decoder._modules[name] = decoder._modules.pop(name)
    before = torch.get_rng_state()
    initialize(decoder, 7)
    assert torch.equal(torch.get_rng_state(), before)
    assert list(decoder.state_dict()) != list(wanted)
    for name, tensor in decoder.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


def test_the_first_numbers_stay_what_they_are():
    found = initial_state(model_of("llama"), seed=1234)["embedding.weight"][0, :3]
    torch.testing.assert_close(found, torch.tensor([0.10538901, 0.14695702, 0.12280078]), rtol=0, atol=1e-7)


def test_seeds_and_names_give_different_numbers():
    first, second = initial_state(model_of("llama"), 1), initial_state(model_of("llama"), 2)
    assert not torch.equal(first["embedding.weight"], second["embedding.weight"])
    assert not torch.equal(first["blocks.0.mlp.up.weight"], first["blocks.1.mlp.up.weight"])
    assert not torch.equal(first["blocks.0.mlp.up.weight"], first["blocks.0.mlp.gate.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_are_those_of_the_configuration(family):
    model = model_of(family, hidden_size=128, num_layers=8, vocab_size=500, init_method_std=0.05)
    for name, tensor in initial_state(model).items():
        owner, kind = name.split(".")[-2:]
        if kind == "bias":
            assert tensor.abs().max() == 0, name
        elif "norm" in owner:
            assert (tensor == 1).all(), name
        else:
            residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
            std = 0.05 / math.sqrt(16) if residual else 0.05
            assert tensor.std().item() == pytest.approx(std, rel=0.1), name
            assert abs(tensor.mean().item()) < std * 0.1, name


def test_a_meta_model_is_refused():
    with torch.device("meta"):
        decoder = Decoder(model_of("llama"), torch.float32)
    with pytest.raises(AssertionError, match="meta"):
        initialize(decoder, 1)
