"""Modules around matrix products in somebody's own model."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.engine.ops.modules_products import (
    GroupedExperts,
    LinearCrossEntropy,
    QKVProjection,
    _permuted,
    mean_loss,
)
from drivetrain.engine.ops.selection import Selection
from drivetrain.errors import DrivetrainError

pytestmark = [
    # Dynamo makes an object of what it traces.
    pytest.mark.filterwarnings(
        "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
    ),
    # Dynamo looks at every tensor that it meets, and hides this one warning itself, unless warnings are errors.
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"
    ),
]

DOCS = Path(__file__).resolve().parents[3] / "docs" / "ops-products.md"
GROUPED = ("eager", "torch_grouped_mm")


def routed(tokens: int = 12, each: int = 2, experts: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(tokens, experts - 1, generator=generator)
    shares, chosen = scores.softmax(-1).topk(each)
    # The last expert has no rows.
    return torch.randn(tokens, 8, generator=generator).requires_grad_(), chosen, shares


def experts_one_by_one(module: GroupedExperts, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    rows = []
    for row, numbers, weights in zip(x, chosen.tolist(), shares, strict=True):
        y = torch.zeros_like(row)
        for number, share in zip(numbers, weights, strict=True):
            if number >= 0:
                gate, up = (row @ module.gate_up[number]).chunk(2)
                y = y + share * ((F.silu(gate) * up) @ module.down[number])
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize("backend", GROUPED)
def test_experts_are_those_of_each_token_one_by_one(backend: str) -> None:
    torch.manual_seed(0)
    selection = Selection(requested={"grouped_product": backend})
    module = GroupedExperts(8, 12, 5, selection=selection)
    x, chosen, shares = routed()
    chosen[3, 1] = chosen[7, 0] = chosen[7, 1] = -1
    shares = shares.clone()
    shares[7, 0] = torch.nan
    shares.requires_grad_()
    leaves = (x, shares, module.gate_up, module.down)
    found, right = module(x, chosen, shares), experts_one_by_one(module, x, chosen, shares)
    torch.testing.assert_close(found, right)
    assert not found[7].any()
    upstream = torch.randn(found.shape)
    for ours, theirs in zip(
        torch.autograd.grad(found, leaves, upstream),
        torch.autograd.grad(right, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    assert selection.served["grouped_product", backend] == 2


@pytest.mark.parametrize("backend", GROUPED)
def test_experts_give_the_same_bits_twice(backend: str) -> None:
    """A combine that adds in any sequence (unsloth-zoo 1258)."""
    module = GroupedExperts(8, 12, 5, selection=Selection(requested={"grouped_product": backend}))
    x, chosen, shares = routed(200, 3)

    def run() -> list[Tensor]:
        y = module(x, chosen, shares)
        return [y, *torch.autograd.grad(y.square().sum(), (x, module.gate_up, module.down))]

    assert all(torch.equal(one, other) for one, other in zip(run(), run(), strict=True))


def test_a_permutation_of_several_rows_a_token_has_the_right_gradient() -> None:
    """Rows of a token came together with an error of 3.6 (TransformerEngine 1336)."""
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    places = order.argsort()

    def through(x: Tensor) -> Tensor:
        rows = _permuted(x[:, None].expand(4, 3, 3).flatten(0, 1), order, places)
        rows = rows * torch.arange(1.0, 13.0, dtype=torch.float64)[:, None]
        return _permuted(rows, places, order).unflatten(0, (4, 3)).sum(1)

    assert torch.autograd.gradcheck(through, (x,))
    assert torch.autograd.gradgradcheck(through, (x,))


def test_experts_without_any_token_have_zero_gradients_of_the_right_shape() -> None:
    """Missing gradients desynchronise ranks (TransformerEngine 3019)."""
    module = GroupedExperts(8, 12, 5)
    x, chosen, shares = routed()
    module(x, torch.full_like(chosen, -1), shares).sum().backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        assert not parameter.grad.any()


@pytest.mark.parametrize("backend", ["eager", "joined"])
def test_projections_are_those_of_each_weight(backend: str) -> None:
    module = QKVProjection(16, 6, 2, 4, selection=Selection(requested={"qkv_product": backend}))
    x = torch.randn(2, 5, 16)
    query, key, value = module(x)
    assert [tuple(one.shape) for one in (query, key, value)] == [(2, 5, 6, 4), (2, 5, 2, 4), (2, 5, 2, 4)]
    torch.testing.assert_close(query.flatten(-2), x @ module.query.t())
    torch.testing.assert_close(key.flatten(-2), x @ module.key.t())
    torch.testing.assert_close(value.flatten(-2), x @ module.value.t())
    (query.sum() + 2 * key.sum() + 3 * value.sum()).backward()
    torch.testing.assert_close(module.value.grad[0], 3 * x.sum((0, 1)))  # type: ignore[index]


def test_the_loss_of_a_shared_embedding_trains_it_from_both_ends() -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(20, 8)
    loss = LinearCrossEntropy(8, 20, weight=embedding.weight, chunk_rows=4, z_loss=1e-4)
    tokens = torch.randint(20, (2, 9))
    total, count = loss(embedding(tokens[:, :-1]), tokens[:, 1:])
    right = F.cross_entropy(loss.logits(embedding(tokens[:, :-1])).flatten(0, 1), tokens[:, 1:].flatten())
    assert int(count) == 16
    assert abs(float((mean_loss(total, count) - right).detach())) < 0.01
    total.backward()
    assert loss.weight is embedding.weight
    assert loss.selection.served == {("linear_cross_entropy", "chunked"): 1}
    assert bool(embedding.weight.grad.any())  # type: ignore[union-attr]


def test_a_model_of_them_is_one_graph_and_computes_the_same() -> None:
    torch.manual_seed(0)
    project = QKVProjection(8, 2, 1, 8, selection=Selection(requested={"qkv_product": "joined"})).bfloat16()
    selection = Selection(requested={"grouped_product": "torch_grouped_mm"})
    experts = GroupedExperts(8, 16, 5, selection=selection).bfloat16()
    loss = LinearCrossEntropy(8, 30, chunk_rows=5).bfloat16()
    x, chosen, shares = routed()
    x, labels = x.detach().bfloat16().requires_grad_(), torch.arange(12)
    leaves = [x, *(one for module in (project, experts, loss) for one in module.parameters())]

    def model(x: Tensor) -> Tensor:
        query, key, value = project(x)
        mixed = (query * key * value).sum(1)
        return mean_loss(*loss(mixed + experts(mixed, chosen, shares), labels))

    torch.compiler.reset()
    right = model(x)
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, right)
    for one, other in zip(
        torch.autograd.grad(found, leaves), torch.autograd.grad(right, leaves), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QKVProjection(8, 6, 4, 2), "6 heads of queries cannot share 4"),
        (lambda: QKVProjection(8, 6, 0, 2), "cannot share 0"),
        (lambda: LinearCrossEntropy(8, 20, weight=nn.Parameter(torch.zeros(8, 20))), "has to be \\(20, 8\\)"),
        (lambda: QKVProjection(8, 2, 1, 4)(torch.zeros(3, 9)), "query \\(8, 8\\)"),
        (lambda: QKVProjection(8, 2, 1, 4)(torch.zeros(3, 8).double()), "convert one of them"),
        (
            lambda: GroupedExperts(8, 12, 5)(torch.zeros(2, 8), torch.tensor([[5], [0]]), torch.ones(2, 1)),
            "there are 0 to 4, and -1 for none",
        ),
        (
            lambda: GroupedExperts(8, 12, 5)(torch.zeros(2, 8), torch.zeros(2, 1).long(), torch.ones(2, 2)),
            "have to be \\(T, D\\), \\(T, k\\) and \\(T, k\\)",
        ),
    ],
)
def test_what_does_not_fit_a_product_is_refused_in_words(make: Any, message: str) -> None:
    with pytest.raises(DrivetrainError, match=message):
        make()


def test_examples_of_products_in_the_docs_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        # Of exec: a document of ours, in a namespace of its own.
        exec(compile(block, str(DOCS), "exec"), {})
