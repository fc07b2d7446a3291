"""What backends of the elementwise operators do beyond their numerics; each test stands for bugs of other libraries."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from elementwise_behaviours import BEHAVIOURS, CALLS, a_gradient_of_a_gradient_is_refused
from interpreter import run_interpreted
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drivetrain.engine.ops._dropout_mask import kept_elements, threshold_of
from drivetrain.engine.ops.bias_dropout_add import bias_dropout_add
from drivetrain.engine.ops.discovery import operator_named
from drivetrain.engine.ops.modules_elementwise import BiasDropoutAdd, RotaryEmbedding
from drivetrain.engine.ops.rotary import rotary
from drivetrain.errors import DrivetrainError

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    # Dynamo makes an object of what it traces.
    pytest.mark.filterwarnings(
        "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
    ),
    # Dynamo looks at every tensor that it meets, and hides this one warning itself, unless warnings are errors.
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"
    ),
]


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", CALLS)
def test_eager(name: str, behaviour: Callable[[str, str], None]) -> None:
    behaviour(name, "eager")


@pytest.mark.long
@pytest.mark.parametrize(
    "behaviour", [*BEHAVIOURS, a_gradient_of_a_gradient_is_refused], ids=lambda one: one.__name__
)
@pytest.mark.parametrize("name", CALLS)
def test_inductor(name: str, behaviour: Callable[[str, str], None]) -> None:
    behaviour(name, "inductor")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_triton() -> None:
    found = run_interpreted(Path(__file__).with_name("interpreted_behaviours.py"), timeout_s=1700.0)
    assert found["failed"] == {}
    assert found["made"] == 6 * (len(BEHAVIOURS) + 3)


# -- rotary --


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(("size", "turned"), [(16, 6), (96, 80), (128, 96), (192, 192), (2, 2)])
def test_a_rotation_keeps_the_norm_of_every_pair_and_what_it_does_not_turn(
    size: int, turned: int, style: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, size, generator=generator, dtype=torch.float64)
    embedding = RotaryEmbedding(size, rotary_size=turned, style=style)
    cosine, sine = embedding.angles(torch.arange(5), torch.float64)
    out = rotary(x, cosine, sine, style)
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(out[..., turned:], x[..., turned:])
    assert not torch.allclose(out[1:, :, :turned], x[1:, :, :turned])
    assert torch.equal(out[0], x[0])


def test_products_of_queries_and_keys_depend_on_distances_alone() -> None:
    """Queries and keys of different sizes, so that one read in the place of the other shows (ColossalAI 6428)."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 8, generator=generator, dtype=torch.float64)
    key = 100 * torch.randn(1, 2, 8, generator=generator, dtype=torch.float64)
    for style in ("half", "interleaved"):
        embedding = RotaryEmbedding(8, style=style)
        places = torch.arange(6)
        turned_query, turned_key = embedding(query.expand(6, 2, 8), key.expand(6, 2, 8), places)
        scores = torch.einsum("ihk,jhk->hij", turned_query, turned_key)
        for distance in range(-5, 6):
            diagonal = scores.diagonal(distance, dim1=1, dim2=2)
            torch.testing.assert_close(diagonal, diagonal[:, :1].expand_as(diagonal))


# -- dropout --


def test_the_share_kept_is_the_one_that_was_asked_for() -> None:
    for probability in (0.001, 0.1, 0.5, 0.9):
        kept = kept_elements(torch.Size([1000, 1000]), torch.tensor([12345]), threshold_of(probability))
        share = kept.double().mean().item()
        deviation = (probability * (1 - probability) / kept.numel()) ** 0.5
        assert abs(share - (1 - probability)) < 5 * deviation
        for dimension in (0, 1):
            along = kept.double().mean(dimension)
            spread = along.std().item() / (probability * (1 - probability) / 1000) ** 0.5
            assert 0.9 < spread < 1.1


def test_masks_of_different_seeds_and_neighbouring_elements_are_independent() -> None:
    """Duplicated masks (pytorch 198333): no shift of one mask is another."""
    size = torch.Size([1 << 18])
    one, other = (
        kept_elements(size, torch.tensor([seed]), threshold_of(0.5)).double() - 0.5 for seed in (1, 2)
    )
    bound = 5 * 0.25 / size.numel() ** 0.5
    for shift in (0, 1, 2, 3, 4, 5, 8, 64, 1024):
        rolled = one.roll(shift)
        assert abs((rolled * other).mean().item()) < bound
        if shift:
            assert abs((rolled * one).mean().item()) < bound


def test_what_forward_drops_has_no_gradient_and_what_it_keeps_has() -> None:
    x = torch.ones(64, 33, requires_grad=True)
    operator = operator_named("bias_dropout_add")
    eager = operator.backend("eager")
    assert eager is not None
    out = eager.call(x=x, residual=torch.zeros(64, 33), seed=torch.tensor([5]), probability=0.4)
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())
    assert {round(value, 3) for value in out.unique().tolist()} == {0.0, round(1 / 0.6, 3)}


def test_what_is_dropped_may_be_infinite() -> None:
    x = torch.full((8, 40), float("inf"), requires_grad=True)
    out = bias_dropout_add(x, torch.zeros(8, 40), torch.tensor([5]), probability=0.4)
    assert not out.isnan().any()
    assert (out == 0).any()


def test_dropout_computed_again_drops_the_same() -> None:
    module = BiasDropoutAdd(0.5)
    x = torch.randn(32, 16, requires_grad=True)
    torch.manual_seed(0)
    plain = module(x, torch.zeros(32, 16))
    (wanted,) = torch.autograd.grad(plain.square().sum(), [x])
    torch.manual_seed(0)
    again = checkpoint(module, x, torch.zeros(32, 16), use_reentrant=False)
    (found,) = torch.autograd.grad(again.square().sum(), [x])
    assert torch.equal(plain, again)
    assert torch.equal(wanted, found)


def test_two_calls_drop_differently_and_evaluation_drops_nothing() -> None:
    module = BiasDropoutAdd(0.5)
    x, nothing = torch.ones(8, 16), torch.zeros(8, 16)
    assert not torch.equal(module(x, nothing), module(x, nothing))
    module.eval()
    assert torch.equal(module(x, nothing), x)


@pytest.mark.parametrize("probability", [-0.1, 1.0, 1.5, 1e-6, float("nan")])
def test_a_probability_that_cannot_be_had_is_refused(probability: float) -> None:
    with pytest.raises(DrivetrainError, match=r"from 0\.000015 to 0\.999985"):
        BiasDropoutAdd(probability)


@pytest.mark.long
def test_compiled_dropout_keeps_nothing_but_the_seed() -> None:
    """Its backward computes the mask again."""
    operator = operator_named("bias_dropout_add")
    inductor = operator.backend("inductor")
    assert inductor is not None
    kept: list[int] = []

    def keep(one: Tensor) -> Tensor:
        kept.append(one.numel())
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        x = torch.zeros(4, 8, requires_grad=True)
        inductor.call(x=x, residual=torch.zeros(4, 8), seed=torch.tensor([1]), probability=0.5)
    assert kept == [1]
