"""What a step needs by the estimate is what a run under a limit counts, and what is repeated is what was chosen."""

import pytest

from drivetrain.config import RunConfig, load_config
from drivetrain.engine.memory import step_estimate
from drivetrain.engine.memory.step_estimate import estimate_step
from drivetrain.errors import ConfigurationError
from drivetrain.measure.flops import forward_flops
from runs_on_the_spot import Tiny


def config(*overrides: str) -> RunConfig:
    small = ["model.num_layers=2", "training.micro_batch_size=4"]
    return load_config("llama-2m", [*small, *overrides]).config


def test_a_run_under_a_limit_counts_what_was_estimated(tiny: Tiny) -> None:
    limit = "memory.device_memory_limit_bytes=100000000"
    tiny.train("training.train_iters=1", "training.eval_iters=0", limit)
    run = tiny.only_run()
    (count,) = [one for one in run.events() if one.get("what") == "memory_count"]
    found = estimate_step(run.config(), 1)
    assert found.peak_bytes == pytest.approx(count["peak_bytes"], rel=0.03)
    assert (found.repeated_flops, found.recomputed) == (0, "")


@pytest.mark.long
def test_a_budget_repeats_what_it_has_to_and_fits() -> None:
    plain = estimate_step(config(), 1)
    everything = estimate_step(config("memory.recompute_granularity=full"), 1)
    assert everything.recomputed == "2 x all"
    budget = (plain.peak_bytes + everything.peak_bytes) // 2
    found = estimate_step(config("memory.recompute_granularity=budget", f"memory.budget_bytes={budget}"), 1)
    assert found.peak_bytes <= budget < plain.peak_bytes
    assert 0 < found.repeated_flops < everything.repeated_flops
    with pytest.raises(ConfigurationError, match="the nearest that works"):
        estimate_step(config("memory.recompute_granularity=budget", "memory.budget_bytes=1000"), 1)


def test_whole_layers_repeat_about_their_forward_pass_in_every_micro_batch() -> None:
    once = estimate_step(config("memory.recompute_granularity=full", "training.global_batch_size=4"), 1)
    twice = estimate_step(config("memory.recompute_granularity=full", "training.global_batch_size=8"), 1)
    assert twice.repeated_flops == 2 * once.repeated_flops
    model = config().model
    tokens = 4 * model.seq_length
    forward = forward_flops(model, tokens=tokens, sum_squared_lengths=tokens * model.seq_length)
    assert 0.6 * (forward.matmul + forward.attention) < once.repeated_flops < 1.3 * forward.total


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), ""),
        (("memory.recompute_granularity=full",), "3 x all"),
        (("memory.recompute_granularity=full", "memory.recompute_method=block"), "1 x all"),
        (
            ("memory.recompute_granularity=selective", "memory.recompute_modules=norm,mlp_act"),
            "3 x mlp_act,norm",
        ),
    ],
)
def test_what_each_layer_repeats_is_told(overrides: tuple[str, ...], words: str) -> None:
    choices = step_estimate._choices(config(*overrides), ("0", "1", "2"))
    assert step_estimate._in_words(choices) == words
