"""Attention by plain products: the definition, at every size of the last block, and when it is used."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from differences import relative_difference
from drivetrain.engine.model import attention
from drivetrain.engine.ops.attention import OPERATOR, Documents, Mask, eager, products
from drivetrain.engine.ops.attention.call import softmax_scale
from drivetrain.engine.ops.attention.cases import KINDS
from drivetrain.engine.ops.attention.docs import crosses_of
from drivetrain.engine.ops.attention.products import (
    LEAST_TOKENS,
    MOST_TOKENS,
    MOST_TOKENS_WITH_MATRIX_UNIT,
    QUERIES_PER_BLOCK,
    attention_by_products,
    attention_in_words,
    pays,
)
from drivetrain.engine.ops.attention.runs import by_documents
from drivetrain.engine.ops.numerics import grade
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.ops.signature import signature_of


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


@pytest.mark.parametrize("length", [2, QUERIES_PER_BLOCK - 1, QUERIES_PER_BLOCK, 2 * QUERIES_PER_BLOCK + 5])
@pytest.mark.parametrize(("documents", "groups"), [(1, 4), (3, 4), (2, 2), (3, 1)])
def test_outputs_and_gradients_equal_sdpa_in_fp32(length, documents, groups):
    # fp32: gradients are summed over blocks in fp32 whatever the dtype of the inputs.
    inputs = [heads(documents * length, n, 8, torch.float32, n) for n in (4, groups, groups)]
    ours = outputs_and_gradients(attention_by_products, inputs, documents)
    wanted = outputs_and_gradients(by_sdpa, inputs, documents)
    assert all(relative_difference(a, b) < 2e-6 for a, b in zip(ours, wanted, strict=True))


@pytest.mark.parametrize("groups", [1, 4])
def test_documents_of_one_token_give_their_values_and_no_gradient_to_queries_and_keys(groups):
    inputs = [heads(3, n, 8, torch.float32, n) for n in (4, groups, groups)]
    out, of_queries, of_keys, of_values = outputs_and_gradients(attention_by_products, inputs, 3)
    assert torch.equal(out, inputs[2].repeat_interleave(4 // groups, dim=1))
    # Of a softmax over one key it is 0: what is found is the rounding of a difference of equal terms.
    assert max(float(one.norm()) for one in (of_queries, of_keys)) < 2e-6 * float(of_values.norm())


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
    assert pays(q, MOST_TOKENS // MOST_TOKENS_WITH_MATRIX_UNIT)
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


def test_the_record_of_a_run_says_for_which_documents_products_are_used(monkeypatch):
    cpu = torch.device("cpu")
    on_cpu_with(monkeypatch, dot_products=True, matrix_unit=True)
    assert "documents of 32 to 512 tokens" in attention_in_words(torch.bfloat16, cpu, 0.0)
    on_cpu_with(monkeypatch, dot_products=True, matrix_unit=False)
    assert "documents of 32 to 2048 tokens" in attention_in_words(torch.bfloat16, cpu, 0.0)
    for others in (
        (torch.float32, cpu, 0.0),
        (torch.bfloat16, cpu, 0.1),
        (torch.bfloat16, torch.device("meta"), 0.0),
    ):
        assert attention_in_words(*others) == "torch SDPA"


# -- the backend --


def always(q, k, v, mask, scale):
    """The backend without its question whether it pays."""
    return by_documents(q, k, v, mask, softmax_scale(q, scale), products.run)


CASES = [
    case
    for case in OPERATOR.cases()
    if case.name not in KINDS or products.refuses(KINDS[case.name], crosses_of(KINDS[case.name])) is None
]


@pytest.mark.parametrize("upstream", ["dense", "expanded", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_it_is_right_on_the_grid_on_any_processor_and_for_documents_of_any_length(dtype, upstream):
    def supports(signature):
        mask = signature.option("mask")
        return products.refuses(mask, mask.crosses(*(signature.argument(name).shape[0] for name in "qk")))

    backend = replace(OPERATOR.backend("products"), call=always, supports=supports)
    graded = {case.name: grade(OPERATOR, backend, case, dtype, upstream=upstream) for case in CASES}
    assert {name: one.problems for name, one in graded.items() if one.problems} == {}
    assert sum(one.passed for one in graded.values()) >= 24, "one of them is another mask"


def drawn(tokens, dtype=torch.bfloat16):
    return {
        name: heads(tokens, count, 16, dtype, count) for name, count in zip("qkv", (4, 2, 2), strict=True)
    }


@pytest.mark.parametrize("with_what", [7.0, float("nan")])
def test_what_other_documents_hold_changes_no_bit_of_a_document(with_what):
    lengths, second = [21, 34, 34, 9], slice(21, 55)
    mask, upstream = (
        Mask(documents=Documents.of_lengths(lengths)),
        heads(98, 4, 16, torch.bfloat16, 9).detach(),
    )

    def results(given):
        out = always(**given, mask=mask, scale=None)
        return [out, *torch.autograd.grad(out, list(given.values()), upstream)]

    given, perturbed = drawn(98), drawn(98)
    with torch.no_grad():
        for one in perturbed.values():
            one[:21], one[55:] = with_what, with_what
    for was, now in zip(results(given), results(perturbed), strict=True):
        assert torch.equal(was[second], now[second])
        assert not torch.equal(was[55:], now[55:])


def test_packed_documents_are_cut_where_it_pays_and_left_to_sdpa_where_it_does_not(monkeypatch):
    on_cpu_with(monkeypatch, dot_products=True, matrix_unit=True)
    counted = []
    products_run, eager_run = products.run, eager.run
    monkeypatch.setattr(
        products, "run", lambda *given: counted.append(("products", len(given[0]))) or products_run(*given)
    )
    monkeypatch.setattr(
        eager, "run", lambda *given: counted.append(("eager", len(given[0]))) or eager_run(*given)
    )
    lengths = [31, 32, 32, 0, 513, 512]
    given = drawn(sum(lengths) + 3)
    out = products.attention(**given, mask=Mask(documents=Documents.of_lengths(lengths)))
    assert counted == [("eager", 31), ("products", 64), ("eager", 0), ("eager", 513), ("products", 512)]
    assert out.shape == given["q"].shape
    assert not out[-3:].any(), "tokens of no document"


@pytest.mark.parametrize(
    ("tokens", "dtype", "dot_products", "says"),
    [
        (600, torch.bfloat16, True, "one document of 600 tokens"),
        (31, torch.bfloat16, True, "from 32 to 512 on this processor"),
        (100, torch.float32, True, "float32 is not among its dtypes"),
        (100, torch.bfloat16, False, "no bf16 dot products"),
    ],
)
def test_calls_that_gain_nothing_are_refused_with_the_reason_and_served_by_eager(
    monkeypatch, tokens, dtype, dot_products, says
):
    on_cpu_with(monkeypatch, dot_products=dot_products, matrix_unit=True)
    given = drawn(tokens, dtype)
    assert says in products.supports(signature_of("attention", given))
    selection = Selection()
    assert torch.equal(selection.call(OPERATOR, **given), eager.attention(**given))
    assert selection.served == {("attention", "eager"): 1}


def test_another_device_is_refused(monkeypatch):
    on_cpu_with(monkeypatch, dot_products=True, matrix_unit=False)
    given = {name: one.detach().to("meta") for name, one in drawn(100).items()}
    assert (
        products.supports(signature_of("attention", given))
        == "the matrix products were written for CPUs, not meta"
    )


@pytest.mark.parametrize("mask", [Mask(), Mask(documents=Documents.of_lengths([40, 60]))], ids=str)
def test_where_nothing_was_tuned_it_serves_what_gains(monkeypatch, mask):
    on_cpu_with(monkeypatch, dot_products=True, matrix_unit=True)
    selection, given = Selection({"attention": "auto"}), drawn(100)
    out = selection.call(OPERATOR, **given, mask=mask)
    assert selection.served == {("attention", "products"): 1}
    assert torch.equal(out, always(**given, mask=mask, scale=None))


# Torch looks at .grad of what flows over a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_code_calls_it_behind_a_break_of_its_graph_and_packings_compile_nothing(monkeypatch):
    on_cpu_with(monkeypatch, dot_products=True, matrix_unit=True)
    torch._dynamo.reset()
    graphs = []

    def as_it_is(graph, _):
        graphs.append(graph)
        return graph.forward

    given = drawn(100)
    compiled = torch.compile(
        lambda q, k, v, mask: products.attention(q * 2, k, v, mask) + 1, backend=as_it_is
    )
    for first in range(33, 45):
        mask = Mask(documents=Documents.of_lengths([first, 100 - first]))
        wanted = products.attention(given["q"] * 2, given["k"], given["v"], mask) + 1
        assert torch.equal(compiled(*given.values(), mask), wanted)
    assert len(graphs) == 2, "before and after the break"
