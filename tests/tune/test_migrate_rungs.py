"""What lies between a plain start and an imported configuration, and in which order it is brought in."""

from typing import Any

from drivetrain.catalogue.rules import all_rules
from drivetrain.config import (
    LaunchFacts,
    RunConfig,
    differing_leaves,
    least_processes,
    parse_config,
    violations,
)
from drivetrain.tune.migrate_rungs import plain_start, proof_batch, rungs_between
from drivetrain.tune.moves import Change, changed

IMPORTED = """
[model]
num_layers = 4
hidden_size = 64
num_attention_heads = 4
seq_length = 32
vocab_size = 512

[training]
micro_batch_size = 4
global_batch_size = 256
train_iters = 1000

[lr_schedule]
lr_warmup_tokens = 819_200
lr_decay_tokens = 8_192_000
min_lr = 1e-5

[parallelism]
tensor_model_parallel_size = 2
sequence_parallel = true
pipeline_model_parallel_size = 2
data_parallel_size = 2
zero_stage = 1
rank_order = "tp-cp-dp-pp"

[overlap]
bucket_size_mb = 160.0
overlap_param_gather = true

[fusion]
level = "core"
attention = "auto"

[memory]
recompute_granularity = "full"
recompute_num_layers = 1

[precision]
params_dtype = "bf16"

[data]
num_workers = 2
"""


def target(**overrides: Any) -> RunConfig:
    config = parse_config(IMPORTED)
    return changed(config, Change({key.replace("__", "."): value for key, value in overrides.items()}))


def test_the_plain_start_is_one_process_in_fp32_with_the_same_training() -> None:
    plain = plain_start(target(), num_threads=1)
    assert least_processes(plain) == 1
    assert not violations(plain, LaunchFacts(world_size=1), all_rules())
    assert (plain.model, plain.precision.params_dtype) == (target().model, "fp32")
    assert plain.training.micro_batch_size == 1
    assert plain.fusion.level == "off"
    assert plain.memory.recompute_granularity == "none"
    assert plain.optimizer.lr == target().optimizer.lr


def test_proofs_have_the_least_batch_that_the_layout_allows_and_each_steps_rate() -> None:
    # Two stages need two micro-batches of four sequences on each of two data-parallel ranks.
    assert proof_batch(target()) == 16
    plain = plain_start(target(), num_threads=1)
    assert plain.training.global_batch_size == 16
    assert plain.lr_schedule.lr_warmup_tokens == 819_200 // 16
    assert plain.lr_schedule.lr_decay_tokens == 8_192_000 // 16
    assert plain.lr_schedule.min_lr == 1e-5


def test_a_length_of_the_schedule_does_not_shrink_to_nothing() -> None:
    plain = plain_start(target(lr_schedule__lr_warmup_tokens=1), num_threads=1)
    assert plain.lr_schedule.lr_warmup_tokens == 1


def test_a_batch_that_is_the_least_already_is_kept() -> None:
    assert proof_batch(target(training__global_batch_size=16)) == 16


def test_one_difference_is_brought_in_after_the_other_and_all_of_them_are() -> None:
    plain = plain_start(target(), num_threads=1)
    plans = rungs_between(plain, target())
    assert [plan.name for plan in plans] == [
        "micro-batch",
        "tensor parallelism",
        "sequence parallelism",
        "pipeline",
        "data parallelism",
        "precision",
        "fusion_level",
        "attention",
        "fused_adamw",
        "recompute",
        "ZeRO",
        "ddp_bucket",
        "overlap_param_gather",
        "data_workers",
    ]
    tiers = {plan.name: plan.tier for plan in plans}
    assert tiers["precision"] == "statistical"
    assert tiers["tensor parallelism"] == "round-off"
    assert tiers["recompute"] == "exact"
    assert tiers["data_workers"] == "exact"
    config = plain
    for plan in plans:
        config = changed(config, Change(plan.leaves, plan.name))
    assert set(differing_leaves(config, target())) == {
        "training.global_batch_size",
        "lr_schedule.lr_warmup_tokens",
        "lr_schedule.lr_decay_tokens",
        "run.num_threads",
    }


def test_proofs_drop_nothing_out_and_dropout_is_no_rung() -> None:
    dropping = target(model__hidden_dropout=0.1)
    plain = plain_start(dropping, num_threads=1)
    assert plain.model.hidden_dropout == 0
    assert all(
        not leaf.startswith("model.") for plan in rungs_between(plain, dropping) for leaf in plan.leaves
    )


def test_no_leaf_is_in_two_rungs() -> None:
    plans = rungs_between(plain_start(target(), num_threads=1), target())
    leaves = [leaf for plan in plans for leaf in plan.leaves]
    assert len(leaves) == len(set(leaves))


def test_a_plain_configuration_has_no_rungs_but_the_micro_batch() -> None:
    plain = plain_start(target(), num_threads=1)
    assert rungs_between(plain, plain) == []
