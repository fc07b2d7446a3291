"""AdamW's moments in bf16: rounded without bias, those of fp32 to a percent, half the bytes, restarted to the bit."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from drivetrain.catalogue.rules import all_rules
from drivetrain.config import LaunchFacts, load_config, violations
from drivetrain.config.tensor_dtypes import tensor_classes
from drivetrain.config.training import OptimizerConfig
from drivetrain.engine.memory import LiveBytes
from drivetrain.engine.memory import low_precision_state as low
from drivetrain.engine.memory.low_precision_state import first_elements, rounded_at_random
from drivetrain.engine.memory.predict import predict_memory
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.placement import Placement, Shard
from drivetrain.engine.random_state import seed_everything
from drivetrain.errors import CheckpointError
from runs_on_the_spot import Tiny, losses_of
from tiny_training import LLAMA, Training

BF16 = torch.bfloat16
FIELD = "precision.optimizer_state_dtype"


def test_rounding_hits_both_neighbours_as_often_as_their_distance_says() -> None:
    ulp = 2.0**-7
    x = torch.full((1 << 16,), 1.0 + 0.25 * ulp)
    every = torch.arange(1 << 16, dtype=torch.int32)
    rounded = rounded_at_random(x, every).double()
    assert set(rounded.tolist()) == {1.0, 1.0 + ulp}
    assert rounded.mean() == 1.0 + 0.25 * ulp
    assert rounded_at_random(-x, every).double().mean() == -(1.0 + 0.25 * ulp)


@pytest.mark.parametrize("value", [0.0, -1.5, math.inf, -math.inf, math.nan])
def test_what_bf16_has_and_what_is_not_finite_stays_as_it_is(value: float) -> None:
    x = torch.full((3,), value)
    found = rounded_at_random(x, torch.tensor([0, 32768, 65535], dtype=torch.int32)).float()
    torch.testing.assert_close(found, x, rtol=0, atol=0, equal_nan=True)


class Matrix(nn.Module):
    """One parameter."""

    def __init__(self, elements: int = 20_000) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, elements).view(-1, 4))


def updated(
    dtype: torch.dtype, gradients: list[Tensor], beta2: float = 0.95, *, fused: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weight and state after an update with each of ``gradients``."""
    model = Matrix(gradients[0].numel())
    settings = OptimizerConfig(lr=1e-2, adam_beta2=beta2, fused=fused)
    optimizer = build_optimizer(model, settings, state_dtype=dtype)
    for gradient in gradients:
        model.weight.grad = gradient.clone()
        optimizer.step()
    return model.weight.detach(), dict(optimizer.state[model.weight])


def drawn(steps: int, elements: int = 20_000) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    scale = torch.logspace(-6, 2, elements).view(-1, 4)
    return [torch.randn(elements // 4, 4, generator=generator) * scale for _ in range(steps)]


def error(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the elements' relative errors."""
    return float(
        ((found.double() - expected.double()) / expected.double().abs().clamp_min(1e-30))
        .square()
        .mean()
        .sqrt()
    )


def test_a_second_moment_decays_where_the_nearest_number_would_stand_still() -> None:
    first = torch.ones(500, 4)
    gradients = [first, *[torch.zeros_like(first)] * 300]
    _, state = updated(BF16, gradients, beta2=0.999)
    expected = 0.001 * 0.999**300
    assert state["exp_avg_sq"].double().mean() == pytest.approx(expected, rel=0.01)
    nearest = torch.tensor(0.001, dtype=BF16)
    for _ in range(300):
        nearest = (nearest.float() * 0.999).to(BF16)
    assert nearest == torch.tensor(0.001, dtype=BF16)


@pytest.mark.parametrize(("beta2", "of_second", "of_weight"), [(0.95, 0.01, 0.01), (0.999, 0.02, 0.01)])
def test_moments_are_those_of_fp32_to_a_percent_and_weights_too(
    beta2: float, of_second: float, of_weight: float
) -> None:
    gradients = drawn(100)
    exact, of_exact = updated(torch.float32, gradients, beta2)
    found, state = updated(BF16, gradients, beta2)
    assert error(state["exp_avg_sq"], of_exact["exp_avg_sq"]) < of_second
    # Without bias: over all elements the sum of the squares is right to far less than each.
    bias = (state["exp_avg_sq"].double() / of_exact["exp_avg_sq"].double()).mean() - 1
    assert abs(bias) < 0.002
    start = Matrix(gradients[0].numel()).weight.detach()
    moved = (exact - start).norm()
    assert (found - exact).norm() / moved < of_weight
    assert state["step"] == of_exact["step"] == len(gradients)


def test_the_same_is_drawn_again_for_the_same_name_update_and_element(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gradients = drawn(5)
    torch.manual_seed(1)
    weight, state = updated(BF16, gradients, fused=True)
    before = torch.get_rng_state()
    # In pieces, after other draws.
    torch.manual_seed(2)
    monkeypatch.setattr(low, "PIECE", 4096)
    again, of_again = updated(BF16, gradients, fused=True)
    assert torch.equal(weight, again)
    assert all(torch.equal(state[key], of_again[key]) for key in state)
    torch.manual_seed(1)
    assert torch.equal(before, torch.get_rng_state()), "a generator's state changed"


def test_the_state_has_half_the_bytes_and_an_update_widens_a_piece_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elements = 1 << 18
    monkeypatch.setattr(low, "PIECE", 1 << 12)
    model = Matrix(elements)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2, fused=True), state_dtype=BF16)
    state = optimizer.state[model.weight]
    config = load_config("llama-2m", ["data.data_path=corpus", f"{FIELD}=bf16"]).config
    told = {one.name: one.dtype for one in tensor_classes(config, LaunchFacts())}
    assert told["optimizer state"] == "bf16"
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == BF16
    assert sum(state[key].nbytes for key in ("exp_avg", "exp_avg_sq")) == 4 * elements
    model.weight.grad = torch.ones_like(model.weight)
    with LiveBytes() as live:
        live.track("parameters", {"weight": model.weight, "gradient": model.weight.grad})
        live.track("optimizer", state)
        before = live.live_bytes
        optimizer.step()
        assert live.peak_bytes - before < 100 * low.PIECE


@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_without_rows_of_a_parameter_counts_its_updates(fused: bool) -> None:
    empty = nn.Parameter(torch.empty(0, 4))
    optimizer = build_optimizer([("weight", empty)], OptimizerConfig(lr=1e-2, fused=fused), state_dtype=BF16)
    empty.grad = torch.empty(0, 4)
    optimizer.step()
    assert optimizer.state[empty]["step"] == 1


def test_rows_of_a_parameter_are_rounded_as_the_whole_of_it_is() -> None:
    gradients = drawn(3, 4_000)
    weight, state = updated(BF16, gradients)
    held = Placement((1_000, 4)).cut(Shard("dp_shard", 0, 300, 200))
    assert first_elements({"weight": held, "step": Placement(())}) == {"weight": 1_200, "step": 0}
    rows = slice(300, 500)
    part = nn.Parameter(Matrix(4_000).weight.detach()[rows].clone())
    optimizer = build_optimizer(
        [("weight", part)],
        OptimizerConfig(lr=1e-2, adam_beta2=0.95, fused=False),
        state_dtype=BF16,
        placements={"weight": held},
    )
    for gradient in gradients:
        part.grad = gradient[rows].clone()
        optimizer.step()
    assert torch.equal(part.detach(), weight[rows])
    assert torch.equal(optimizer.state[part]["exp_avg_sq"], state["exp_avg_sq"][rows])


class LowTraining(Training):
    """With moments in bf16."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(LLAMA, seed)
        self.optimizer = build_optimizer(self.decoder, OptimizerConfig(lr=1e-2), state_dtype=BF16)


def test_a_checkpoint_goes_on_to_the_bit_and_one_of_the_other_dtype_is_named(tmp_path: Path) -> None:
    seed_everything(0, 0)
    whole = LowTraining()
    whole.train(3)
    path = whole.save(tmp_path / "low")
    losses = whole.train(3)
    other = LowTraining(seed=7)
    other.load(path)
    assert other.train(3) == losses
    for one, two in zip(whole.decoder.parameters(), other.decoder.parameters(), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(CheckpointError, match=f"{FIELD}=bf16"):
        Training(LLAMA).load(path)
    plain = Training(LLAMA)
    plain.train(1)
    with pytest.raises(CheckpointError, match=f"{FIELD}=fp32"):
        LowTraining().load(plain.save(tmp_path / "plain"))


@pytest.mark.parametrize(
    ("override", "processes", "mends"),
    [
        ("parallelism.tensor_model_parallel_size=2", 2, "parallelism.tensor_model_parallel_size=1"),
        ("parallelism.pipeline_model_parallel_size=2", 2, "parallelism.pipeline_model_parallel_size=1"),
        ("parallelism.zero_stage=3", 2, "parallelism.zero_stage=2"),
        ("memory.optimizer_offload_fraction=0.5", 1, "memory.optimizer_offload_fraction=0"),
    ],
)
def test_what_it_does_not_go_with_is_refused_with_what_mends_it(
    override: str, processes: int, mends: str
) -> None:
    given = ["data.data_path=corpus", f"{FIELD}=bf16", override]
    broken = violations(load_config("llama-2m", given).config, LaunchFacts(processes), all_rules())
    assert [one for one in broken if FIELD in one.message and mends in one.message]


def test_predicted_memory_has_half_the_state() -> None:
    """Two numbers of 2 bytes for each parameter of 4."""
    small = ("model.num_layers=1", "training.micro_batch_size=1", "training.global_batch_size=1")
    found = predict_memory(load_config("llama-2m", ["data.data_path=corpus", *small, f"{FIELD}=bf16"]).config)
    assert found.own_peaks["optimizer"] == pytest.approx(found.own_peaks["parameters"], rel=0.001)


@pytest.mark.long
def test_two_ranks_train_as_with_fp32_and_alike_whoever_updates_what(tiny: Tiny) -> None:
    """Weights that ranks hold alike are compared before each checkpoint: others would end the run."""
    few = ("training.eval_iters=0", "checkpoint.save_interval=4")
    found: dict[tuple[int, str], list[float]] = {}
    for zero_stage in (0, 2):
        for dtype in ("fp32", "bf16"):
            run = tiny.train_on_ranks(2, f"parallelism.zero_stage={zero_stage}", *few, f"{FIELD}={dtype}")
            found[zero_stage, dtype] = list(losses_of(run).values())
    assert found[0, "bf16"] != found[0, "fp32"]
    assert found[0, "bf16"] == pytest.approx(found[0, "fp32"], rel=0.01)
    # The sum of two gradients is the same in either order, and each element is rounded by its place in the whole.
    assert found[2, "fp32"] == found[0, "fp32"]
    assert found[2, "bf16"] == found[0, "bf16"]
