"""The step that trains has the gradients of a plain model: the anchor of all tests that compare layouts with a run."""

from collections.abc import Mapping

import numpy as np
import parity_cases
import pytest
import torch

from drivetrain.config.layout import Layout
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import ProcessGroup, Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.step import Stepper
from rank_processes import on_kept_ranks

MODEL = parity_cases.llama()

Gradients = dict[str, np.ndarray]


def stepped(
    group: ProcessGroup, num_microbatches: int, zero_stage: int
) -> tuple[Mapping[str, float], float, float]:
    """One step: worst difference of each gradient from the plain model's, the norm, the loss sum over valid tokens."""
    size, rank = group.size, group.ranks.rank
    mesh = Mesh.form(Layout(dp=size), rank)
    decoder = parity_cases.reference_decoder(MODEL)
    sync = gradient_sync(decoder, mesh, Traffic(), zero_stage=zero_stage)
    stepper = Stepper(
        decoder=decoder,
        sync=sync,
        optimizer=build_optimizer(decoder, parity_cases.OPTIMIZER),
        group=group,
        mesh=mesh,
        device=torch.device("cpu"),
        num_microbatches=num_microbatches,
        max_norm=parity_cases.MAX_NORM,
        pipeline=None,
    )
    found: Gradients = {}
    placements = {}

    def look() -> None:
        for name, held in sync.gradients().items():
            found[name] = held.tensor.detach().numpy().copy()
            placements[name] = held.placement

    batches = iter(parity_cases.micro_batches(MODEL, num_microbatches, rank, size))
    figures = stepper.step(batches, 1e-3, stop_requested=False, on_gradients=look)
    loss_sum = figures.loss_sum.double()
    group.sum_(loss_sum)
    loss, expected = parity_cases.reference(MODEL)
    assert float(loss_sum) / figures.valid_tokens == pytest.approx(loss, rel=1e-6)
    return parity_cases.differences(found, expected, placements), float(figures.grad_norm), loss


def norm_of(gradients: Mapping[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(float((value**2).sum()) for value in gradients.values())))


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_a_step_has_the_gradients_of_a_plain_model(num_microbatches: int) -> None:
    differences, norm, _ = stepped(ProcessGroup(Ranks()), num_microbatches, 0)
    assert max(differences.values()) < 1e-9
    assert norm == pytest.approx(norm_of(parity_cases.reference(MODEL)[1]), rel=1e-9)


def stepped_on_ranks(zero_stage: int) -> tuple[Mapping[str, float], float, float]:
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        return stepped(group, 2, zero_stage)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_a_step_of_several_ranks_has_the_gradients_of_a_plain_model(zero_stage: int) -> None:
    for differences, norm, _ in on_kept_ranks(stepped_on_ranks, 2, zero_stage):
        assert max(differences.values()) < 1e-9
        assert norm == pytest.approx(norm_of(parity_cases.reference(MODEL)[1]), rel=1e-9)
