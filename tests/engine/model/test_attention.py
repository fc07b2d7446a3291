"""Per-document attention against its definition."""

import pytest
import torch
from model_examples import packed_batch

from differences import relative_difference
from drivetrain.engine.model.attention import DocumentLayout, attend

ROWS = [[5, 12, 7], [24], [1, 1, 22], [8, 8, 8]]


def defined_attention(q_THK, k_TGK, v_TGK, cu_seqlens):
    """softmax(q k / sqrt(K)) v with heads repeated and the mask written out."""
    repeats = q_THK.shape[1] // k_TGK.shape[1]
    k_THK, v_THK = (x.repeat_interleave(repeats, dim=1) for x in (k_TGK, v_TGK))
    tokens = torch.arange(q_THK.shape[0])
    document = torch.bucketize(tokens, cu_seqlens[1:], right=True)
    allowed = (document[:, None] == document) & (tokens[:, None] >= tokens)
    scores = torch.einsum("thk,shk->hts", q_THK, k_THK) / q_THK.shape[2] ** 0.5
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
    return torch.einsum("hts,shk->thk", weights, v_THK)


def heads(tokens, groups, width, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, groups, width, generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize("groups", [6, 3, 2, 1])
@pytest.mark.parametrize("width", [1, 8, 13])
def test_outputs_and_gradients_equal_the_definition_in_fp64(groups, width):
    batch = packed_batch(ROWS)
    tokens = batch.token_ids.numel()
    q, k, v = (heads(tokens, n, width, torch.float64, n) for n in (6, groups, groups))
    found = attend(q, k, v, DocumentLayout(batch.cu_seqlens), 0.0)
    wanted = defined_attention(q, k, v, batch.cu_seqlens)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    for ours, theirs in zip(
        torch.autograd.grad(found, (q, k, v), upstream),
        torch.autograd.grad(wanted, (q, k, v), upstream),
        strict=True,
    ):
        assert relative_difference(ours, theirs) < 1e-12


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_low_precision_stays_near_the_definition(dtype, bound):
    batch = packed_batch(ROWS)
    q, k, v = (heads(batch.token_ids.numel(), n, 16, dtype, n) for n in (4, 2, 2))
    found = attend(q, k, v, DocumentLayout(batch.cu_seqlens), 0.0)
    assert found.dtype == dtype
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = defined_attention(*exact, batch.cu_seqlens)
    assert relative_difference(found, wanted) < bound
    ours = torch.autograd.grad(found.float().square().sum(), (q, k, v))
    theirs = torch.autograd.grad(wanted.square().sum(), exact)
    assert all(relative_difference(a, b) < bound for a, b in zip(ours, theirs, strict=True))


def test_neighbours_of_equal_length_share_a_call():
    assert DocumentLayout(packed_batch([[24], [24], [24]]).cu_seqlens).runs == [(3, 24)]
    assert DocumentLayout(packed_batch([[8, 8, 8], [12, 12], [24]]).cu_seqlens).runs == [
        (3, 8),
        (2, 12),
        (1, 24),
    ]


def test_dropped_weights_are_made_up_for_on_average():
    layout = DocumentLayout(torch.tensor([0, 16, 32], dtype=torch.int32))
    q, k = (heads(32, 2, 8, torch.float32, seed) for seed in (1, 2))
    ones = torch.ones(32, 2, 8)
    torch.manual_seed(0)
    kept = torch.stack([attend(q, k, ones, layout, 0.25) for _ in range(400)])
    assert (kept[:, 0] - kept[:, 0].mean()).abs().max() > 0.1, "nothing was dropped"
    torch.testing.assert_close(kept.mean(dim=0), ones, rtol=0, atol=0.15)
