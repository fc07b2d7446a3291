"""Parameter counts against published totals and against the module itself."""

import pytest
import torch

from drivetrain.config import ModelConfig, load_config
from drivetrain.engine.model.decoder import Decoder
from drivetrain.measure.parameters import parameter_count

PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "gpt2-124m": 124_439_808,
}

SMALL = {"num_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 97}
VARIANTS = {
    "llama": {},
    "grouped query heads": {"num_query_groups": 2},
    "wide heads": {"kv_channels": 20, "num_query_groups": 1},
    "untied": {"untie_embeddings_and_output_weights": True},
    "query and key norms": {"qk_layernorm": True, "num_query_groups": 2},
    "biases with a gate": {"add_bias_linear": True, "num_query_groups": 2},
    "odd mlp width": {"ffn_hidden_size": 101},
    "gpt": {
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "activation_func": "gelu",
        "add_bias_linear": True,
        "max_position_embeddings": 40,
    },
    "gpt without biases": {
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "activation_func": "gelu",
    },
}


@pytest.mark.parametrize(("preset", "total"), PUBLISHED.items())
def test_presets_have_the_published_number_of_parameters(preset: str, total: int) -> None:
    assert parameter_count(load_config(preset).config.model).total == total


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_count_equals_the_module(changes: dict[str, object]) -> None:
    model = ModelConfig.model_validate({**SMALL, **changes})
    with torch.device("meta"):
        decoder = Decoder(model, torch.float32)
    count = parameter_count(model)
    sizes = {name: parameter.numel() for name, parameter in decoder.named_parameters()}

    def of(*words: str) -> int:
        return sum(size for name, size in sizes.items() if any(word in name for word in words))

    assert count.total == sum(sizes.values())
    assert count.attention == of(".attention.")
    assert count.mlp == of(".mlp.")
    assert count.normalization == of("attention_norm.", "mlp_norm.", "final_norm.")
    assert count.position_embedding == of("position_embedding.")
    assert count.token_embedding == sizes["embedding.weight"]
    assert count.output == sizes.get("output.weight", 0)
    assert count.block_matrices == sum(
        p.numel() for name, p in decoder.named_parameters() if name.startswith("blocks.") and p.dim() == 2
    )


def test_components_do_not_overlap_and_a_tied_matrix_is_counted_once() -> None:
    tied = ModelConfig.model_validate(SMALL)
    untied = tied.model_copy(update={"untie_embeddings_and_output_weights": True})
    table = 97 * 48
    assert parameter_count(untied).total - parameter_count(tied).total == table
    assert parameter_count(tied).output_product == parameter_count(untied).output_product == table
    assert (
        parameter_count(tied).total == parameter_count(tied).embedding + parameter_count(tied).non_embedding
    )
