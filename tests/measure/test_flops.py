"""The FLOP counter against torch's own count of executed products, and its conventions."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from drivetrain.config import ModelConfig
from drivetrain.engine.model.batch import Batch, whole_sequences
from drivetrain.engine.model.decoder import Decoder
from drivetrain.errors import DrivetrainError
from drivetrain.measure.flops import (
    FlopCount,
    attention_pairs,
    forward_flops,
    hardware_flops,
    model_flops,
)

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "seq_length": 12,
    "vocab_size": 97,
}
GPT: dict[str, Any] = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "activation_func": "gelu",
    "add_bias_linear": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama, as many key as query heads": {},
    "llama, grouped query heads": {"num_query_groups": 2},
    "llama, one key head and wide heads": {"num_query_groups": 1, "kv_channels": 20},
    "llama, untied": {"untie_embeddings_and_output_weights": True},
    "llama, query and key norms": {"qk_layernorm": True, "num_query_groups": 2},
    "llama, odd mlp width": {"ffn_hidden_size": 101},
    "llama, rope scaling": {"use_rope_scaling": True},
    "gpt": GPT,
    "gpt, untied": {**GPT, "untie_embeddings_and_output_weights": True},
}


def counted_by_torch(model: ModelConfig, batch: Batch, through_loss: bool = False) -> int:
    """FLOPs of the products that forward and backward execute, with attention as plain products."""
    decoder = Decoder(model, torch.float32)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(std=0.02)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        loss = decoder.loss_sum(batch) if through_loss else decoder(batch).float().sum()
        loss.backward()
    return counter.get_total_flops()


def rows(model: ModelConfig, batch_size: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return whole_sequences(
        torch.randint(model.vocab_size, (batch_size, model.seq_length), generator=generator)
    )


@pytest.mark.parametrize("through_loss", [False, True], ids=["logits", "loss"])
@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES.keys())
def test_full_attention_count_equals_the_executed_products_exactly(
    changes: dict[str, Any], through_loss: bool
) -> None:
    model = ModelConfig.model_validate({**SMALL, **changes})
    expected = counted_by_torch(model, rows(model, 3), through_loss)
    tokens, squares = 3 * 12, 3 * 12 * 12
    full = model_flops(model, tokens=tokens, sum_squared_lengths=squares, causal=False)
    assert full.total == expected
    # Plain products execute the masked half too. Our rule does not count it: exactly half of attention.
    causal = model_flops(model, tokens=tokens, sum_squared_lengths=squares)
    assert causal.total == expected - full.attention // 2
    assert (causal.matmul, causal.logits, 2 * causal.attention) == (full.matmul, full.logits, full.attention)


def test_packed_documents_cost_the_sum_of_their_squares() -> None:
    model = ModelConfig.model_validate({**SMALL, "num_query_groups": 2})
    borders = [0, 5, 12, 15, 24]
    lengths = [last - first for first, last in pairwise(borders)]
    whole = rows(model, 2)
    packed = Batch(
        token_ids=whole.token_ids,
        labels=whole.labels,
        loss_mask=whole.loss_mask,
        position_ids=torch.tensor([i for n in lengths for i in range(n)]).view(2, 12),
        cu_seqlens=torch.tensor(borders, dtype=torch.int32),
        num_valid_tokens=whole.num_valid_tokens,
        sum_squared_lengths=sum(n * n for n in lengths),
    )
    counted = model_flops(
        model, tokens=24, sum_squared_lengths=packed.sum_squared_lengths, causal=False, lengths=lengths
    )
    assert counted.total == counted_by_torch(model, packed)
    assert counted.attention < model_flops(model, tokens=24, sum_squared_lengths=288, causal=False).attention


def test_the_count_is_linear_in_tokens_and_squares() -> None:
    model = ModelConfig.model_validate(SMALL)
    one = forward_flops(model, tokens=10, sum_squared_lengths=100)
    two = forward_flops(model, tokens=20, sum_squared_lengths=200)
    assert two == one.times(2) == one.plus(one)
    assert model_flops(model, tokens=10, sum_squared_lengths=100) == one.times(3)


def test_a_gated_mlp_has_three_matrices_and_a_plain_one_two() -> None:
    shape = {**SMALL, "ffn_hidden_size": 100}
    gated = ModelConfig.model_validate({**shape, "activation_func": "swiglu"})
    plain = ModelConfig.model_validate({**shape, "activation_func": "gelu"})
    difference = (
        forward_flops(gated, tokens=1, sum_squared_lengths=1).matmul
        - forward_flops(plain, tokens=1, sum_squared_lengths=1).matmul
    )
    assert difference == 2 * 2 * 48 * 100  # layers x 2mnk


def test_tying_saves_parameters_and_no_flops() -> None:
    tied = ModelConfig.model_validate(SMALL)
    untied = tied.model_copy(update={"untie_embeddings_and_output_weights": True})
    assert model_flops(tied, tokens=8, sum_squared_lengths=64) == model_flops(
        untied, tokens=8, sum_squared_lengths=64
    )


@pytest.mark.parametrize(
    ("recompute", "repeated"),
    [
        ("none", lambda forward: 0),
        ("selective", lambda forward: forward.attention),
        ("full", lambda forward: forward.attention + forward.matmul),
    ],
)
def test_hardware_flops_add_the_repeated_forward_and_never_the_logits(recompute: Any, repeated: Any) -> None:
    model = ModelConfig.model_validate(SMALL)
    forward = forward_flops(model, tokens=24, sum_squared_lengths=288)
    hardware = hardware_flops(model, tokens=24, sum_squared_lengths=288, recompute=recompute)
    assert hardware.total == 3 * forward.total + repeated(forward)
    assert hardware.logits == 3 * forward.logits


def test_full_recomputation_equals_what_checkpointing_executes() -> None:
    from torch.utils.checkpoint import checkpoint

    model = ModelConfig.model_validate(SMALL)
    decoder = Decoder(model, torch.float32)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(std=0.02)
    for block in decoder.blocks.values():
        inner = block.forward
        block.forward = lambda *args, inner=inner: checkpoint(inner, *args, use_reentrant=False)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        decoder(rows(model, 2)).float().sum().backward()
    executed = counter.get_total_flops()
    exact = hardware_flops(model, tokens=24, sum_squared_lengths=288, recompute="full", causal=False).total
    # torch stops recomputing a block once its last saved tensor is there: the block's last product (the
    # MLP's second matrix) need not be repeated.
    last_products = model.num_layers * 2 * 24 * model.ffn_size * model.hidden_size
    assert executed in (exact, exact - last_products)


# --- windows


def positions(length: int, window: int) -> float:
    """Pairs counted one query at a time: itself half, as in half a square, and min(i, window) keys."""
    return sum(min(i, window) - (0.5 if i <= window else 0.0) for i in range(1, length + 1))


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 70))
def test_window_pairs_equal_the_sum_over_positions(lengths: list[int], window: int) -> None:
    assert attention_pairs(lengths, True, window) == sum(positions(length, window) for length in lengths)
    exact = sum(min(i, window) for length in lengths for i in range(1, length + 1))
    assert 0 <= exact - attention_pairs(lengths, True, window) <= sum(min(n, window) for n in lengths) / 2


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 70))
def test_a_wider_window_never_costs_less_and_a_window_over_the_document_is_none(
    length: int, window: int
) -> None:
    assert attention_pairs([length], True, window) <= attention_pairs([length], True, window + 1)
    assert attention_pairs([length], True, length + window) == attention_pairs([length]) == length**2 / 2
    assert attention_pairs([length], False, window) == length * min(length, window)


def test_a_window_needs_the_lengths() -> None:
    model = ModelConfig.model_validate(SMALL)
    with pytest.raises(DrivetrainError, match="length of each document"):
        forward_flops(model, tokens=24, sum_squared_lengths=288, window_size=4)
    windowed = forward_flops(model, tokens=24, sum_squared_lengths=288, window_size=4, lengths=[12, 12])
    pairs = 2 * (4 * 12 - 8)
    assert windowed.attention == 4 * pairs * 2 * 4 * 12  # 4 x pairs x layers x heads x head width
    with pytest.raises(DrivetrainError, match="window of 0"):
        attention_pairs([4], True, 0)


def test_counts_are_whole_numbers_beyond_64_bits() -> None:
    model = ModelConfig.model_validate(
        {**SMALL, "num_layers": 126, "hidden_size": 16_384, "num_attention_heads": 128, "vocab_size": 128_256}
    )
    count = model_flops(model, tokens=10**9 + 1, sum_squared_lengths=10**9 + 1)
    assert isinstance(count, FlopCount)
    assert count.total == 3 * forward_flops(model, tokens=10**9 + 1, sum_squared_lengths=10**9 + 1).total
    assert count.total > 2**64
