"""The model computes the same whether its own code or operators of the registry do the work."""

from collections.abc import Mapping

import pytest
import torch
from model_examples import FAMILIES, decoder_of, gradients_of, model_of, packed_batch

from drivetrain.config import operator_fields
from drivetrain.engine.model.decoder import Block, Decoder
from drivetrain.engine.ops.selection import Selection

pytestmark = [
    # Raised by the compiler itself while it imports and traces.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

ROWS = ([5, 19], [24], [1, 1, 22])
LLAMA = {
    "rms_norm",
    "add_rms_norm",
    "rotary",
    "glu",
    "attention",
    "linear_cross_entropy",
    "qkv_product",
    "gate_up_product",
    "linear",
}
GPT = {"layer_norm", "add_layer_norm", "attention", "linear_cross_entropy", "linear"}
OF_FAMILY = {
    **dict.fromkeys(FAMILIES, LLAMA),
    # Products that have a bias stay products of their own.
    "llama_bias": LLAMA - {"qkv_product", "gate_up_product"},
    "gpt2": GPT,
    "gpt2_untied": GPT,
}


def served_by(decoder: Decoder, requested: Mapping[str, str]) -> Selection:
    selection = Selection(dict(requested))
    decoder.use_operators(selection)
    return selection


def assert_same_gradients(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], within: float
) -> None:
    # A bias of the keys shifts all scores of a query alike: its gradient is zero but for roundings.
    largest = max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        error = float((found[name] - gradient).norm() / max(gradient.norm(), 1e-4 * largest))
        assert error < within, (name, error)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_in_float64_eager_operators_give_the_loss_and_gradients_of_the_models_own_code(family: str) -> None:
    decoder, batch = decoder_of(model_of(family), torch.float64), packed_batch(ROWS)
    loss, gradients = decoder.loss_sum(batch).detach(), gradients_of(decoder, batch)
    selection = served_by(decoder, dict.fromkeys(operator_fields(), "eager"))
    assert float((decoder.loss_sum(batch).detach() - loss).abs() / loss) < 1e-13
    assert_same_gradients(gradients_of(decoder, batch), gradients, 1e-11)
    assert {operator for operator, _ in selection.served} == OF_FAMILY[family]


@pytest.mark.parametrize("operator", sorted(LLAMA | GPT))
def test_an_operator_asked_for_alone_serves_alone(operator: str) -> None:
    decoder = decoder_of(model_of("llama" if operator in LLAMA else "gpt2"))
    selection = served_by(decoder, {operator: "eager"})
    gradients_of(decoder, packed_batch(ROWS))
    assert {name for name, _ in selection.served} == {operator}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=pytest.mark.long if sampled else pytest.mark.exhaustive)
        for family, dtype, sampled in (
            ("llama_gqa_untied", torch.float32, True),
            ("llama_gqa_untied", torch.bfloat16, False),
            ("qwen3", torch.float32, False),
            ("qwen3", torch.bfloat16, True),
            ("gpt2", torch.float32, True),
            ("gpt2", torch.bfloat16, False),
        )
    ],
)
def test_what_operators_prefer_is_no_further_from_float64_than_the_models_own_code(
    family: str, dtype: torch.dtype
) -> None:
    model, batch = model_of(family), packed_batch(ROWS)
    truth = gradients_of(decoder_of(model, torch.float64), batch)
    decoder = decoder_of(model, dtype)
    own = gradients_of(decoder, batch)
    selection = served_by(decoder, dict.fromkeys(operator_fields(), "auto"))
    found = gradients_of(decoder, batch)
    if family != "gpt2":
        assert ("rms_norm", "inductor") in selection.served
    for name, exact in truth.items():
        error, of_own = (float((one[name].double() - exact).norm() / exact.norm()) for one in (found, own))
        assert error < max(3 * of_own, 1e-6), (name, error, of_own)


def test_compiled_blocks_with_operators_inside_give_the_same_gradients() -> None:
    decoder, batch = decoder_of(model_of("llama_gqa_untied")), packed_batch(ROWS)
    expected = gradients_of(decoder, batch)
    served_by(decoder, dict.fromkeys(operator_fields(), "eager"))
    decoder.compile_blocks(backend="aot_eager")
    assert_same_gradients(gradients_of(decoder, batch), expected, 1e-5)


def test_dropout_by_the_operator_takes_the_place_of_the_own_one_and_is_not_called_while_evaluating() -> None:
    decoder, batch = decoder_of(model_of("llama", hidden_dropout=0.25)), packed_batch(ROWS)
    expected = gradients_of(decoder, batch)
    selection = served_by(decoder, {"bias_dropout_add": "eager"})
    assert_same_gradients(gradients_of(decoder, batch), expected, 1e-7)
    assert not selection.served
    decoder.train()
    gradients_of(decoder, batch)
    assert selection.served == {("bias_dropout_add", "eager"): 2 * decoder.model.num_layers}
    block = decoder.blocks["0"]
    assert isinstance(block, Block)
    block.after_attention.register_forward_hook(lambda *_: pytest.fail("the own dropout was called too"))
    gradients_of(decoder, batch)
