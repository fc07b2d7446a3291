"""Norms, rotary embedding and linear layers against their definitions."""

import math

import pytest
import torch
from model_examples import model_of

from differences import relative_difference
from drivetrain.engine.model.linear import Linear
from drivetrain.engine.model.norm import LayerNorm, RMSNorm
from drivetrain.engine.model.rotary import inverse_frequencies, rotate, rotation


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_rms_norm_equals_its_definition():
    norm = RMSNorm(16, 1e-3).double()
    x = random(5, 16, seed=1)
    with torch.no_grad():
        norm.weight.copy_(random(16, seed=2))
    wanted = x / (x.square().mean(dim=-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_statistics_of_a_bf16_norm_are_taken_in_fp32(kind):
    norm = kind(4096, 1e-5)
    with torch.no_grad():
        norm.weight.fill_(1.0)
        if kind is LayerNorm:
            norm.bias.zero_()
    # In bf16 a sum of 4096 squares stops growing at 256 or loses its small terms: off by far more than this.
    x = (1 + 0.1 * random(3, 4096, dtype=torch.float32)).to(torch.bfloat16)
    assert norm(x).dtype == torch.bfloat16
    assert relative_difference(norm(x), norm.double()(x.double())) < 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_linear_layer_computes_in_the_dtype_of_its_input_and_keeps_fp32_masters(dtype):
    layer = Linear(8, 6, bias=True)
    with torch.no_grad():
        layer.weight.copy_(random(6, 8))
        layer.bias.copy_(random(6))
    out = layer(random(3, 8, dtype=dtype))
    out.sum().backward()
    assert out.dtype == dtype
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32


def test_rotation_keeps_norms_and_depends_on_differences_only():
    model = model_of("llama", kv_channels=10)
    q, k = random(7, 3, 10, seed=1), random(7, 3, 10, seed=2)
    near = rotation(model, torch.arange(7), torch.float64)
    far = rotation(model, torch.arange(7) + 1000, torch.float64)
    torch.testing.assert_close(rotate(q, near).norm(dim=-1), q.norm(dim=-1), rtol=1e-12, atol=1e-12)
    scores = torch.einsum("thk,shk->hts", rotate(q, near), rotate(k, near))
    shifted = torch.einsum("thk,shk->hts", rotate(q, far), rotate(k, far))
    torch.testing.assert_close(scores, shifted, rtol=1e-9, atol=1e-9)


def test_rotation_leaves_its_input_alone():
    q = random(7, 3, 8)
    before = q.clone()
    rotate(q, rotation(model_of("llama"), torch.arange(7), torch.float64))
    assert torch.equal(q, before)


def test_llama3_scaling_leaves_short_wavelengths_and_slows_long_ones_down():
    model = model_of(
        "llama",
        kv_channels=128,
        use_rope_scaling=True,
        rotary_base=500_000.0,
        rope_scaling_original_max_position_embeddings=8192,
        max_position_embeddings=131_072,
    )
    device = torch.device("cpu")
    plain = inverse_frequencies(model.model_copy(update={"use_rope_scaling": False}), device, torch.float64)
    scaled = inverse_frequencies(model, device, torch.float64)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    assert torch.equal(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8, rtol=1e-12, atol=0)
    between = ~short & ~long
    assert between.sum() >= 3
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()
