"""Attention by plain products: the definition, at every size of the last block, and when it is used."""

import pytest
import torch
import torch.nn.functional as F
from model_examples import relative_difference

from drivetrain.engine.model import attention
from drivetrain.engine.model.attention_products import (
    LEAST_TOKENS,
    MOST_TOKENS,
    QUERIES_PER_BLOCK,
    attention_by_products,
    pays,
)


def heads(tokens, count, width, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, count, width, generator=generator).to(dtype).requires_grad_()


def by_sdpa(q_THK, k_TGK, v_TGK, documents):
    q, k, v = (x.unflatten(0, (documents, -1)).transpose(1, 2) for x in (q_THK, k_TGK, v_TGK))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def outputs_and_gradients(function, inputs, documents):
    out = function(*inputs, documents)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, upstream)]


@pytest.mark.parametrize("length", [1, QUERIES_PER_BLOCK - 1, QUERIES_PER_BLOCK, 2 * QUERIES_PER_BLOCK + 5])
@pytest.mark.parametrize(("documents", "groups"), [(1, 4), (3, 4), (2, 2), (3, 1)])
def test_outputs_and_gradients_equal_sdpa_in_fp32(length, documents, groups):
    # fp32: gradients are summed over blocks in fp32 whatever the dtype of the inputs.
    inputs = [heads(documents * length, n, 8, torch.float32, n) for n in (4, groups, groups)]
    ours = outputs_and_gradients(attention_by_products, inputs, documents)
    wanted = outputs_and_gradients(by_sdpa, inputs, documents)
    assert all(relative_difference(a, b) < 2e-6 for a, b in zip(ours, wanted, strict=True))


def test_bf16_errors_are_about_as_small_as_those_of_sdpa():
    inputs = [heads(2 * 300, n, 24, torch.bfloat16, n) for n in (4, 2, 2)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = outputs_and_gradients(by_sdpa, exact, 2)
    ours = outputs_and_gradients(attention_by_products, inputs, 2)
    theirs = outputs_and_gradients(by_sdpa, inputs, 2)
    for mine, sdpa, truth in zip(ours, theirs, wanted, strict=True):
        assert mine.dtype == torch.bfloat16
        # Scores are rounded to bf16, which a fused kernel does not do.
        assert relative_difference(mine, truth) < 3 * relative_difference(sdpa, truth)


def test_a_later_token_changes_no_earlier_output_to_the_bit():
    q, k, v = (heads(2 * 200, 2, 16, torch.bfloat16, seed).detach() for seed in (1, 2, 3))
    before = attention_by_products(q, k, v, 2)
    for x in (q, k, v):
        x[150:200] += 1
    after = attention_by_products(q, k, v, 2)
    changed = (before != after).any(dim=(1, 2))
    assert changed[150:200].all()
    assert not changed[:150].any()
    assert not changed[200:].any()


def on_cpu_with(monkeypatch, *, dot_products, matrix_unit):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: dot_products)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: matrix_unit)


def test_it_is_used_only_where_it_was_measured_to_pay(monkeypatch):
    q = torch.empty(MOST_TOKENS, 1, 8, dtype=torch.bfloat16)
    on_cpu_with(monkeypatch, dot_products=True, matrix_unit=False)
    assert pays(q, 1)
    assert pays(q, MOST_TOKENS // LEAST_TOKENS)
    assert not pays(q, 2 * MOST_TOKENS // LEAST_TOKENS), "shorter documents"
    assert not pays(torch.cat([q, q]), 1), "a longer document"
    assert not pays(q.float(), 1)
    assert not pays(q.double(), 1)
    assert not pays(q.to("meta"), 1)
    on_cpu_with(monkeypatch, dot_products=True, matrix_unit=True)
    assert not pays(q, 1)
    on_cpu_with(monkeypatch, dot_products=False, matrix_unit=False)
    assert not pays(q, 1)


def test_dropped_weights_are_left_to_sdpa(monkeypatch):
    on_cpu_with(monkeypatch, dot_products=True, matrix_unit=False)
    q = heads(64, 2, 8, torch.bfloat16, 1).detach()
    torch.manual_seed(0)
    dropped = attention.attend_run(q, q, q, 1, 0.5)
    torch.manual_seed(1)
    assert not torch.equal(dropped, attention.attend_run(q, q, q, 1, 0.5))
    assert torch.equal(attention.attend_run(q, q, q, 1, 0.0), attention_by_products(q, q, q, 1))
