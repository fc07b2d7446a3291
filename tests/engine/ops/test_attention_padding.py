"""Documents are lengthened to few lengths where each costs generated code; nothing else changes."""

import pytest
import torch
from hypothesis import given as drawn_from
from hypothesis import strategies
from torch.utils._python_dispatch import TorchDispatchMode

from differences import relative_difference
from drivetrain.engine.ops.attention import CAUSAL, FULL, OPERATOR, Documents, Dropout, Mask, eager
from drivetrain.engine.ops.attention.padding import frequent_length
from drivetrain.engine.ops.attention.products import attention_by_products


@pytest.fixture(params=[True, False], ids=["matrix unit", "no matrix unit"])
def matrix_unit(request, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: request.param)
    return request.param


@drawn_from(strategies.integers(1, 1 << 20))
def test_a_length_is_enough_and_at_most_an_eighth_too_much(tokens):
    length = frequent_length(tokens)
    assert length >= tokens
    assert length % 16 == 0
    assert length <= max(tokens + 15, tokens * 9 // 8)
    assert frequent_length(length) == length
    assert frequent_length(tokens + 1) >= length


def test_lengths_are_few():
    assert len({frequent_length(tokens) for tokens in range(1, 2049)}) == 40


class Lengths(TorchDispatchMode):
    """Numbers of queries that torch's attention is called with, and of rows of batched products."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "scaled_dot_product" in str(func):
            self.found.add(("attention", args[0].shape[2]))
        if str(func).startswith(("aten.bmm", "aten.baddbmm")):
            self.found.add(("product", tuple(args[-1].shape[-2:])))
        return func(*args, **(kwargs or {}))


def drawn(tokens, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, n, 16, generator=generator).to(dtype).requires_grad_() for n in (4, 2, 2)]


def results(call, given, *more):
    out = call(*given, *more)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    return [out, *torch.autograd.grad(out, given, upstream)]


def test_sdpa_sees_few_lengths_of_documents_where_each_costs_generated_code(matrix_unit):
    with Lengths() as lengths:
        for tokens in range(130, 190):
            results(eager.attention, drawn(tokens))
    assert len({length for _, length in lengths.found}) == (4 if matrix_unit else 60)


def test_products_see_few_lengths_of_documents():
    with Lengths() as lengths:
        for tokens in range(130, 190):
            results(attention_by_products, drawn(tokens), 1)
    of_one_call = 5
    assert 0 < len(lengths.found) <= 4 * of_one_call * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("lengths", [[33], [130], [70, 70], [130, 17, 17, 300]], ids=str)
def test_outputs_and_gradients_are_those_of_the_documents_as_they_are(matrix_unit, lengths, dtype):
    mask = Mask(documents=Documents.of_lengths(lengths))
    given = drawn(sum(lengths), dtype)
    exact = [one.detach().double().requires_grad_() for one in given]
    wanted = results(OPERATOR.reference, exact, mask)
    plain = results(OPERATOR.reference, given, mask)
    for found, right, reference in zip(results(eager.attention, given, mask), wanted, plain, strict=True):
        assert found.shape == right.shape
        assert relative_difference(found, right) <= max(5 * relative_difference(reference, right), 1e-6)


@pytest.mark.parametrize(
    "mask",
    [FULL, Mask(window=20), Mask(prefix=30), Mask(dropout=Dropout(0.5)), Mask(window=130)],
    ids=str,
)
def test_a_mask_under_which_a_token_behind_the_last_would_be_seen_or_matter_is_left_alone(monkeypatch, mask):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(eager, "padded", lambda *_: pytest.fail("it was lengthened"))
    assert eager.attention(*drawn(130), mask).shape == (130, 4, 16)


def test_compiled_code_has_it_in_its_graph_as_it_is(matrix_unit):
    torch._dynamo.reset()
    graphs = []

    def as_it_is(graph, _):
        graphs.append(graph)
        return graph.forward

    given = drawn(130)
    compiled = torch.compile(
        lambda *three: eager.attention(*three, CAUSAL) + 1, backend=as_it_is, fullgraph=True
    )
    found, wanted = compiled(*given), eager.attention(*given) + 1
    assert relative_difference(found, wanted) < 0.01
    assert len(graphs) == 1
