"""Changes: one leaf, or a move of several that belong together; and the short runs they are tried in."""

import pytest
from hypothesis import given

from configuration_strategies import schema_valid_configs
from drivetrain.config import (
    LaunchFacts,
    differing_leaves,
    leaf_values,
    load_config,
    num_microbatches,
    total_tokens,
    violations,
)
from drivetrain.errors import ConfigurationError
from drivetrain.tune.moves import Change, batch_move, changed
from drivetrain.tune.short_run import as_override, prefetched_steps, short_run, steps_to_run


def config(*overrides: str):
    return load_config("llama-2m", overrides).config


@pytest.mark.parametrize(("rule", "scale"), [("none", 1.0), ("sqrt", 2**0.5), ("linear", 2.0)])
def test_a_batch_moves_with_its_learning_rate_and_as_many_tokens(rule: str, scale: float) -> None:
    before = config()
    after = changed(before, batch_move(before, 2, rule))
    assert after.training.global_batch_size == 32
    assert after.training.train_iters == 250
    assert total_tokens(after) == total_tokens(before)
    assert after.optimizer.lr == pytest.approx(before.optimizer.lr * scale)
    assert after.lr_schedule.min_lr == pytest.approx(before.lr_schedule.min_lr * scale)
    assert violations(after, LaunchFacts()) == []


def test_steps_are_rounded_up_and_the_decay_stays_where_it_was() -> None:
    before = config("training.train_iters=501")
    after = changed(before, batch_move(before, 2, "none"))
    assert after.training.train_iters == 251
    assert after.lr_schedule.lr_decay_tokens == total_tokens(before)


def test_half_a_sequence_is_refused_with_the_nearest_batch() -> None:
    with pytest.raises(ConfigurationError, match="no whole number of sequences"):
        batch_move(config(), 1.03, "none")


def test_a_change_is_taken_back_by_the_values_before_it() -> None:
    before = config()
    change = Change({"fusion.compile": True, "data.num_workers": 3})
    after = changed(before, change)
    assert set(differing_leaves(before, after)) == set(change.leaves)
    assert changed(after, change.before(before)) == before


def test_an_unknown_leaf_or_a_value_out_of_range_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="no such field"):
        changed(config(), Change({"data.workers": 1}))
    with pytest.raises(ConfigurationError, match="num_workers"):
        changed(config(), Change({"data.num_workers": -1}))


@given(schema_valid_configs())
def test_every_leaf_reads_back_from_its_override(found) -> None:
    overrides = [as_override(leaf.path, value) for leaf, value in leaf_values(found)]
    assert load_config("llama-2m", overrides).config == found


def test_a_short_run_follows_the_schedule_of_the_long_one() -> None:
    long = config()
    short = load_config("llama-2m", short_run(long, 20)).config
    assert short.training.train_iters == 20
    assert short.lr_schedule.lr_decay_tokens == total_tokens(long)
    assert violations(short, LaunchFacts()) == []


def test_steps_fed_from_what_was_ready_at_the_start_are_not_measured() -> None:
    fed = config("data.num_workers=4", "data.prefetch_factor=3", "training.micro_batch_size=4")
    assert num_microbatches(fed, 1) == 4
    assert prefetched_steps(fed, 1) == 3
    assert prefetched_steps(config("data.prefetch_batches=9", "training.micro_batch_size=4"), 1) == 3
    assert prefetched_steps(config(), 1) == 0
    assert steps_to_run(fed, 1, 10) == 10 + 3 + 2
    assert steps_to_run(config("fusion.compile=true"), 1, 10) > steps_to_run(config(), 1, 10)
