"""Small models and packed batches for the tests of this folder."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from drivetrain.config.model import ModelConfig
from drivetrain.engine.model.batch import Batch, check_batch
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 24,
    "vocab_size": 61,
    "init_method_std": 0.2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_gqa_untied": {"num_query_groups": 2, "untie_embeddings_and_output_weights": True},
    "llama_bias": {"add_bias_linear": True, "ffn_hidden_size": 40},
    "llama_wide_heads": {"kv_channels": 12, "num_query_groups": 1},
    "llama3_scaling": {
        "use_rope_scaling": True,
        "rotary_base": 500.0,
        "rope_scaling_factor": 4.0,
        "rope_scaling_original_max_position_embeddings": 16,
        "max_position_embeddings": 64,
    },
    "qwen3": {"qk_layernorm": True, "num_query_groups": 2, "kv_channels": 16, "norm_epsilon": 1e-6},
    "gpt2": {
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "activation_func": "gelu",
        "add_bias_linear": True,
        "max_position_embeddings": 40,
    },
    "gpt2_untied": {
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "activation_func": "gelu",
        "add_bias_linear": True,
        "ffn_hidden_size": 48,
        "untie_embeddings_and_output_weights": True,
    },
}


def model_of(family: str, **changes: Any) -> ModelConfig:
    return ModelConfig(**(SIZES | FAMILIES[family] | changes))


def decoder_of(model: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 3) -> Decoder:
    """A decoder whose norms and biases are random too, so that none of them can be left out unnoticed."""
    decoder = Decoder(model, dtype)
    initialize(decoder, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return decoder.eval()


def packed_batch(
    rows: Sequence[Sequence[int]], vocab_size: int = 61, *, seed: int = 0, valid: float = 0.8
) -> Batch:
    """Random tokens in documents of the given lengths; each row's lengths sum to the same S."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [length for row in rows for length in row]
    shape = (len(rows), sum(rows[0]))
    position_ids = torch.cat([torch.arange(length) for length in lengths]).view(shape)
    loss_mask = torch.rand(shape, generator=generator) < valid
    batch = Batch(
        token_ids=torch.randint(vocab_size, shape, generator=generator),
        labels=torch.randint(vocab_size, shape, generator=generator),
        loss_mask=loss_mask,
        position_ids=position_ids,
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        num_valid_tokens=int(loss_mask.sum()),
        sum_squared_lengths=sum(length**2 for length in lengths),
    )
    check_batch(batch, vocab_size)
    return batch


def gradients_of(decoder: Decoder, *batches: Batch) -> dict[str, torch.Tensor]:
    """Gradients of the summed losses of ``batches``, one backward each."""
    decoder.zero_grad(set_to_none=True)
    for batch in batches:
        decoder.loss_sum(batch).backward()
    gradients = {}
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, f"no gradient reaches {name}"
        gradients[name] = parameter.grad.clone()
    return gradients
