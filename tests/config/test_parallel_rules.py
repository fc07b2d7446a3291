"""Each rule of layouts refuses its violation with the nearest legal values, and lets a right layout through."""

import pytest

from drivetrain.config import LaunchFacts, load_config, violations
from drivetrain.config.parallel_rules import PARALLEL_RULES

TP, PP, DP, ZERO = (
    "parallelism.tensor_model_parallel_size",
    "parallelism.pipeline_model_parallel_size",
    "parallelism.data_parallel_size",
    "parallelism.zero_stage",
)
SCHEDULE, LAYOUT = "parallelism.pipeline_schedule", "parallelism.pipeline_model_parallel_layout"
LIMIT = "memory.device_memory_limit_bytes=1000000"
# llama-2m: 6 layers, 4 heads with keys and values of their own, ffn 448, vocabulary 4096, 256 tokens. 16 micro-batches.
RUN = ["training.micro_batch_size=1", "training.global_batch_size=16"]

# rule: (processes, overrides that break it and it alone, the message, processes and overrides that keep it)
EXAMPLES: dict[str, tuple[int, list[str], str, tuple[int, list[str]]]] = {
    "layout-covers-processes": (
        3,
        [f"{TP}=2", "training.global_batch_size=15"],
        f"{TP}: 2 ranks hold one model, and 3 processes are no multiple of that; nearest legal values: 2 or 4 "
        "processes; tensor_model_parallel_size = 1 or 3",
        (4, [f"{TP}=2"]),
    ),
    "data-parallel-equals-processes": (
        4,
        [f"{DP}=4", f"{TP}=2"],
        f"{DP}: 4 does not equal the number of processes over the 2 ranks of a model, 4 / 2 = 2; start 8 processes, or "
        "use 2 or none",
        (4, [f"{DP}=2", f"{TP}=2"]),
    ),
    "rank-order-is-an-order": (
        2,
        ["parallelism.rank_order=tp-tp-pp-dp"],
        "parallelism.rank_order: tp-tp-pp-dp does not name each dimension once; the nearest legal value is tp-pp-dp-cp",
        (2, ["parallelism.rank_order=dp-tp-pp-cp"]),
    ),
    "tensor-parallel-divides-heads": (
        8,
        [f"{TP}=8"],
        f"{TP}: 8 does not divide num_attention_heads = 4; nearest legal values: tensor_model_parallel_size = 4; "
        "num_attention_heads = 8",
        (4, [f"{TP}=4"]),
    ),
    "tensor-parallel-and-query-groups": (
        4,
        [f"{TP}=4", "model.num_attention_heads=24", "model.num_query_groups=6", "model.kv_channels=8"],
        f"{TP}: 4 neither divides num_query_groups = 6 nor is a multiple of it; nearest legal values: "
        "tensor_model_parallel_size = 3 or 6",
        (4, [f"{TP}=4", "model.num_query_groups=2"]),
    ),
    "tensor-parallel-divides-ffn": (
        4,
        [f"{TP}=4", "model.ffn_hidden_size=450"],
        f"{TP}: 4 does not divide ffn_hidden_size = 450; nearest legal values: tensor_model_parallel_size = 3 or 5; "
        "ffn_hidden_size = 448 or 452",
        (4, [f"{TP}=4", "model.vocab_size=4097"]),
    ),
    "tensor-parallel-fits-vocabulary": (
        4,
        [f"{TP}=4", "model.vocab_size=3", "data.data_path=corpus"],
        f"{TP}: 4 ranks cannot each have a row of vocab_size = 3; nearest legal values: "
        "tensor_model_parallel_size = 2; vocab_size = 4",
        (4, [f"{TP}=4", "model.vocab_size=5", "data.data_path=corpus"]),
    ),
    "sequence-parallel-divides-sequence": (
        4,
        [f"{TP}=4", "parallelism.sequence_parallel=true", "model.seq_length=250"],
        "parallelism.sequence_parallel: seq_length = 250 is not divisible by tensor_model_parallel_size = 4; nearest "
        "legal values: model.seq_length = 248 or 252; tensor_model_parallel_size = 2 or 5; or "
        "sequence_parallel = false",
        (4, [f"{TP}=4", "model.seq_length=250"]),
    ),
    "pipeline-stages-hold-the-layers": (
        2,
        [f"{PP}=2", f"{LAYOUT}=3,2"],
        f"{PP}: {LAYOUT} = '3,2': 5 layers, but model.num_layers = 6",
        (2, [f"{PP}=2", f"{LAYOUT}=4,2"]),
    ),
    "pipeline-micro-batches": (
        2,
        [f"{PP}=2", f"{SCHEDULE}=interleaved_1f1b", "training.global_batch_size=5"],
        "training.global_batch_size: it makes 5 micro-batches a step, and interleaved_1f1b on 2 ranks cannot run that "
        "many; nearest legal values: 4 or 6 (4 or 6 micro-batches)",
        (2, [f"{PP}=2", "training.global_batch_size=5"]),
    ),
    "hybrid-shards-divide-ranks": (
        4,
        [f"{ZERO}=3", "parallelism.hybrid_shard_size=3"],
        "parallelism.hybrid_shard_size: 3 does not divide the data-parallel size, 4; nearest legal values: 2 or 4",
        (4, [f"{ZERO}=3", "parallelism.hybrid_shard_size=2"]),
    ),
    "hybrid-shards-are-shared": (
        6,
        [f"{ZERO}=1", "parallelism.hybrid_shard_size=1", f"{TP}=2", "training.global_batch_size=15"],
        "parallelism.hybrid_shard_size: one rank holds all shards: nothing is shared; use zero_stage = 0, or "
        "hybrid_shard_size = 3",
        (2, [f"{ZERO}=0", "parallelism.hybrid_shard_size=1"]),
    ),
    "pipelines-reduce-once": (
        4,
        [f"{PP}=2", "parallelism.reduce_each_micro_batch=true"],
        "parallelism.reduce_each_micro_batch: a pipeline's backward passes overlap, and its gradients are complete at "
        "the end of the step alone; use reduce_each_micro_batch = false, or pipeline_model_parallel_size = 1",
        (2, ["parallelism.reduce_each_micro_batch=true"]),
    ),
    "v-shape-gathers-no-tied-embedding": (
        4,
        [f"{PP}=2", f"{ZERO}=3", f"{SCHEDULE}=zbv"],
        f"{ZERO}: with zbv one rank has both ends of the model, and their common embedding cannot be gathered for each "
        "stage by itself; the nearest legal value is 2; or use another pipeline_schedule, or "
        "model.untie_embeddings_and_output_weights = true",
        (4, [f"{PP}=2", f"{ZERO}=3", f"{SCHEDULE}=zbv", "model.untie_embeddings_and_output_weights=true"]),
    ),
    "memory-limit-counts-whole-ranks": (
        2,
        [f"{ZERO}=1", LIMIT],
        "memory.device_memory_limit_bytes: on a CPU it is held by counting one step of a rank that has the whole model "
        "and its optimizer state; use none, or tensor_model_parallel_size = 1, pipeline_model_parallel_size = 1 and "
        "zero_stage = 0",
        (2, [LIMIT]),
    ),
}


def broken(world_size: int, overrides: list[str]) -> dict[str, str]:
    facts = LaunchFacts(world_size, device_type="cpu")
    found = violations(load_config("llama-2m", [*RUN, *overrides]).config, facts)
    return {violation.rule: str(violation) for violation in found}


def test_every_rule_has_an_example() -> None:
    assert [rule.id for rule in PARALLEL_RULES] == list(EXAMPLES)


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_violation_is_told_with_the_nearest_legal_values(rule: str) -> None:
    world_size, overrides, message, _ = EXAMPLES[rule]
    assert broken(world_size, overrides) == {rule: message}


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_right_layout_passes(rule: str) -> None:
    assert broken(*EXAMPLES[rule][3]) == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{PP}=4", f"{SCHEDULE}=zbv"], "zbv on 4 ranks has 8 stages, and each needs a layer"),
        ([f"{PP}=4", f"{LAYOUT}=3,3"], "2 stages, but 1f1b on 4 ranks has 4"),
        ([f"{PP}=4", f"{LAYOUT}=3,0,1,2"], "only the first and the last stage may be without a layer"),
        (
            [f"{PP}=4", "parallelism.virtual_pipeline_model_parallel_size=2"],
            "1f1b has 1 on each rank; leave the field out",
        ),
        (
            [f"{PP}=4", f"{SCHEDULE}=interleaved_1f1b", "parallelism.virtual_pipeline_model_parallel_size=1"],
            "needs several stages on each rank; the nearest legal value is 2",
        ),
    ],
)
def test_stages_that_do_not_come_out_are_refused(overrides: list[str], message: str) -> None:
    assert message in broken(4, overrides)["pipeline-stages-hold-the-layers"]


def test_dualpipev_needs_a_micro_batch_for_each_of_its_stages() -> None:
    few = [f"{PP}=2", f"{SCHEDULE}=dualpipev", "training.global_batch_size=6"]
    assert broken(4, few) == {
        "pipeline-micro-batches": "training.global_batch_size: it makes 3 micro-batches a step, and dualpipev on 2 "
        "ranks cannot run that many; nearest legal values: 8 (4 micro-batches)"
    }
    assert broken(2, few) == {}


def test_with_dualpipev_too_one_rank_has_both_ends_of_a_tied_embedding() -> None:
    tied = [f"{PP}=2", f"{ZERO}=3", f"{SCHEDULE}=dualpipev"]
    (message,) = broken(4, tied).values()
    assert message.startswith(f"{ZERO}: with dualpipev one rank has both ends of the model")
    assert broken(4, [*tied, "model.untie_embeddings_and_output_weights=true"]) == {}


def test_one_process_is_no_layout_of_several() -> None:
    assert broken(1, []) == {}
    assert "1 process is no multiple" in broken(1, [f"{TP}=2", f"{PP}=2"])["layout-covers-processes"]


def test_rules_on_data_parallel_ranks_are_silent_while_the_layout_does_not_fit_the_processes() -> None:
    """Their number is not known then."""
    hybrid = [f"{ZERO}=1", "training.global_batch_size=15"]
    for size in (1, 2):
        given = [*hybrid, f"{TP}=2", f"parallelism.hybrid_shard_size={size}"]
        assert set(broken(7, given)) == {"layout-covers-processes"}
        given = [*hybrid, f"{DP}=3", f"parallelism.hybrid_shard_size={size}"]
        assert set(broken(5, given)) == {"data-parallel-equals-processes"}
    zbv = [f"{PP}=2", f"{ZERO}=3", f"{SCHEDULE}=zbv"]
    assert set(broken(5, zbv)) == {"layout-covers-processes"}


def test_a_set_of_shards_of_one_rank_is_never_the_nearest_legal_value() -> None:
    message = broken(5, [f"{ZERO}=2", "parallelism.hybrid_shard_size=3", "training.global_batch_size=15"])
    assert message["hybrid-shards-divide-ranks"].endswith("nearest legal values: 5")


def test_a_memory_limit_is_refused_only_where_the_device_is_known_to_be_a_cpu() -> None:
    config = load_config("llama-2m", [*RUN, LIMIT, f"{TP}=2"]).config
    for device_type in (None, "cuda"):
        assert violations(config, LaunchFacts(2, device_type=device_type)) == []
