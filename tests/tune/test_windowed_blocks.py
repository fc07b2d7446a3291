"""Blocks with a window as real processes: what they measure, and what becomes of a window that cannot be had."""

from pathlib import Path

import pytest

from drivetrain.archive.reader import open_run
from drivetrain.config import load_config
from drivetrain.tune.block_window import BlockPlan, BlockWindow, window_of
from drivetrain.tune.short_run import as_override, short_run
from drivetrain.tune.trainer import Attempt, CommandLineTrainer
from runs_on_the_spot import Tiny

ATTEMPTS = 3
"""Of which one must come out to the tolerance. The loop's clock is that of rank 0: where a busy machine has taken its
core from the other rank at an end of the window, the mean of both is of other moments."""


def attempt_of(
    tiny: Tiny, plan: BlockPlan, *overrides: str, world_size: int, options: tuple[str, ...] = ()
) -> Attempt:
    assert plan.start is not None
    given = short_run(load_config(str(tiny.file)).config, plan.last, profiles=True)
    environment = {"OMP_NUM_THREADS": "1"}
    with CommandLineTrainer(tiny.folder / "logs", directory=tiny.folder, environment=environment) as trainer:
        return trainer.profile(
            tiny.file,
            [*given, as_override("run.runs_dir", str(tiny.runs)), *overrides],
            steps=plan.steps,
            start=plan.start,
            options=options,
            world_size=world_size,
        )


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_block_of_one_and_of_two_processes_has_the_account_of_its_window(
    tiny: Tiny, world_size: int
) -> None:
    plan = BlockPlan.of(load_config(str(tiny.file)).config, world_size, 4, 3)
    for _ in range(ATTEMPTS):
        attempt = attempt_of(tiny, plan, world_size=world_size)
        assert attempt.outcome == "finished", attempt.message
        assert attempt.run is not None
        found = window_of(attempt.run, plan)
        assert isinstance(found, BlockWindow), found
        assert (found.steps, found.plain_steps) == (3, 12)
        lines = {line["step"]: line["tags"] for line in open_run(attempt.run).metrics()}
        assert len(lines) == plan.last
        start = plan.start or 0
        assert [step for step, tags in lines.items() if "profile" in tags] == list(
            range(start - 1, start + plan.steps)
        )
        # The classes of a recorded step make up that step by the clock of the loop, which the trace knows nothing of.
        explained = sum(found.explained_s.values())
        if explained == pytest.approx(found.profiled_step_s, rel=0.05):
            break
    assert attempt.run is not None
    assert isinstance(found, BlockWindow)
    assert explained == pytest.approx(found.profiled_step_s, rel=0.05)
    # A change of it names it as its parent.
    if world_size == 1:
        changed = attempt_of(
            tiny, plan, "optimizer.lr=1e-4", world_size=1, options=("--parent", str(attempt.run))
        )
        assert changed.run is not None, changed.message
        assert open_run(changed.run).manifest["parent"] == open_run(attempt.run).id


@pytest.mark.long
def test_a_block_whose_window_cannot_be_had_has_finished_all_the_same(tiny: Tiny) -> None:
    plan = BlockPlan.of(load_config(str(tiny.file)).config, 1, 4, 3)
    attempt = attempt_of(tiny, plan, "profiler.file_size_limit_bytes=10", world_size=1)
    assert attempt.outcome == "finished", attempt.message
    assert attempt.run is not None
    found = window_of(attempt.run, plan)
    assert isinstance(found, str)
    assert "no account of profiled steps" in found
    assert Path(attempt.run).is_dir()
