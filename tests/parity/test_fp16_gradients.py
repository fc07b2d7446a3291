"""Gradients of fp16 with a scaled loss against a plain fp64 model, and a scale that changes no digit in fp32."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import parity_cases
import pytest
import torch

from drivetrain.config.execution import PrecisionConfig
from drivetrain.config.layout import Layout
from drivetrain.config.model import ModelConfig
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.ops._in_place_cross_entropy import linear_cross_entropy_sum
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import ProcessGroup, Ranks
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.precision import LossScaler
from drivetrain.engine.step import StepFigures, Stepper

MODELS = {"llama": parity_cases.llama(), "gpt": parity_cases.gpt(), "qk": parity_cases.llama(qk_norm=True)}


def scaler_of(**fields: float) -> LossScaler:
    return LossScaler(PrecisionConfig.model_validate({"params_dtype": "fp16", **fields}))


def stepper_of(model: ModelConfig, dtype: torch.dtype, scaler: LossScaler | None, parts: int = 2) -> Stepper:
    mesh = Mesh.form(Layout(), 0)
    decoder = Decoder(model, dtype)
    initialize(decoder, parity_cases.SEED)
    return Stepper(
        decoder=decoder,
        sync=gradient_sync(decoder, mesh, Traffic(), zero_stage=0),
        optimizer=build_optimizer(decoder, parity_cases.OPTIMIZER),
        group=ProcessGroup(Ranks()),
        mesh=mesh,
        device=torch.device("cpu"),
        num_microbatches=parts,
        max_norm=parity_cases.MAX_NORM,
        pipeline=None,
        loss_scaler=scaler,
    )


def step_of(stepper: Stepper, model: ModelConfig, step: int = 0) -> tuple[StepFigures, dict[str, np.ndarray]]:
    """One step, and its gradients before clipping."""
    found: dict[str, np.ndarray] = {}

    def look() -> None:
        found.update({name: held.tensor.numpy().copy() for name, held in stepper.sync.gradients().items()})

    batches = iter(parity_cases.micro_batches(model, stepper.num_microbatches, step=step))
    return stepper.step(batches, 1e-2, stop_requested=False, on_gradients=look), found


def worst(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """The worst difference of a gradient, of those that are more than round-off."""
    differences = parity_cases.differences(found, expected)
    return max(value for name, value in differences.items() if not name.endswith("attention.key.bias"))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_fp64_but_for_the_rounding_of_fp16(name: str) -> None:
    model = MODELS[name]
    _, expected = parity_cases.reference(model)
    errors = {}
    for dtype, scaler in ((torch.float16, scaler_of()), (torch.bfloat16, None)):
        figures, found = step_of(stepper_of(model, dtype, scaler), model)
        assert not figures.skipped
        assert all(value.dtype == np.float32 for value in found.values())
        errors[dtype] = worst(found, expected)
        norm = np.sqrt(sum(float(np.square(value).sum()) for value in expected.values()))
        assert float(figures.grad_norm) == pytest.approx(norm, rel=2e-2), (
            "the norm is of gradients without scale"
        )
    # fp16 rounds at 2^-11: a few layers make a hundredth at most. bf16 rounds at 2^-8.
    assert errors[torch.float16] < 1e-2
    assert errors[torch.float16] < errors[torch.bfloat16] / 3


@pytest.mark.parametrize("backend", ["eager", "chunked", "in_place", "auto"])
def test_every_loss_operator_has_the_scaled_gradients(backend: str) -> None:
    model = MODELS["llama"]
    _, expected = parity_cases.reference(model)
    stepper = stepper_of(model, torch.float16, scaler_of())
    selection = Selection({"linear_cross_entropy": backend}, allow_fallback=True)
    stepper.decoder.use_operators(selection)
    figures, found = step_of(stepper, model)
    assert not figures.skipped
    assert worst(found, expected) < 1e-2
    # What has its gradients ready in forward takes the scale as weights of the tokens, or leaves the call to another.
    assert selection.served.keys().isdisjoint({("linear_cross_entropy", "in_place")})


def test_small_gradients_need_the_scale() -> None:
    """A loss of a hundred thousand tokens: divided by them its gradients are below what fp16 holds."""
    model = MODELS["llama"]
    _, expected = parity_cases.reference(model)
    tokens = 1e7

    def gradients(scale: float) -> dict[str, np.ndarray]:
        stepper = stepper_of(model, torch.float16, None, parts=1)
        stepper.decoder.head.gradient_scale = None
        (batch,) = parity_cases.micro_batches(model, 1)
        (stepper.decoder.loss_sum(batch) * (scale / tokens)).backward()
        factor = tokens / scale / batch.num_valid_tokens
        return {name: value * factor for name, value in parity_cases.gradients_of(stepper.decoder).items()}

    assert worst(gradients(2.0**20), expected) < 2e-2
    assert worst(gradients(1.0), expected) > 0.1


@pytest.mark.parametrize("parts", [1, 4])
def test_a_scale_changes_no_digit_in_fp32(parts: int) -> None:
    model = MODELS["llama"]
    plain = stepper_of(model, torch.float32, None, parts)
    scaled = stepper_of(model, torch.float32, scaler_of(initial_loss_scale=2.0**12), parts)
    for step in range(3):
        one, gradients = step_of(plain, model, step)
        other, found = step_of(scaled, model, step)
        for name, value in gradients.items():
            assert np.array_equal(found[name], value), name
        for figure in ("loss_sum", "grad_norm", "clip_coefficient"):
            assert torch.equal(getattr(one, figure), getattr(other, figure)), figure
        assert (one.loss_scale, other.loss_scale) == (None, 4096.0)
    for name, held in plain.sync.parameters().items():
        assert torch.equal(held.tensor, scaled.sync.parameters()[name].tensor), name


def long_loss(gradient_scale: float) -> dict[str, Any]:
    """4,096 tokens of one label and equal hidden states of 60: the weight's gradient is 245,760 at that label."""
    hidden = torch.full((4096, 8), 60.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(16, 8, dtype=torch.float16, requires_grad=True)
    labels, mask = torch.zeros(4096, dtype=torch.int64), torch.ones(4096, dtype=torch.bool)
    loss = linear_cross_entropy_sum(hidden, weight, labels, mask, gradient_scale)
    (loss * 2.0**-8).backward()
    assert weight.grad is not None
    return {"loss": float(loss.detach()), "gradient": weight.grad}


def test_a_sum_over_many_tokens_overflows_only_if_the_scale_says_so() -> None:
    unscaled, scaled = long_loss(1.0), long_loss(2.0**-8)
    assert not bool(unscaled["gradient"].isfinite().all()), (
        "rounded to fp16 before the loss's own factor is known"
    )
    assert float(scaled["gradient"][0, 0]) == pytest.approx(-4096 * 60 * 15 / 16 / 256, rel=2e-3)
    assert scaled["loss"] == unscaled["loss"], "the loss itself is not scaled"


def test_products_and_norms_add_up_in_fp32() -> None:
    """In fp16 a sum of ones ends at 2048, and the square of 300 is infinite."""
    row = torch.cat([torch.tensor([2048.0]), torch.full((4000,), 0.25)]).half()
    for product in (row[None] @ torch.ones(4001, 1).half(), torch.ones(1, 4001).half() @ row[:, None]):
        assert float(product) == 3048
    normed = torch.nn.functional.rms_norm(torch.full((2, 64), 300.0).half(), (64,))
    assert float(normed[0, 0]) == pytest.approx(1.0, rel=1e-3)
