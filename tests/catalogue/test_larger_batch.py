"""A larger batch is one change of several leaves: what it takes along, how it is known, what is expected of it."""

import math
from typing import Any

import pytest

from drivetrain.catalogue import Setting, StepEstimate, entry, move_between
from drivetrain.catalogue.larger_batch import (
    batch_in_words,
    batch_leaves,
    larger_batches,
    predict_larger_batch,
    why_no_larger_batch,
)
from drivetrain.config import LaunchFacts, RunConfig, differing_leaves, load_config
from drivetrain.errors import ConfigurationError
from drivetrain.measure.account import Account, RankAccount, StepAccount, Window
from drivetrain.measure.flops import model_flops
from drivetrain.measure.optimisation import NoPrediction

ALONE = Setting(LaunchFacts())
LIMIT = "memory.device_memory_limit_bytes=1000000000"
BUDGET = {"memory.recompute_granularity": "budget"}


def config(*overrides: str) -> RunConfig:
    return load_config("llama-2m", [LIMIT, "training.micro_batch_size=2", *overrides]).config


def after(before: RunConfig, leaves: dict[str, Any]) -> RunConfig:
    document = before.model_dump()
    for leaf, value in leaves.items():
        section, _, name = leaf.partition(".")
        document[section][name] = value
    return RunConfig.model_validate(document)


@pytest.mark.parametrize(
    ("rule", "words"),
    [("none", "unchanged"), ("sqrt", "by the square root of that"), ("linear", "in proportion")],
)
def test_a_batch_is_known_by_the_rule_of_its_learning_rate(rule: Any, words: str) -> None:
    before = config()
    larger = after(before, {"training.micro_batch_size": 4, **batch_leaves(before, 2, rule)})
    told = f"micro-batch 2 to 4, global batch 16 to 32 for as many tokens, learning rate {words}"
    assert batch_in_words(before, larger) == told


@pytest.mark.parametrize(
    "slip",
    [
        {"optimizer.lr": 5e-3},
        {"lr_schedule.min_lr": 3e-4},
        {"training.train_iters": 500},
        {"training.eval_iters": 8},
        {"lr_schedule.lr_decay_tokens": 1_000_000},
    ],
    ids=lambda slip: next(iter(slip)),
)
def test_a_batch_that_takes_one_leaf_along_wrongly_is_another_experiment(slip: dict[str, Any]) -> None:
    before = config()
    larger = after(before, {**batch_leaves(before, 2, "sqrt"), **slip})
    assert batch_in_words(before, larger) is None


@pytest.mark.parametrize("leaf", ["training.train_iters", "training.eval_iters"])
def test_a_last_batch_that_is_left_away_is_less_text_and_one_that_is_begun_is_as_much(leaf: str) -> None:
    before = config("training.train_iters=5", "training.eval_iters=5")
    leaves = batch_leaves(before, 3, "none")
    assert leaves[leaf] == 2
    larger = after(before, leaves)
    assert batch_in_words(before, larger) is not None
    assert batch_in_words(larger, before) is not None, "taken back it is as many"
    # 48 sequences where 80 were: within one batch, and not as many.
    less = after(before, {**leaves, leaf: 1})
    assert batch_in_words(before, less) is None
    assert batch_in_words(less, before) is None


@pytest.mark.parametrize("factor", [0.0, -2.0, math.inf, math.nan, 1.03])
def test_a_factor_that_is_no_batch_is_refused(factor: float) -> None:
    with pytest.raises(ConfigurationError, match=r"x 2 is twice|nearest: x 1"):
        batch_leaves(config(), factor, "none")


@pytest.mark.parametrize("rule", ["cubic", "", "Sqrt", None, 2])
def test_a_rule_that_is_none_is_refused_with_those_that_are(rule: Any) -> None:
    with pytest.raises(ConfigurationError, match="one of none, sqrt, linear"):
        batch_leaves(config(), 2, rule)


def test_as_much_held_out_text_is_read_with_a_larger_batch() -> None:
    before = config()
    assert batch_leaves(before, 2, "none")["training.eval_iters"] == before.training.eval_iters // 2
    assert "training.eval_iters" not in batch_leaves(config("training.eval_iters=0"), 2, "none")


def test_a_micro_batch_alone_is_a_batch_and_one_with_another_learning_rate_is_none() -> None:
    before = config()
    assert batch_in_words(before, after(before, {"training.micro_batch_size": 4})) == "micro-batch 2 to 4"
    both = {"training.micro_batch_size": 4, "optimizer.lr": 1e-3}
    assert batch_in_words(before, after(before, both)) is None
    assert batch_in_words(before, before) is None


def test_the_micro_batch_grows_within_the_global_batch_and_beyond_it_only_with_a_rule() -> None:
    before = config()
    within = [{"training.micro_batch_size": size} for size in (4, 8, 16)]
    assert larger_batches(before, ALONE) == within
    found = larger_batches(before, Setting(LaunchFacts(), "linear"))
    assert found[:3] == within
    assert found[3]["training.micro_batch_size"] == found[3]["training.global_batch_size"] == 32
    assert found[3]["optimizer.lr"] == before.optimizer.lr * 2
    on_two = larger_batches(before, Setting(LaunchFacts(world_size=2), "none"))
    assert [one["training.micro_batch_size"] for one in on_two[:3]] == [4, 8, 16]
    assert on_two[2]["training.global_batch_size"] == 32


def test_what_keeps_a_batch_from_growing_is_said() -> None:
    assert "device_memory_limit_bytes is absent" in str(
        why_no_larger_batch(load_config("llama-2m").config, ALONE)
    )
    full = config("training.micro_batch_size=16")
    assert "--grow-batch" in str(why_no_larger_batch(full, ALONE))
    assert why_no_larger_batch(full, Setting(LaunchFacts(), "sqrt")) is None


# -- the moves of recompute -----------------------------------------------------------------------------------------


def between(before: RunConfig, later: RunConfig) -> tuple[str, str] | None:
    found = move_between(before, later, differing_leaves(before, later))
    return None if found is None else (found[1].name, found[2])


def test_recompute_with_a_larger_batch_is_one_move_either_way_round() -> None:
    before = config()
    later = after(before, {**BUDGET, "training.micro_batch_size": 4, **batch_leaves(before, 2, "sqrt")})
    name, words = between(before, later) or ("", "")
    assert name == "recompute_larger_batch"
    assert words.startswith("recompute none to budget, micro-batch 2 to 4, global batch 16 to 32")
    assert (between(later, before) or ("",))[0] == "recompute_larger_batch"
    parts = {"memory.recompute_granularity": "selective", "memory.recompute_modules": "norm"}
    assert between(before, after(before, {**parts, "training.micro_batch_size": 4})) is not None


def test_a_batch_alone_is_the_smaller_move() -> None:
    before = config()
    assert between(before, after(before, {"training.micro_batch_size": 4})) == (
        "larger_batch",
        "micro-batch 2 to 4",
    )


@pytest.mark.parametrize(
    "leaves",
    [
        {**BUDGET, "optimizer.lr": 1e-3},
        {**BUDGET, "training.micro_batch_size": 4, "optimizer.lr": 1e-3},
        {**BUDGET, "training.micro_batch_size": 4, "optimizer.weight_decay": 0.3},
        {**BUDGET, "training.micro_batch_size": 4, "memory.device_memory_limit_bytes": 7},
        {**BUDGET},
    ],
)
def test_recompute_with_anything_else_is_no_move(leaves: dict[str, Any]) -> None:
    before = config()
    assert between(before, after(before, leaves)) is None


def test_the_second_move_recomputes_within_the_limit_and_only_where_nothing_of_that_is_there() -> None:
    first, second = entry("recompute").moves
    assert second.proposes(config(), ALONE)[0] == {**BUDGET, "training.micro_batch_size": 4}
    chosen = config("memory.recompute_granularity=selective", "memory.recompute_modules=norm")
    assert second.proposes(chosen, ALONE)[0] == {
        **BUDGET,
        "memory.recompute_modules": None,
        "training.micro_batch_size": 4,
    }
    budget = config("memory.recompute_granularity=budget")
    assert "budget already" in str(second.refused(budget, ALONE))
    assert first.refused(budget, ALONE) is None


# -- what is expected of it -----------------------------------------------------------------------------------------


def account_of(classes: dict[str, int]) -> Account:
    window = Window(
        **dict.fromkeys(
            (
                "busy_ns",
                "idle_ns",
                "compute_ns",
                "communication_ns",
                "overlapped_communication_ns",
                "exposed_communication_ns",
                "copy_ns",
                "exposed_copy_ns",
            )
        ),
        window_ns=sum(classes.values()),
        classes=classes,
        unexplained_ns=0,
    )
    step = StepAccount(step=1, window=window, start_ns=0, end_ns=window.window_ns, first=False)
    return Account((), (RankAccount(rank=0, view="host", whole=window, steps=(step,)),))


CLASSES = {"compute.matmul": 600, "compute.optimizer": 100, "host.launch": 200, "data.loader": 100}
NOTHING = StepEstimate(1_000, 0, "")


def expected(classes: dict[str, int], later: RunConfig, needs: StepEstimate) -> Any:
    return predict_larger_batch(account_of(classes), config(), later, LaunchFacts(), NOTHING, needs)


def test_launches_are_paid_once_a_micro_batch_and_the_update_once_a_step() -> None:
    before = config()
    within = after(before, {"training.micro_batch_size": 8})
    found = expected(CLASSES, within, StepEstimate(1_500, 0, ""))
    assert found.ratio == pytest.approx(1000 / (600 + 100 + 200 / 4 + 100))
    assert found.memory_bytes == 500
    twice = after(before, {"training.micro_batch_size": 4, **batch_leaves(before, 2, "none")})
    found = expected(CLASSES, twice, NOTHING)
    assert found.ratio == pytest.approx(2 * 1000 / (2 * 600 + 100 + 200 + 2 * 100))


def test_what_is_repeated_takes_as_long_as_the_steps_own_computation() -> None:
    before = config()
    within = after(before, {**BUDGET, "training.micro_batch_size": 8})
    tokens = 16 * before.model.seq_length
    flops = model_flops(
        before.model, tokens=tokens, sum_squared_lengths=tokens * before.model.seq_length
    ).total
    found = expected(CLASSES, within, StepEstimate(1_500, flops // 3, "6 x all"))
    assert found.ratio == pytest.approx(1000 / (600 + 600 / 3 + 100 + 200 / 4 + 100), rel=1e-6)
    already = {**CLASSES, "recompute": 300}
    assert expected(already, within, NOTHING).ratio > 1300 / 1000, "it is repeated no more"


def test_ranks_that_share_a_model_have_no_prediction() -> None:
    shared = config("parallelism.tensor_model_parallel_size=2")
    later = after(shared, {"training.micro_batch_size": 8})
    facts = LaunchFacts(world_size=2)
    found = predict_larger_batch(account_of(CLASSES), shared, later, facts, NOTHING, NOTHING)
    assert found == NoPrediction("ranks share a model: what they wait for each other depends on the schedule")
