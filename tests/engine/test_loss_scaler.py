"""The loss scale rises and falls as Megatron-Core's does, and a checkpoint continues it."""

import pytest

from drivetrain.config.execution import PrecisionConfig
from drivetrain.engine.precision.loss_scaler import GIVES_UP_AFTER, LARGEST_SCALE, LossScaler
from drivetrain.errors import CheckpointError

# One line a step, worked out by hand from Megatron-Core's DynamicGradScaler.update with initial_scale 16, min_scale 2,
# growth_interval 3, hysteresis 2: whether it overflowed, and then scale, growth tracker and hysteresis tracker.
TABLE = (
    (False, 16, 1, 2),
    (False, 16, 2, 2),
    (False, 32, 0, 2),  # the third in a row doubles
    (True, 32, 0, 1),  # the first overflow is forgiven
    (False, 32, 1, 1),
    (True, 16, 0, 0),  # not the next step, and yet the second
    (True, 8, 0, -1),  # from here on each halves
    (False, 8, 1, -1),
    (True, 4, 0, -2),
    (False, 4, 1, -2),
    (False, 4, 2, -2),
    (False, 8, 0, 2),  # growth brings the hysteresis back
    (True, 8, 0, 1),
    (True, 4, 0, 0),
    (True, 2, 0, -1),
    (True, 2, 0, -2),  # not below the least
    (False, 2, 1, -2),
    (False, 2, 2, -2),
    (False, 4, 0, 2),
)


def scaler_of(**fields: float) -> LossScaler:
    return LossScaler(PrecisionConfig.model_validate({"params_dtype": "fp16", **fields}))


def test_the_scale_moves_as_megatron_s_does() -> None:
    scaler = scaler_of(initial_loss_scale=16, min_loss_scale=2, loss_scale_window=3, hysteresis=2)
    overflows = 0
    for step, (overflow, scale, growth, hysteresis) in enumerate(TABLE, 1):
        scaler.update(overflow=overflow)
        overflows += overflow
        state = scaler.to_dict()
        found = state["scale"], state["steps_without_overflow"], state["hysteresis_left"]
        assert found == (scale, growth, hysteresis), f"step {step}"
        assert scaler.skipped_steps == overflows


def test_defaults_are_the_documented_ones() -> None:
    scaler = scaler_of()
    assert scaler.scale == 2**16
    for _ in range(999):
        scaler.update(overflow=False)
    assert scaler.scale == 2**16
    scaler.update(overflow=False)
    assert scaler.scale == 2**17


def test_a_constant_scale_neither_falls_nor_grows() -> None:
    scaler = scaler_of(loss_scale=2048)
    for _ in range(1000):
        scaler.update(overflow=False)
    for _ in range(2):
        scaler.update(overflow=True)
    assert scaler.scale == 2048
    assert scaler.skipped_steps == 2
    assert scaler.failure is None
    scaler.update(overflow=True)
    assert scaler.failure is not None
    assert "precision.loss_scale = 2048, which never falls" in scaler.failure


def test_overflow_in_a_row_at_the_least_scale_is_given_up() -> None:
    scaler = scaler_of(initial_loss_scale=4, min_loss_scale=2, hysteresis=1)
    scaler.update(overflow=True)
    assert scaler.scale == 2
    for _ in range(GIVES_UP_AFTER - 1):
        scaler.update(overflow=True)
    scaler.update(overflow=False)
    assert scaler.failure is None, "one step that fits begins the count anew"
    for _ in range(GIVES_UP_AFTER):
        assert scaler.failure is None
        scaler.update(overflow=True)
    assert scaler.failure is not None
    assert "at the least loss scale (precision.min_loss_scale = 2)" in scaler.failure


def test_a_loss_that_stays_not_finite_is_given_up_at_any_scale() -> None:
    scaler = scaler_of()
    for finite in (False, False, True, False, False):
        scaler.update(overflow=True, finite_loss=finite)
    assert scaler.failure is None, "never three in a row"
    scaler.update(overflow=True, finite_loss=False)
    assert scaler.failure is not None
    assert "the loss was not finite in 3 steps in a row" in scaler.failure


def test_a_scale_that_never_overflows_stays_a_number() -> None:
    scaler = scaler_of(initial_loss_scale=2.0**40, loss_scale_window=1)
    for _ in range(200):
        scaler.update(overflow=False)
    assert scaler.scale == LARGEST_SCALE


def test_a_restored_scaler_goes_on_where_it_was() -> None:
    fields = {"initial_loss_scale": 16, "min_loss_scale": 2, "loss_scale_window": 3}
    for cut in range(len(TABLE)):
        whole, first = scaler_of(**fields), scaler_of(**fields)
        for overflow, *_ in TABLE[:cut]:
            first.update(overflow=overflow)
        second = scaler_of(**fields)
        second.restore(first.to_dict())
        for overflow, *_ in TABLE[cut:]:
            second.update(overflow=overflow)
        for overflow, *_ in TABLE:
            whole.update(overflow=overflow)
        assert second.to_dict() == whole.to_dict()


def test_the_configuration_wins_over_a_restored_scale() -> None:
    saved = scaler_of(initial_loss_scale=4).to_dict()
    raised = scaler_of(initial_loss_scale=64, min_loss_scale=32)
    raised.restore(saved)
    assert raised.scale == 32
    constant = scaler_of(loss_scale=1024)
    constant.restore(saved)
    assert constant.scale == 1024


def test_a_shorter_window_than_that_of_the_checkpoint_lets_the_scale_grow() -> None:
    former = scaler_of(initial_loss_scale=16, loss_scale_window=100)
    for _ in range(50):
        former.update(overflow=False)
    scaler = scaler_of(loss_scale_window=10)
    scaler.restore(former.to_dict())
    scaler.update(overflow=False)
    assert scaler.scale == 32


@pytest.mark.parametrize("value", [None, "16", True, float("nan"), float("inf")])
def test_a_checkpoint_without_a_number_is_refused(value: object) -> None:
    saved = {**scaler_of().to_dict(), "scale": value}
    with pytest.raises(CheckpointError, match="scale"):
        scaler_of().restore(saved)
