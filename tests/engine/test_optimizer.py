"""AdamW's groups, state and names; gradient clipping."""

import math

import pytest
import torch
from torch import Tensor, nn

from drivetrain.config.training import OptimizerConfig
from drivetrain.engine.ops.gradient_clip import total_norm
from drivetrain.engine.optimizer import (
    build_optimizer,
    clip_gradients,
    optimizer_state,
    set_learning_rate,
)


class Tiny(nn.Module):
    """An embedding tied to the output, a norm, a linear layer with bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.output(self.linear(self.norm(self.embedding(token_ids))))


def tiny(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


def train(model: nn.Module, adamw: torch.optim.Optimizer, steps: int, seed: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.randint(7, (6,), generator=generator)).square().sum().backward()
        adamw.step()
        adamw.zero_grad()


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    adamw = build_optimizer(tiny(), OptimizerConfig(weight_decay=0.3))
    groups = {group["weight_decay"]: group["param_names"] for group in adamw.param_groups}
    assert groups == {
        0.3: ["embedding.weight", "linear.weight"],
        0.0: ["norm.weight", "norm.bias", "linear.bias"],
    }


def test_fields_of_the_configuration_reach_the_optimizer() -> None:
    optimizer = OptimizerConfig(lr=0.2, adam_beta1=0.5, adam_beta2=0.6, adam_eps=1e-3, fused=False)
    for group in build_optimizer(tiny(), optimizer).param_groups:
        assert (group["lr"], group["betas"], group["eps"], group["fused"]) == (0.2, (0.5, 0.6), 1e-3, False)


@pytest.mark.parametrize("fused", [True, False])
def test_allocated_state_is_what_the_first_step_of_torch_makes(fused: bool) -> None:
    model, reference = tiny(), tiny()
    ours = build_optimizer(model, OptimizerConfig(fused=fused, weight_decay=0.1))
    theirs = torch.optim.AdamW(
        [
            {"params": [p for p in reference.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in reference.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=fused,
    )
    train(model, ours, 3)
    train(reference, theirs, 3)
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, other), name
        for key, value in theirs.state[other].items():
            mine = ours.state[parameter][key]
            assert torch.equal(mine, value), (name, key)
            assert (mine.dtype, mine.device) == (value.dtype, value.device), (name, key)


def test_state_is_fp32_and_exists_before_the_first_step() -> None:
    state = optimizer_state(build_optimizer(tiny(), OptimizerConfig()))
    assert len(state) == 5 * 3
    assert all(tensor.dtype == torch.float32 and not tensor.any() for tensor in state.values())
    assert state["embedding.weight/exp_avg"].shape == (7, 4)
    assert state["norm.bias/step"].shape == ()


def test_the_caller_may_decide_against_the_fused_kernel() -> None:
    for group in build_optimizer(tiny(), OptimizerConfig(fused=True), fused=False).param_groups:
        assert (group["fused"], group["foreach"]) == (False, False), "on a CPU one tensor after the other"
    for group in build_optimizer(tiny(), OptimizerConfig(fused=True)).param_groups:
        assert group["fused"] is True


def test_optimizer_of_a_model_without_storage_can_be_built() -> None:
    build_optimizer(tiny().to("meta"), OptimizerConfig(fused=True))


@pytest.mark.parametrize("fused", [True, False])
def test_state_copied_by_name_continues_to_the_bit(fused: bool) -> None:
    straight, resumed = tiny(), tiny()
    adamw = build_optimizer(straight, OptimizerConfig(fused=fused))
    train(straight, adamw, 3)
    saved = {name: tensor.clone() for name, tensor in optimizer_state(adamw).items()}
    weights = {name: tensor.clone() for name, tensor in straight.state_dict().items()}
    train(straight, adamw, 2, seed=9)

    resumed.load_state_dict(weights)
    other = build_optimizer(resumed, OptimizerConfig(fused=fused))
    for name, tensor in optimizer_state(other).items():
        tensor.copy_(saved[name])
    train(resumed, other, 2, seed=9)
    for expected, parameter in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, parameter)


def test_learning_rate_is_set_in_both_groups() -> None:
    adamw = build_optimizer(tiny(), OptimizerConfig())
    set_learning_rate(adamw, 0.25)
    assert [group["lr"] for group in adamw.param_groups] == [0.25, 0.25]


def with_gradients(*gradients: list[float]) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(len(gradient)))
        parameter.grad = torch.tensor(gradient)
        parameters.append(parameter)
    return parameters


def test_clipping_scales_to_the_norm_and_returns_the_norm_before() -> None:
    parameters = with_gradients([3.0], [0.0, 4.0])
    norm, factor = clip_gradients(parameters, 1.0)
    assert norm.item() == pytest.approx(5.0)
    assert factor.item() == pytest.approx(0.2)
    assert parameters[1].grad is not None
    assert parameters[1].grad.tolist() == pytest.approx([0.0, 0.8])


def test_the_norm_of_many_elements_is_right_to_the_last_digits_however_they_are_cut() -> None:
    # torch's own norm of these is 1e-4 too small in fp32.
    values = torch.randn(4_000_003, generator=torch.Generator().manual_seed(1))
    expected = values.double().norm().item()
    cut = [*values[:1_000_000].chunk(3), values[1_000_000:1_000_007], values[1_000_007:].view(-1, 4).t()]
    for tensors in ([values], cut):
        assert total_norm(tensors).item() == pytest.approx(expected, rel=1e-7)
        assert total_norm(tensors).dtype == torch.float32
    pieces = [total_norm([part]).square() for part in values.chunk(4)]
    assert torch.stack(pieces).sum().sqrt().item() == pytest.approx(expected, rel=2e-7), "over four ranks"


def test_the_norm_of_nothing_is_zero_and_that_of_bad_numbers_is_none() -> None:
    assert total_norm([]).item() == 0
    assert total_norm([torch.empty(0, 3), torch.empty(0)]).item() == 0
    large = torch.ones(5000)
    for bad in (math.inf, math.nan):
        large[4000] = bad
        assert not total_norm([large]).isfinite()
    assert total_norm([torch.full((3,), 2.0, dtype=torch.float64)]).item() == math.sqrt(12)


def test_small_gradients_are_left_as_they_are() -> None:
    parameters = with_gradients([0.3], [0.4])
    norm, factor = clip_gradients([*parameters, nn.Parameter(torch.zeros(2))], 1.0)
    assert norm.item() == pytest.approx(0.5)
    assert factor.item() == 1.0
    assert [parameter.grad for parameter in parameters] == [torch.tensor([0.3]), torch.tensor([0.4])]


def test_clip_grad_zero_only_measures() -> None:
    parameters = with_gradients([30.0], [40.0])
    norm, factor = clip_gradients(parameters, 0.0)
    assert (norm.item(), factor.item()) == (50.0, 1.0)
    assert parameters[0].grad is not None
    assert parameters[0].grad.item() == 30.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_non_finite_norm_is_shown_and_its_culprit_can_still_be_found(bad: float) -> None:
    parameters = with_gradients([3.0], [bad, 4.0])
    norm, factor = clip_gradients(parameters, 1.0)
    assert not norm.isfinite()
    assert factor.item() == 1.0
    assert [
        bool(parameter.grad.isfinite().all()) for parameter in parameters if parameter.grad is not None
    ] == [
        True,
        False,
    ]
