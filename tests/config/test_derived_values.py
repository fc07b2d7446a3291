"""What absent leaves become is reported with a reason, and the counts of a run follow from its batch."""

import pytest

from drivetrain.config import (
    Derived,
    LaunchFacts,
    decay_tokens,
    derived_values,
    leaves,
    load_config,
    num_microbatches,
    tokens_per_step,
    total_tokens,
    wsd_decay_tokens,
)

# What a test writes where a leaf of this kind must be given.
GIVEN = {"whole number": "16", "text": "some"}


def derived(*overrides: str, facts: LaunchFacts | None = None) -> dict[str, Derived]:
    config = load_config("llama-2m", ["training.train_iters=350", *overrides]).config
    found = derived_values(config, facts or LaunchFacts())
    assert len({item.field for item in found}) == len(found)
    return {item.field: item for item in found}


def derived_leaves() -> list[str]:
    return [path for path, leaf in leaves().items() if "Derived when absent" in leaf.help]


@pytest.mark.parametrize("path", derived_leaves())
def test_a_leaf_that_is_derived_when_absent_is_reported_when_absent_only(path: str) -> None:
    schedule = "lr_schedule.lr_decay_style=WSD"
    absent = derived(schedule, f"{path}=none")
    assert path in absent
    assert absent[path].reason
    assert path not in derived(schedule, f"{path}={GIVEN[leaves()[path].kind]}")


def test_values_of_the_model_are_those_the_model_uses() -> None:
    found = derived("model.ffn_hidden_size=none", "model.hidden_size=320", "model.num_attention_heads=5")
    assert found["model.ffn_hidden_size"].value == 896  # 8/3 x 320 = 853.3
    assert found["model.num_query_groups"].value == 5
    assert found["model.kv_channels"].value == 64
    assert found["model.max_position_embeddings"].value == 256
    gelu = derived("model.ffn_hidden_size=none", "model.activation_func=gelu")
    assert gelu["model.ffn_hidden_size"].value == 512


def test_counts_follow_from_the_batch() -> None:
    found = derived("training.global_batch_size=96", facts=LaunchFacts(world_size=2))
    assert found["parallelism.data_parallel_size"] == Derived(
        "parallelism.data_parallel_size", 2, "2 processes"
    )
    assert found["num_microbatches"].value == 3
    assert found["tokens_per_step"].value == 96 * 256
    assert found["total_tokens"].value == 96 * 256 * 350


def test_a_count_that_does_not_come_out_is_none_with_the_reason() -> None:
    found = derived("training.global_batch_size=40")["num_microbatches"]
    assert found.value is None
    assert found.reason == "global_batch_size = 40 is no multiple of 16"


def test_facts_of_the_launch_give_the_name_and_the_threads() -> None:
    facts = LaunchFacts(world_size=8, local_world_size=2, usable_cores=5, source_name="llama-2m")
    found = derived("training.global_batch_size=128", facts=facts)
    assert found["run.name"].value == "llama-2m"
    assert found["run.num_threads"].value == 2
    assert found["run.num_threads"].reason == "5 usable cores / 2 local processes"


def test_what_is_not_known_before_the_start_is_none() -> None:
    found = derived()
    assert found["run.name"].value is None
    assert found["run.num_threads"].value is None


def test_schedule_values_are_reported_for_the_schedule_that_uses_them() -> None:
    assert "lr_schedule.lr_decay_tokens" not in derived("lr_schedule.lr_decay_style=constant")
    assert "lr_schedule.lr_wsd_decay_tokens" not in derived("lr_schedule.lr_decay_style=cosine")


def test_helpers_agree_with_the_report() -> None:
    config = load_config("llama-2m", ["training.global_batch_size=64", "training.train_iters=350"]).config
    assert num_microbatches(config, world_size=2) == 2
    assert tokens_per_step(config) == 64 * 256
    assert total_tokens(config) == decay_tokens(config) == 350 * 64 * 256
    assert wsd_decay_tokens(config) == decay_tokens(config) // 5
    given = load_config(
        "llama-2m", ["lr_schedule.lr_decay_tokens=3", "lr_schedule.lr_wsd_decay_tokens=2"]
    ).config
    assert (decay_tokens(given), wsd_decay_tokens(given)) == (3, 2)
