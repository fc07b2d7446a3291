"""The loss whose gradient takes the memory of the logits, against the plain form."""

import math

import pytest
import torch
import torch.nn.functional as F

from differences import relative_difference
from drivetrain.engine.ops import _in_place_cross_entropy as in_place
from drivetrain.engine.ops._in_place_cross_entropy import in_place_cross_entropy, linear_cross_entropy_sum
from drivetrain.engine.ops.linear_cross_entropy import OPERATOR, linear_cross_entropy
from drivetrain.engine.ops.selection import Selection
from drivetrain.errors import DrivetrainError


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain_loss(hidden, weight, labels, mask):
    logits = F.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels.masked_fill(~mask, -100), reduction="sum")


def loss_inputs(dtype, tokens=37, width=12, vocabulary=50):
    generator = torch.Generator().manual_seed(5)
    hidden = random(tokens, width, dtype=dtype, seed=1).requires_grad_()
    weight = random(vocabulary, width, dtype=dtype, seed=2).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    return hidden, weight, labels, torch.rand(tokens, generator=generator) < 0.7


@pytest.mark.parametrize("per_chunk", [1, 150, 1 << 20])
def test_the_loss_and_its_gradients_equal_the_plain_form_in_fp64(monkeypatch, per_chunk):
    monkeypatch.setitem(in_place.LOGITS_PER_CHUNK, "cpu", per_chunk)
    inputs = loss_inputs(torch.float64)
    found, wanted = linear_cross_entropy_sum(*inputs), plain_loss(*inputs)
    assert found.dtype == torch.float64
    assert abs(found.item() - wanted.item()) < 1e-10
    ours = torch.autograd.grad(found * 0.3, inputs[:2])
    theirs = torch.autograd.grad(wanted * 0.3, inputs[:2])
    assert all(relative_difference(a, b) < 1e-13 for a, b in zip(ours, theirs, strict=True))


def test_the_loss_passes_gradcheck(monkeypatch):
    monkeypatch.setitem(in_place.LOGITS_PER_CHUNK, "cpu", 20)
    hidden, weight, labels, mask = loss_inputs(torch.float64, tokens=5, width=3, vocabulary=7)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy_sum(h, w, labels, mask), (hidden, weight)
    )


def test_a_bf16_loss_is_summed_in_fp32_and_as_near_as_the_plain_form():
    inputs = loss_inputs(torch.bfloat16, tokens=2000, width=64, vocabulary=500)
    exact = [x.detach().double().requires_grad_() for x in inputs[:2]]
    wanted = torch.autograd.grad(plain_loss(*exact, *inputs[2:]), exact)
    found = linear_cross_entropy_sum(*inputs)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(plain_loss(*inputs).item(), rel=1e-6)
    ours = torch.autograd.grad(found, inputs[:2])
    plain = torch.autograd.grad(plain_loss(*inputs), inputs[:2])
    for mine, theirs, truth in zip(ours, plain, wanted, strict=True):
        assert mine.dtype == torch.bfloat16
        assert relative_difference(mine, truth) < 1.1 * relative_difference(theirs, truth)


def test_a_batch_without_valid_tokens_has_no_loss_and_no_gradient():
    hidden, weight, labels, _ = loss_inputs(torch.float32)
    loss = linear_cross_entropy_sum(hidden, weight, labels, torch.zeros(37, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad.abs().max() == 0
    assert weight.grad.abs().max() == 0


def test_a_huge_logit_gives_a_finite_loss():
    hidden, weight = torch.tensor([[200.0]]), torch.tensor([[1.0], [0.0]])
    loss = linear_cross_entropy_sum(hidden, weight, torch.tensor([1]), torch.tensor([True]))
    assert loss.item() == pytest.approx(200.0)


def test_without_gradient_the_loss_is_the_same():
    inputs = loss_inputs(torch.float32)
    with torch.no_grad():
        evaluated = linear_cross_entropy_sum(*inputs)
    assert not evaluated.requires_grad
    assert torch.equal(evaluated, linear_cross_entropy_sum(*inputs).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_over_the_number_of_tokens_is_not_rounded_to_the_dtype_of_the_gradients(dtype):
    inputs = loss_inputs(dtype, tokens=300, width=16, vocabulary=50)
    factor = torch.tensor(1.003)
    assert float(factor.to(dtype)) != float(factor)
    once = torch.autograd.grad(linear_cross_entropy_sum(*inputs), inputs[:2])
    found = torch.autograd.grad(linear_cross_entropy_sum(*inputs) * factor, inputs[:2])
    for one, scaled in zip(once, found, strict=True):
        assert torch.equal(scaled, (one.double() * factor.double()).to(dtype))


def test_what_an_ignored_token_holds_is_not_looked_at():
    hidden, weight, labels, mask = loss_inputs(torch.float32)
    labels = labels.masked_fill(~mask, -100)
    right = in_place_cross_entropy(hidden, weight, labels)
    poisoned = hidden.detach().masked_fill(~mask[:, None], math.nan).requires_grad_()
    found = in_place_cross_entropy(poisoned, weight, labels)
    assert found == right
    wanted = torch.autograd.grad(right[0], (hidden, weight))
    for one, other in zip(wanted, torch.autograd.grad(found[0], (poisoned, weight)), strict=True):
        assert torch.equal(one, other)


def test_two_losses_of_the_same_hidden_states_have_the_gradients_of_both():
    """Backward that writes over logits is wrong for a second loss (unsloth 5002)."""
    hidden, weight, labels, _ = loss_inputs(torch.float32)
    other = (labels + 1) % 50
    alone = [
        torch.autograd.grad(in_place_cross_entropy(hidden, weight, one)[0], hidden)[0]
        for one in (labels, other)
    ]
    both = (
        in_place_cross_entropy(hidden, weight, labels)[0] + in_place_cross_entropy(hidden, weight, other)[0]
    )
    torch.testing.assert_close(torch.autograd.grad(both, hidden)[0], alone[0] + alone[1])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"z_loss": 0.1}, "no z-loss"),
        ({"token_weights": torch.ones(37)}, "no weights of tokens"),
        ({"chunk_rows": 5}, "logits of a few rows"),
    ],
)
def test_what_it_does_not_have_is_refused_by_name_and_left_to_chunked_where_nothing_was_asked_for(
    options, says
):
    hidden, weight, labels, _ = loss_inputs(torch.float32)
    given = {"hidden": hidden, "weight": weight, "labels": labels}
    with pytest.raises(DrivetrainError, match=says):
        Selection({OPERATOR.name: "in_place"}).call(OPERATOR, **given, **options)
    selection = Selection({"linear_cross_entropy": "auto"})
    found = selection.call(OPERATOR, **given, **options)
    assert selection.served == {(OPERATOR.name, "chunked"): 1}
    for one, other in zip(found, linear_cross_entropy(**given, **options), strict=True):
        torch.testing.assert_close(one, other)


def test_where_nothing_was_tuned_it_serves_and_options_that_say_nothing_are_no_hindrance():
    hidden, weight, labels, _ = loss_inputs(torch.bfloat16)
    selection = Selection({"linear_cross_entropy": "auto"})
    selection.call(OPERATOR, hidden=hidden, weight=weight, labels=labels, z_loss=0.0, chunk_rows=0)
    assert selection.served == {(OPERATOR.name, "in_place"): 1}
