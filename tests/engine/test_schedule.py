"""The learning rate over tokens."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.config.training import LearningRateScheduleConfig, OptimizerConfig
from drivetrain.engine.schedule import learning_rate

SHAPES = ("linear", "cosine", "minus_sqrt")
TOTAL = 1000
PEAK = OptimizerConfig(lr=0.5)


def schedule(**fields: object) -> LearningRateScheduleConfig:
    return LearningRateScheduleConfig(**fields)


def at(tokens: int, **fields: object) -> float:
    return learning_rate(tokens, PEAK, schedule(**fields), TOTAL)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[OptimizerConfig, LearningRateScheduleConfig, int]:
    total = draw(st.integers(10, 10**13))
    end = draw(st.one_of(st.none(), st.integers(10, total)))
    last = total if end is None else end
    warmup = draw(st.integers(0, last - 1))
    lr = draw(st.floats(1e-6, 1.0))
    return (
        OptimizerConfig(lr=lr),
        LearningRateScheduleConfig(
            lr_decay_style=draw(st.sampled_from(["cosine", "WSD", "constant"])),
            min_lr=lr * draw(st.floats(0, 1)),
            lr_warmup_tokens=warmup,
            lr_decay_tokens=end,
            lr_wsd_decay_tokens=draw(st.one_of(st.none(), st.integers(1, last - warmup))),
            lr_wsd_decay_style=draw(st.sampled_from(SHAPES)),
        ),
        total,
    )


def test_warm_up_is_linear_from_zero_to_the_peak() -> None:
    assert at(0, lr_warmup_tokens=100) == 0.0
    assert at(25, lr_warmup_tokens=100) == pytest.approx(0.125)
    assert at(100, lr_warmup_tokens=100) == pytest.approx(0.5)


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert at(0) == 0.5


def test_cosine_is_halfway_in_the_middle_of_the_decay() -> None:
    assert at(550, lr_warmup_tokens=100, min_lr=0.1) == pytest.approx(0.3)


def test_cosine_ends_at_lr_decay_tokens_and_stays() -> None:
    assert at(400, lr_decay_tokens=400, min_lr=0.1) == 0.1
    assert at(401, lr_decay_tokens=400, min_lr=0.1) == 0.1
    assert at(10 * TOTAL, min_lr=0.1) == 0.1


@pytest.mark.parametrize(
    ("shape", "quarter"),
    [("linear", 0.75), ("cosine", 0.5 * (1 + math.cos(math.pi / 4))), ("minus_sqrt", 0.5)],
)
def test_wsd_is_stable_and_then_decays_in_its_shape(shape: str, quarter: float) -> None:
    fields = {
        "lr_decay_style": "WSD",
        "lr_wsd_decay_tokens": 400,
        "lr_wsd_decay_style": shape,
        "lr_warmup_tokens": 10,
    }
    assert at(10, **fields) == at(300, **fields) == at(600, **fields) == 0.5
    assert at(700, **fields) == pytest.approx(0.5 * quarter)
    assert at(1000, **fields) == 0.0


def test_wsd_decays_over_the_last_fifth_by_default() -> None:
    assert at(800, lr_decay_style="WSD") == 0.5
    assert at(900, lr_decay_style="WSD") == pytest.approx(0.25)


def test_constant_stays_after_warm_up() -> None:
    assert at(10 * TOTAL, lr_decay_style="constant", min_lr=0.1, lr_warmup_tokens=5) == 0.5


@given(schedules(), st.data())
def test_rate_stays_between_zero_and_the_peak(
    drawn: tuple[OptimizerConfig, LearningRateScheduleConfig, int], data: st.DataObject
) -> None:
    optimizer, lr_schedule, total = drawn
    tokens = data.draw(st.integers(0, 2 * total))
    rate = learning_rate(tokens, optimizer, lr_schedule, total)
    assert 0.0 <= rate <= optimizer.lr * (1 + 1e-12)
    if tokens >= lr_schedule.lr_warmup_tokens:
        assert rate >= lr_schedule.min_lr * (1 - 1e-12)


@given(schedules(), st.data())
def test_rate_never_jumps(
    drawn: tuple[OptimizerConfig, LearningRateScheduleConfig, int], data: st.DataObject
) -> None:
    optimizer, lr_schedule, total = drawn
    end = total if lr_schedule.lr_decay_tokens is None else lr_schedule.lr_decay_tokens
    warmup = lr_schedule.lr_warmup_tokens
    corners = [corner for corner in (warmup - 1, end - 1, end - end // 5 - 1) if corner >= 0]
    tokens = data.draw(st.one_of(st.sampled_from(corners), st.integers(0, 2 * total)))
    wsd = lr_schedule.lr_decay_style == "WSD"
    anneal = end // 5 if lr_schedule.lr_wsd_decay_tokens is None else lr_schedule.lr_wsd_decay_tokens
    length = max(1, min(end - warmup, anneal) if wsd else end - warmup)
    # Per token at most: the warm-up's slope, that of half a cosine (pi / 2), or, for 1 - sqrt(x), whose slope
    # is infinite at its start, its first token.
    bound = optimizer.lr * max(1 / max(warmup, 1), math.pi / 2 / length)
    if wsd and lr_schedule.lr_wsd_decay_style == "minus_sqrt":
        bound = max(bound, optimizer.lr * math.sqrt(1 / length))
    before = learning_rate(tokens, optimizer, lr_schedule, total)
    after = learning_rate(tokens + 1, optimizer, lr_schedule, total)
    assert abs(after - before) <= bound * (1 + 1e-9) + 1e-12 * optimizer.lr


@given(schedules(), st.integers(1, 64), st.integers(1, 64))
def test_rate_at_a_token_does_not_depend_on_the_batch_size(
    drawn: tuple[OptimizerConfig, LearningRateScheduleConfig, int], small: int, times: int
) -> None:
    optimizer, lr_schedule, total = drawn

    def curve(tokens_per_step: int, steps: int) -> dict[int, float]:
        positions = [step * tokens_per_step for step in range(steps)]
        return {seen: learning_rate(seen, optimizer, lr_schedule, total) for seen in positions}

    fine, coarse = curve(small, 4 * times + 1), curve(small * times, 5)
    assert {seen: fine[seen] for seen in coarse} == coarse
