"""An overflow on one rank is skipped by all of them: no bit of weights or moments changes, and training goes on."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import parity_cases
import pytest
import torch

from drivetrain.config import RunConfig, layout_of, load_config
from drivetrain.engine.devices import select_device
from drivetrain.engine.initial_state import initialize_weights
from drivetrain.engine.model.batch import Batch
from drivetrain.engine.optimisations.implementation import Building
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.local_model import build_local_model
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.precision import LossScaler
from drivetrain.engine.step import Stepper
from rank_processes import on_kept_ranks

MODEL = parity_cases.llama()
STEPS = 10
PLANTED = 3
PARTS = 2
FIELDS = {
    name: getattr(MODEL, name)
    for name in (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
        *("seq_length", "vocab_size", "init_method_std"),
    )
}
TP = "parallelism.tensor_model_parallel_size=2"
PP = "parallelism.pipeline_model_parallel_size=2"
ZERO = "parallelism.zero_stage="
WIRE = "precision.grad_reduce_dtype=bf16"


@dataclass(frozen=True, kw_only=True)
class Planting(Stepper):
    """One rank's gradient is infinite in one step: from its backward pass on, or when all ranks have reduced theirs."""

    rank: int
    reduced: bool
    steps: list[int] = field(default_factory=lambda: [0])

    def _forward_and_backward(self, *arguments: Any) -> Any:
        self.steps[0] += 1
        return super()._forward_and_backward(*arguments)

    def backward(self, loss_sum: torch.Tensor, valid_tokens: int) -> None:
        if not self.reduced and self._is_here():
            loss_sum = loss_sum * 1e30  # beyond fp16 in the first product of backward
        super().backward(loss_sum, valid_tokens)

    def _overflowed(self, scaler: LossScaler, loss_sum: torch.Tensor) -> bool:
        if self.reduced and self._is_here():
            held = next(one.tensor for one in self.sync.gradients().values() if one.tensor.numel())
            held.view(-1)[0] = torch.inf
        return super()._overflowed(scaler, loss_sum)

    def _is_here(self) -> bool:
        return self.steps[0] == PLANTED and self.group.ranks.rank == self.rank


def config_of(*overrides: str) -> RunConfig:
    fields = [f"model.{name}={value}" for name, value in FIELDS.items()]
    return load_config(
        "llama-2m",
        [
            *fields,
            "precision.params_dtype=fp16",
            "precision.hysteresis=1",
            "precision.initial_loss_scale=1024",
            f"training.global_batch_size={parity_cases.ROWS}",
            "training.micro_batch_size=1",
            *overrides,
        ],
    ).config


def batches_of(mesh: Mesh) -> Iterator[Batch]:
    """The same batch at every step, so that its loss must fall."""
    while True:
        yield from parity_cases.micro_batches(MODEL, PARTS, mesh.index("dp"), mesh.size("dp"))


def trained(overrides: tuple[str, ...], rank: int, reduced: bool) -> dict[str, Any]:
    config = config_of(*overrides)
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(layout_of(config, group.size), group.ranks.rank)
        device = select_device(config.run)
        building = Building(
            config=config,
            device=device,
            num_ranks=group.size,
            compute_dtype=torch.float16,
            bucket_size_mb=0.004,
            wire_dtype=torch.bfloat16 if config.precision.grad_reduce_dtype == "bf16" else None,
        )
        local = build_local_model(config, mesh, torch.device("cpu"), building)
        optimizer = build_optimizer(local.sync.updated(), parity_cases.OPTIMIZER)
        initialize_weights(local.sync, config)
        stepper = Planting(
            decoder=local.decoder,
            sync=local.sync,
            optimizer=optimizer,
            group=group,
            mesh=mesh,
            device=torch.device("cpu"),
            num_microbatches=PARTS,
            max_norm=parity_cases.MAX_NORM,
            pipeline=local.pipeline,
            loss_scaler=LossScaler(config.precision),
            rank=rank,
            reduced=reduced,
        )
        batches = batches_of(mesh)
        seen: list[dict[str, Any]] = []
        for _ in range(STEPS):
            before = bits_of(stepper)
            figures = stepper.step(batches, 1e-2, stop_requested=False)
            after = bits_of(stepper)
            loss = figures.loss_sum.double()
            group.sum_(loss)
            assert all(parameter.grad is None for parameter in local.decoder.parameters())
            seen.append(
                {
                    "skipped": figures.skipped,
                    "scale": figures.loss_scale,
                    "unchanged": before == after,
                    "norm": float(figures.grad_norm),
                    "loss": float(loss) / figures.valid_tokens,
                }
            )
        return {"steps": seen, "count": stepper.loss_scaler.skipped_steps if stepper.loss_scaler else None}


def bits_of(stepper: Stepper) -> dict[str, bytes]:
    """Weights, moments and step counts of this rank."""
    held = {**stepper.sync.parameters(), **stepper.sync.moments(stepper.optimizer)}
    found = {name: one.tensor.detach().numpy().tobytes() for name, one in held.items()}
    for number, state in enumerate(stepper.optimizer.state.values()):
        found[f"{number}/step"] = state["step"].numpy().tobytes()
    return found


def check(found: list[dict[str, Any]]) -> None:
    for one in found:
        steps = one["steps"]
        assert [step["skipped"] for step in steps] == [number == PLANTED for number in range(1, STEPS + 1)]
        assert [step["scale"] for step in steps] == [1024.0] * PLANTED + [512.0] * (STEPS - PLANTED)
        assert [step["unchanged"] for step in steps] == [step["skipped"] for step in steps]
        assert one["count"] == 1
        losses = [step["loss"] for step in steps]
        assert losses[PLANTED] == pytest.approx(losses[PLANTED - 1], rel=1e-5), (
            "the weights of the step before"
        )
        assert losses[-1] < losses[PLANTED] < losses[0], "training goes on"
    for number in range(STEPS):
        scales = {(one["steps"][number]["scale"], one["steps"][number]["loss"]) for one in found}
        assert len(scales) == 1, "all ranks say the same"


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), marks=pytest.mark.long),
        (ZERO + "1",),
        pytest.param((ZERO + "1", WIRE), marks=pytest.mark.long),
        pytest.param((ZERO + "2",), marks=pytest.mark.long),
        pytest.param((ZERO + "2", "parallelism.reduce_each_micro_batch=true"), marks=pytest.mark.long),
        pytest.param((ZERO + "3",), marks=pytest.mark.long),
    ],
)
def test_two_ranks_skip_together_at_every_zero_stage(overrides: tuple[str, ...], reduced: bool) -> None:
    check(on_kept_ranks(trained, 2, overrides, 1, reduced))


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    "overrides",
    [
        (TP,),
        (TP, "parallelism.sequence_parallel=true", ZERO + "2"),
        (PP,),
        (PP, ZERO + "1"),
        (PP, "parallelism.pipeline_schedule=zbv"),
        (TP, PP),
        (ZERO + "3", "parallelism.hybrid_shard_size=2"),
    ],
)
def test_four_ranks_of_a_layout_skip_together(overrides: tuple[str, ...], rank: int) -> None:
    """The infinity is in what one rank holds alone, so that no reduction has told the others."""
    if "parallelism.pipeline_schedule=zbv" in overrides:
        overrides = (*overrides, "model.num_layers=4")
    check(on_kept_ranks(trained, 4, overrides, rank, True))
