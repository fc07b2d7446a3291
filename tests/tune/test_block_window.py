"""Which steps of a block are measured, which are profiled, and which only tell what the profiler cost."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain.archive.atomic import write_json
from drivetrain.archive.writer import RunWriter
from drivetrain.config import RunConfig, load_config
from drivetrain.tune.block_window import BlockPlan, BlockWindow, window_of

PLAIN_S, SLOW_S = 0.100, 0.125


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config("llama-2m", ["data.prefetch_batches=1"]).config


def test_a_block_without_a_window_is_the_measured_one(config: RunConfig) -> None:
    plan = BlockPlan.of(config, 1, 12, 0)
    assert (plan.start, plan.steps) == (None, 0)
    assert plan.last == plan.measured_to == 2 + 1 + 12


def test_a_window_comes_after_the_measured_steps_and_has_calibration_on_both_sides(config: RunConfig) -> None:
    plan = BlockPlan.of(config, 1, 12, 5)
    assert plan.measured_to == BlockPlan.of(config, 1, 12, 0).measured_to
    assert plan.start == plan.measured_to + 6 + 1 + 1
    assert plan.steps == 6
    assert plan.last == plan.start + 5 + 1 + 6


def test_what_a_loader_has_ready_after_a_trace_was_written_counts_for_nothing() -> None:
    many = ["data.num_workers=2", "data.prefetch_factor=4", "training.micro_batch_size=8"]
    fed = load_config("llama-2m", [*many, "training.global_batch_size=8", "data.prefetch_batches=0"]).config
    plan = BlockPlan.of(fed, 1, 12, 5)
    assert plan.ahead == 8
    assert plan.steps == 8 + 5
    assert plan.last == (plan.start or 0) + plan.steps - 1 + 8 + 6


Lines = Callable[[int], tuple[float, list[str]]]


def block(folder: Path, plan: BlockPlan, line_of: Lines, account: Mapping[int, Mapping[str, int]]) -> Path:
    """A run whose steps take and are tagged what ``line_of`` says, with an account of classes by step."""
    manifest: dict[str, Any] = {
        "config_hash": "0",
        "layout": {"world_size": 1},
        "provenance": {},
        "devices": {},
        "dataset": {},
        "seed": 1,
    }
    with RunWriter.create(folder, "block", config_toml="", manifest=manifest) as writer:
        writer.open_segment(1)
        for step in range(1, plan.last + 1):
            seconds, tags = line_of(step)
            writer.log_metrics(step, {"time/step_s": seconds}, tags)
        path = writer.path
    steps = [
        {
            "step": step,
            "window_ns": sum(classes.values()),
            "classes": {name: ns for name, ns in classes.items() if name != "unexplained"},
            "unexplained_ns": classes.get("unexplained", 0),
        }
        for step, classes in account.items()
    ]
    if steps:
        entry = {"first": min(account), "last": max(account), "name_table": "1"}
        write_json(
            path / "account.json",
            {"schema": 1, "windows": [{**entry, "account": {"ranks": [{"rank": 0, "steps": steps}]}}]},
        )
    return path


def usual(plan: BlockPlan, step: int) -> tuple[float, list[str]]:
    start = plan.start or 0
    if step <= plan.measured_to:
        return 9.0, []  # Whatever the measured steps took, the window does not know.
    if start - 1 <= step < start + plan.steps:
        first = step < start + max(1, plan.ahead)
        return 7.0 if first else SLOW_S, ["profile"]
    fed = start + plan.steps <= step < start + plan.steps + plan.ahead
    return 5.0 if fed else PLAIN_S, []


CLASSES = {"compute.matmul": 100_000_000, "host.launch": 20_000_000, "unexplained": 5_000_000}


def account_of(plan: BlockPlan) -> dict[int, dict[str, int]]:
    start = plan.start or 0
    return {step: dict(CLASSES) for step in range(start, start + plan.steps)}


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_means_are_of_recorded_steps_and_of_calibration_alone(tmp_path: Path, ahead: int) -> None:
    steps = max(1, ahead) + 5
    plan = BlockPlan(15, 23, steps, ahead, 23 + steps - 1 + ahead + 6)
    account = account_of(plan)
    for step in range(23, 23 + max(1, ahead)):
        account[step]["compute.matmul"] = 10**12
    found = window_of(block(tmp_path, plan, lambda step: usual(plan, step), account), plan)
    assert isinstance(found, BlockWindow)
    assert (found.steps, found.plain_steps) == (5, 12)
    assert found.profiled_step_s == pytest.approx(SLOW_S)
    assert found.plain_step_s == pytest.approx(PLAIN_S)
    assert found.classes == CLASSES
    assert found.explained_s == pytest.approx({"compute.matmul": 0.1, "host.launch": 0.02})
    assert found.plain_s == pytest.approx({"compute.matmul": 0.08, "host.launch": 0.016})


PLAN = BlockPlan(15, 23, 6, 1, 35)


def test_a_recorded_step_with_another_tag_is_left_out_of_clock_and_account(tmp_path: Path) -> None:
    account = account_of(PLAN)
    account[25]["host.gc"] = 400_000_000

    def line_of(step: int) -> tuple[float, list[str]]:
        return (0.5, ["profile", "gc"]) if step == 25 else usual(PLAN, step)

    found = window_of(block(tmp_path, PLAN, line_of, account), PLAN)
    assert isinstance(found, BlockWindow)
    assert found.steps == 4
    assert found.profiled_step_s == pytest.approx(SLOW_S)
    assert "host.gc" not in found.classes


def test_a_tagged_step_is_no_calibration(tmp_path: Path) -> None:
    def line_of(step: int) -> tuple[float, list[str]]:
        return (3.0, ["gc"]) if step == 17 else usual(PLAN, step)

    found = window_of(block(tmp_path, PLAN, line_of, account_of(PLAN)), PLAN)
    assert isinstance(found, BlockWindow)
    assert (found.plain_steps, found.plain_step_s) == (11, pytest.approx(PLAIN_S))


def test_a_window_that_was_cut_short_is_taken_as_far_as_it_goes(tmp_path: Path) -> None:
    account = {step: classes for step, classes in account_of(PLAN).items() if step < 26}

    def line_of(step: int) -> tuple[float, list[str]]:
        return usual(PLAN, step) if not 26 <= step < 29 else (5.0 if step == 26 else PLAIN_S, [])

    found = window_of(block(tmp_path, PLAN, line_of, account), PLAN)
    assert isinstance(found, BlockWindow)
    assert (found.steps, found.plain_step_s) == (2, pytest.approx(PLAIN_S + 4.9 / found.plain_steps))


def test_what_is_missing_is_the_reason(tmp_path: Path) -> None:
    none = window_of(block(tmp_path / "a", PLAN, lambda step: usual(PLAN, step), {}), PLAN)
    assert isinstance(none, str)
    assert "no account of profiled steps" in none
    untold = window_of(
        block(tmp_path / "b", PLAN, lambda step: (PLAIN_S, ["profile", "gc"]), account_of(PLAN)), PLAN
    )
    assert isinstance(untold, str)
    assert "free of other tags" in untold
    tagged = window_of(
        block(
            tmp_path / "c",
            PLAN,
            lambda step: (SLOW_S, ["profile"] if 22 <= step < 29 else ["gc"]),
            account_of(PLAN),
        ),
        PLAN,
    )
    assert isinstance(tagged, str)
    assert "beside the window" in tagged
    run = block(tmp_path / "d", PLAN, lambda step: usual(PLAN, step), account_of(PLAN))
    (run / "account.json").write_text("{")
    damaged = window_of(run, PLAN)
    assert isinstance(damaged, str)
    assert "account.json" in damaged
