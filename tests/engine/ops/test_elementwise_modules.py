"""Modules of the elementwise operators in somebody's own model."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.config.model import ModelConfig
from drivetrain.engine.model.rotary import inverse_frequencies, rotate, rotation
from drivetrain.engine.ops.modules_elementwise import (
    AddLayerNorm,
    AddRMSNorm,
    BiasDropoutAdd,
    GatedMLP,
    LayerNorm,
    LlamaScaling,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
)
from drivetrain.engine.ops.selection import Selection
from drivetrain.errors import DrivetrainError

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    # Dynamo makes an object of what it traces.
    pytest.mark.filterwarnings(
        "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
    ),
    # Dynamo looks at every tensor that it meets, and hides this one warning itself, unless warnings are errors.
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"
    ),
]

DOCS = Path(__file__).resolve().parents[3] / "docs" / "ops-elementwise.md"


class Block(nn.Module):
    """A layer that has all of them."""

    def __init__(self, selection: Selection) -> None:
        super().__init__()
        self.norm = RMSNorm(16, selection=selection)
        self.add_norm = AddRMSNorm(16, selection=selection)
        self.centred = LayerNorm(16, selection=selection)
        self.add_centred = AddLayerNorm(16, selection=selection)
        self.rotary = RotaryEmbedding(8, selection=selection)
        self.mlp = SwiGLU(16, 24, selection=selection)
        self.dropout = BiasDropoutAdd(0.1, selection=selection)

    def forward(self, x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        """(T, 16) to (T, 16)."""
        heads = self.centred(self.norm(x)).view(x.shape[0], 2, 8)
        query, key = self.rotary(heads, heads, torch.arange(x.shape[0]))
        normed, total = self.add_norm((query * key).flatten(1), x)
        normed, total = self.add_centred(self.mlp(normed), total)
        out: torch.Tensor = self.dropout(normed, total, seed=seed)
        return out


def test_a_model_of_them_trains_and_every_parameter_moves() -> None:
    torch.manual_seed(0)
    selection = Selection()
    block = Block(selection)
    block(torch.randn(5, 16), torch.tensor([1])).square().sum().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in block.parameters())
    assert {name for name, _ in selection.served} == {
        "rms_norm",
        "add_rms_norm",
        "layer_norm",
        "add_layer_norm",
        "rotary",
        "glu",
        "bias_dropout_add",
    }
    assert {backend for _, backend in selection.served} == {"eager"}


def test_a_model_of_them_is_one_graph_when_compiled() -> None:
    torch.manual_seed(0)
    block = Block(Selection())
    x, seed = torch.randn(5, 16), torch.tensor([1])
    plain = block(x, seed)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, seed), plain)


@pytest.mark.long
def test_a_model_of_compiled_backends_is_one_graph_when_compiled() -> None:
    torch.manual_seed(0)
    names = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "rotary", "glu", "bias_dropout_add")
    block = Block(Selection(requested=dict.fromkeys(names, "inductor")))
    x, seed = torch.randn(5, 16), torch.tensor([1])
    plain = block(x, seed)
    torch.testing.assert_close(torch.compile(block, fullgraph=True)(x, seed), plain)


def test_a_backend_that_cannot_serve_is_refused_inside_compiled_code_too() -> None:
    module = RMSNorm(16, selection=Selection(requested={"rms_norm": "nobody"}))
    with pytest.raises(Exception, match="there is no such backend"):
        torch.compile(module, fullgraph=True, backend="aot_eager")(torch.randn(5, 16))


def test_norms_equal_torchs() -> None:
    x, residual = torch.randn(4, 16), torch.randn(4, 16)
    torch.testing.assert_close(RMSNorm(16)(x), F.rms_norm(x, (16,), None, 1e-6))
    torch.testing.assert_close(RMSNorm(16, offset=1.0)(x), F.rms_norm(x, (16,), None, 1e-6))
    torch.testing.assert_close(LayerNorm(16)(x), F.layer_norm(x, (16,)))
    for module, plain in ((AddRMSNorm(16), RMSNorm(16)), (AddLayerNorm(16), LayerNorm(16))):
        normed, total = module(x, residual)
        torch.testing.assert_close(total, x + residual)
        torch.testing.assert_close(normed, plain(total))


@pytest.mark.parametrize("scaled", [False, True])
def test_rotary_embedding_equals_the_models(scaled: bool) -> None:
    model = ModelConfig(
        num_layers=1,
        hidden_size=128,
        ffn_hidden_size=64,
        num_attention_heads=2,
        seq_length=32,
        vocab_size=64,
        rotary_base=500_000.0,
        use_rope_scaling=scaled,
    )
    scaling = LlamaScaling(
        model.rope_scaling_factor,
        model.rope_scaling_low_freq_factor,
        model.rope_scaling_high_freq_factor,
        model.rope_scaling_original_max_position_embeddings,
    )
    module = RotaryEmbedding(64, 500_000.0, scaling=scaling if scaled else None)
    places = torch.tensor([0, 1, 7, 3000, 30_000])
    frequencies = inverse_frequencies(model, places.device, torch.float64)
    ours = module.base ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    torch.testing.assert_close(scaling.scaled(ours) if scaled else ours, frequencies)
    x = torch.randn(5, 2, 64, dtype=torch.float64)
    query, _ = module(x, x, places)
    torch.testing.assert_close(query, rotate(x, rotation(model, places, torch.float64)))


def test_scaling_changes_slow_pairs_and_leaves_quick_ones() -> None:
    frequencies = 500_000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    scaled = LlamaScaling().scaled(frequencies)
    assert torch.equal(scaled[:20], frequencies[:20])
    torch.testing.assert_close(scaled[-20:], frequencies[-20:] / 8)
    assert bool((scaled[1:] < scaled[:-1]).all())


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("silu", F.silu),
        ("gelu_tanh", lambda gate: F.gelu(gate, approximate="tanh")),
        ("gelu_erf", F.gelu),
    ],
)
def test_the_first_half_of_the_packed_product_is_the_gate(activation: str, function) -> None:
    module = GatedMLP(8, 12, activation=activation, bias=True)
    x = torch.randn(3, 8)
    weight, bias = module.gate_up.weight, module.gate_up.bias
    gate, up = F.linear(x, weight[:12], bias[:12]), F.linear(x, weight[12:], bias[12:])
    torch.testing.assert_close(module(x), module.down(function(gate) * up))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GatedMLP(8, 12, activation="relu"), "silu, gelu_tanh, gelu_erf"),
        (lambda: RotaryEmbedding(8, rotary_size=3), "an even number from 2"),
        (lambda: RotaryEmbedding(8, rotary_size=10), "10 rotary features of 8"),
        (lambda: RotaryEmbedding(8, style="neox"), "half and interleaved"),
        (lambda: LlamaScaling(low=4.0, high=4.0), "below high"),
        (lambda: RMSNorm(8)(torch.zeros(2, 9)), "needs \\(9,\\)"),
        (lambda: RMSNorm(8, casting="never")(torch.zeros(2, 8)), "after_weight and before_weight"),
        (lambda: AddRMSNorm(8)(torch.zeros(2, 8), torch.zeros(1, 8)), "residual has the shape"),
        (lambda: LayerNorm(8)(torch.zeros(2, 9)), "needs \\(9,\\)"),
        (
            lambda: RotaryEmbedding(8)(torch.zeros(3, 2, 8), torch.zeros(3, 1, 8), torch.arange(4)),
            "cosine and sine",
        ),
        (
            lambda: RotaryEmbedding(8)(torch.zeros(3, 2, 4), torch.zeros(3, 1, 4), torch.arange(3)),
            "turn 8 features",
        ),
        (
            lambda: BiasDropoutAdd(0.5)(torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(7)),
            "have the shapes",
        ),
        (
            lambda: BiasDropoutAdd(0.5)(torch.zeros(2, 8), torch.zeros(2, 8), seed=torch.zeros(1)),
            "one int64",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_words(make, message: str) -> None:
    with pytest.raises(DrivetrainError, match=message):
        make()


def test_examples_in_the_docs_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        # Of exec: a document of ours, in a namespace of its own.
        exec(compile(block, str(DOCS), "exec"), {})
