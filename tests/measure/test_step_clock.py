"""The step clock: steady against wall, and every public mistake with windows."""

from typing import Any

import pytest

from drivetrain.measure.clock import StepClock, Throughput
from drivetrain.measure.peaks import Peak

PEAK = Peak(1000.0, "test")


def record(clock: StepClock, step: int, **changes: Any) -> None:
    values: dict[str, Any] = {
        "duration_s": 1.0,
        "data_wait_s": 0.1,
        "exposed_comm_s": None,
        "tokens": 100,
        "effective_tokens": 80,
        "model_flops": 500,
        "hardware_flops": 600,
    }
    clock.record(step, **{**values, **changes})


def clock_with(steps: int, **changes: Any) -> StepClock:
    clock = StepClock()
    for step in range(1, steps + 1):
        record(clock, step, **changes)
    return clock


def test_warm_up_is_outside_of_steady_state_and_inside_of_wall_time() -> None:
    clock = StepClock()
    record(clock, 1, duration_s=50.0)
    record(clock, 2, duration_s=10.0)
    for step in range(3, 13):
        record(clock, step)
    summary = clock.summary(1, PEAK)
    assert summary.tokens_per_second == 100
    assert summary.effective_tokens_per_second == 80
    assert summary.mfu == 0.5
    assert summary.hfu == 0.6
    assert summary.effective_mfu == pytest.approx(0.4)
    assert summary.data_wait_frac == pytest.approx(0.1)
    assert summary.window == "steps 3-12 of steady state, 10 steps"
    assert summary.wall.seconds == 70
    assert summary.wall.tokens_per_second == pytest.approx(1200 / 70)
    assert summary.wall.mfu == pytest.approx(6000 / 70 / 1000)


@pytest.mark.parametrize("tag", ["compile", "checkpoint", "evaluation", "profile", "gc", "memory_count"])
def test_a_tagged_step_does_not_distort_the_steady_figures(tag: str) -> None:
    clock = clock_with(6)
    record(clock, 7, duration_s=30.0, tags=[tag])
    record(clock, 8)
    summary = clock.summary(1, PEAK)
    assert summary.tokens_per_second == 100
    assert summary.step_time_s.max == 1.0
    assert summary.num_steps == 5
    assert summary.window == "steps 3-8 of steady state, 5 steps"
    assert summary.wall.seconds == 37


def test_time_between_steps_is_wall_time_by_kind() -> None:
    clock = clock_with(4)
    clock.maintenance("evaluation", 2.0)
    clock.maintenance("evaluation", 3.0)
    clock.maintenance("checkpoint", 1.0)
    summary = clock.summary(1, PEAK)
    assert summary.tokens_per_second == 100
    assert summary.wall.maintenance_s == {"evaluation": 5.0, "checkpoint": 1.0}
    assert summary.wall.seconds == 10
    assert clock.summary(1, PEAK, elapsed_s=20.0).wall.seconds == 20
    assert clock.summary(1, PEAK, elapsed_s=20.0).wall.tokens_per_second == 20


def test_steps_timed_together_are_divided_by_the_steps_that_elapsed() -> None:
    # A public trainer divides by the logging interval: with records at steps 1 and 10 both are wrong.
    clock = StepClock(warmup_steps=0)
    record(clock, 1, duration_s=4.0, tokens=100, effective_tokens=100)
    record(clock, 10, duration_s=9.0, tokens=900, effective_tokens=900, num_steps=9)
    summary = clock.summary(1, PEAK)
    assert summary.num_steps == 10
    assert summary.step_time_s.p50 == 1.0
    assert summary.step_time_s.max == 4.0
    assert summary.tokens_per_second == pytest.approx(1000 / 13)
    assert summary.window == "steps 1-10 of steady state, 10 steps"


def test_steps_in_a_record_must_follow_the_last() -> None:
    clock = clock_with(3)
    for wrong in (3, 5, 2):
        with pytest.raises(AssertionError):
            record(clock, wrong)


def test_a_resumed_segment_starts_at_its_own_step_and_warms_up_again() -> None:
    clock = StepClock()
    for step in range(501, 506):
        record(clock, step)
    assert clock.summary(1, PEAK).window == "steps 503-505 of steady state, 3 steps"


def test_percentiles_are_of_steady_steps() -> None:
    clock = StepClock(warmup_steps=0)
    for step in range(1, 12):
        record(clock, step, duration_s=float(step))
    times = clock.summary(1, None).step_time_s
    assert (times.p50, times.p90, times.max) == (6.0, 10.0, 11.0)


def test_utilisation_is_per_device_and_throughput_of_the_job() -> None:
    summary = clock_with(5).summary(4, PEAK)
    assert summary.tokens_per_second == 100
    assert summary.mfu == 0.125
    assert summary.flops_per_second_per_device == 125


def test_without_a_peak_there_is_no_utilisation_and_a_reason() -> None:
    summary = clock_with(5).summary(1, None, peak_reason="nobody knows this device")
    assert (summary.mfu, summary.hfu, summary.effective_mfu, summary.wall.mfu) == (None,) * 4
    assert summary.peak_source is None
    assert summary.reasons["mfu"] == summary.reasons["hfu"] == "nobody knows this device"
    assert summary.tokens_per_second == 100


def figures(summary: Throughput) -> list[float | None]:
    times = summary.step_time_s
    return [
        summary.tokens_per_second,
        summary.effective_tokens_per_second,
        summary.mfu,
        summary.hfu,
        summary.effective_mfu,
        summary.flops_per_second_per_device,
        summary.data_wait_frac,
        summary.communication_exposed_frac,
        times.p50,
        times.p90,
        times.max,
    ]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_without_a_steady_step_figures_are_unknown_and_say_why(steps: int) -> None:
    summary = clock_with(steps).summary(2, PEAK)
    assert figures(summary) == [None] * 11
    assert summary.window == "no step of steady state"
    assert len(summary.reasons) == 11, "each of them says why"
    assert all(summary.reasons.values())
    assert (summary.wall.tokens_per_second is None) == (steps == 0)


def test_exposed_communication_is_unknown_for_one_process_or_when_a_step_lacks_it() -> None:
    alone = clock_with(5, exposed_comm_s=0.2).summary(1, PEAK)
    assert alone.communication_exposed_frac is None
    assert "one process" in alone.reasons["communication_exposed_frac"]
    assert clock_with(5, exposed_comm_s=0.2).summary(2, PEAK).communication_exposed_frac == pytest.approx(0.2)
    clock = clock_with(5, exposed_comm_s=0.2)
    record(clock, 6, exposed_comm_s=None)
    partly = clock.summary(2, PEAK)
    assert partly.communication_exposed_frac is None
    assert "not measured" in partly.reasons["communication_exposed_frac"]


def test_a_figure_above_the_peak_is_a_finding() -> None:
    assert clock_with(5).summary(1, PEAK).findings == ()
    above = clock_with(5).summary(1, Peak(550.0, "test"))
    assert len(above.findings) == 1
    assert above.findings[0].startswith("HFU of 109.1% is impossible")
    assert len(clock_with(5).summary(1, Peak(400.0, "test")).findings) == 2


def test_every_summary_carries_its_rules() -> None:
    summary = clock_with(5).summary(1, PEAK)
    assert "causal half" in summary.flops_rule
    assert "padding included" in summary.token_rule
    assert summary.peak_source == "test"


def test_unknown_tags_and_kinds_are_refused() -> None:
    with pytest.raises(AssertionError, match="lunch"):
        record(StepClock(), 1, tags=["lunch"])
    with pytest.raises(AssertionError, match="lunch"):
        StepClock().maintenance("lunch", 1.0)
    with pytest.raises(AssertionError):
        record(StepClock(), 1, tokens=10, effective_tokens=11)


def test_effective_utilisation_weights_each_step_by_its_own_share() -> None:
    clock = StepClock(warmup_steps=0)
    record(clock, 1, tokens=100, effective_tokens=100, model_flops=1000)
    record(clock, 2, tokens=100, effective_tokens=0, model_flops=200)
    record(clock, 3, tokens=0, effective_tokens=0, model_flops=0)
    assert clock.summary(1, PEAK).effective_mfu == pytest.approx(1000 / 3 / 1000)


def test_durations_of_a_window_are_those_of_steps_with_exactly_the_tags_asked_for() -> None:
    clock = clock_with(3)
    record(clock, 4, duration_s=4.0, tags=["profile"])
    record(clock, 5, duration_s=5.0, tags=["profile", "gc"])
    record(clock, 6, duration_s=6.0, tags=["profile"])
    record(clock, 8, duration_s=8.0, num_steps=2)
    assert clock.durations_s(4, 6, tags=["profile"]) == [4.0, 6.0]
    assert clock.durations_s(1, 8) == [1.0], "steps 1 and 2 are warm-up, 7 and 8 were timed together"
