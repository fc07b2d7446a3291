"""Two real runs that differ by a move of several leaves are judged as one declared change, at equal tokens."""

from pathlib import Path
from typing import Any

import pytest
from trainer_in_process import InProcessTrainer

from drivetrain.archive.reader import Run, open_run
from drivetrain.cli.tune_command import Options, run_tune
from drivetrain.config import load_config
from drivetrain.errors import DrivetrainError
from drivetrain.tune.gate_runs import gate_of_runs
from drivetrain.tune.moves import recompute_and_batch
from drivetrain.tune.short_run import as_override
from runs_on_the_spot import Tiny


def made(tiny: Tiny, *overrides: str) -> Run:
    attempt = InProcessTrainer().train(tiny.file, overrides)
    assert attempt.run is not None
    return open_run(attempt.run)


@pytest.mark.parametrize(
    ("slip", "answer"),
    [
        ((), "inconclusive"),
        (("training.train_iters=8",), "not comparable"),
        (("optimizer.lr=1e-4",), "not comparable"),
    ],
)
def test_recompute_with_a_larger_batch_is_compared_as_one_change(
    tiny: Tiny, slip: tuple[str, ...], answer: str
) -> None:
    before = load_config(str(tiny.file)).config
    move = recompute_and_batch(before, {"recompute_granularity": "full"}, 8, factor=2, rule="sqrt")
    leaves = [as_override(leaf, value) for leaf, value in move.leaves.items()]
    found = gate_of_runs(made(tiny), made(tiny, *leaves, *slip))
    assert found.verdict == answer, found.why
    if slip:
        assert "do not belong together" in found.why
    else:
        assert found.tier == "statistical"
        assert "recompute_larger_batch" in found.numbers["tier_rule"]
        assert "baseline of seed 1235" in found.numbers["missing"], "it is compared, and wants more pairs"


def test_a_rule_of_the_learning_rate_that_is_none_is_refused_with_the_nearest(tmp_path: Path) -> None:
    given: dict[str, Any] = dict.fromkeys(
        ("budget", "gate_steps", "trial_steps", "trial_looks", "knob_trials", "num_processes")
    )
    options = Options(
        **given,
        tunes_dir=str(tmp_path / "tunes"),
        only=(),
        leave_one_out=True,
        short_gates=False,
        grow_batch="sqr",
    )
    with pytest.raises(DrivetrainError, match=r"--grow-batch sqr: .* did you mean sqrt"):
        run_tune("llama-2m", [], options, as_json=False)
    assert not (tmp_path / "tunes").exists()
