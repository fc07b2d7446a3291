"""Each entry of the catalogue says what is true of the schema and the account, and its moves do what they say."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from drivetrain.catalogue import Knob, Optimisation, catalogue, entry, entry_of_field
from drivetrain.catalogue.rules import all_rules, rules_of
from drivetrain.catalogue.time_models import facts_of_account, mean_step
from drivetrain.config import (
    BASIC_RULES,
    LaunchFacts,
    Rule,
    RunConfig,
    idle_fields,
    leaves,
    load_config,
    operator_fields,
    violations,
)
from drivetrain.errors import DrivetrainError
from drivetrain.measure.account import Account, RankAccount, StepAccount, Window
from drivetrain.measure.optimisation import Count, HostMemory, NoPrediction, Observation

TWO = LaunchFacts(world_size=2)
# What an entry needs that has nothing to do on two ranks of a machine.
FACTS = {"hierarchical_collectives": LaunchFacts(world_size=4, local_world_size=2)}
FOR_TWO = ["training.micro_batch_size=8", "checkpoint.save_interval=10"]
BASE = load_config("llama-2m", FOR_TWO).config
# What a model must be like for entries that have nothing to do in a Llama.
MODELS = {
    "hierarchical_collectives": ["training.micro_batch_size=4"],
    "embedding_offload": ["model.untie_embeddings_and_output_weights=true"],
    "layer_norm": ["model.normalization=LayerNorm"],
    "add_layer_norm": ["model.normalization=LayerNorm"],
    "bias_dropout_add": ["model.hidden_dropout=0.1"],
    "overlap_param_gather": ["parallelism.zero_stage=1"],
    "prefetch_blocks": ["parallelism.zero_stage=3"],
    "tp_chunks": ["parallelism.tensor_model_parallel_size=2"],
    "tp_async_gradient": ["parallelism.tensor_model_parallel_size=2"],
    "tp_symmetric_memory": [
        "parallelism.tensor_model_parallel_size=2",
        "parallelism.sequence_parallel=true",
        "run.device=cuda",
    ],
}
OPERATORS = operator_fields()
# An operator is a move of its own where the level is on and leaves it out.
MODELS |= {name: ["fusion.level=all", *MODELS.get(name, [])] for name in OPERATORS}
# What a knob needs beside its entry.
FOR_KNOBS = {
    "memory.recompute_num_layers": {
        "memory.recompute_granularity": "full",
        "memory.recompute_modules": "none",
    }
}
MODELS["bake_transforms"] = ["data.transform=numpy.sort"]
NOTHING = Observation(
    num_steps=2, missing=frozenset({"operators", "kernels", "ranges", "shapes", "collectives"})
)

# What the records of a window show with and without each optimisation.
LOOP = {
    name: Count(2, 100)
    for name in ("drivetrain/fetch", "drivetrain/forward", "drivetrain/optimizer", "ProfilerStep#5")
}
SAVE = {**LOOP, "drivetrain/checkpoint": Count(1, 900)}
SHOWN = {
    "async_save": Observation(2, ranges={**SAVE, "drivetrain/checkpoint/snapshot": Count(1, 90)}),
    "bf16": Observation(2, matmul_dtypes={"bf16": Count(9, 900), "fp32": Count(1, 10)}),
    "fp16": Observation(2, matmul_dtypes={"fp16": Count(9, 900), "fp32": Count(1, 10)}),
    "compile": Observation(2, ranges={**LOOP, "Torch-Compiled Region: 0/0": Count(4, 80)}),
    "data_workers": Observation(
        2, ranges={**LOOP, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__": Count(2, 5)}
    ),
    "ddp_bucket": Observation(2, collective_bytes={"all_reduce": (32, 4_000, 9_000, 4, 32, 4_000, 9_000, 4)}),
    # One pass a step of 8 sequences each, of 16 on two ranks.
    "micro_batch": Observation(2, ranges=LOOP),
    "fused_adamw": Observation(2, ranges=LOOP, operators={"aten::_fused_adamw_": Count(4, 50)}),
    "grad_reduce_dtype": Observation(2, ranges={**LOOP, "drivetrain/wire/bf16": Count(6, 50)}),
    "overlap_param_gather": Observation(2, ranges={**LOOP, "drivetrain/gather/overlapped": Count(6, 50)}),
    "hierarchical_collectives": Observation(2, ranges={**LOOP, "drivetrain/levels/all_reduce": Count(6, 50)}),
    "prefetch_blocks": Observation(
        2,
        ranges={
            **LOOP,
            "FSDP::all_gather (blocks.0)": Count(8, 50),
            "FSDP::forward_prefetch for blocks.1": Count(2, 9),
        },
    ),
    "tp_chunks": Observation(2, ranges={**LOOP, "drivetrain/tp_chunk/summed": Count(32, 60)}),
    "tp_async_gradient": Observation(2, ranges={**LOOP, "drivetrain/tp_async/copied": Count(8, 60)}),
    "recompute": Observation(2, ranges={**LOOP, "drivetrain/recompute/norm": Count(16, 60)}),
    "tp_symmetric_memory": Observation(
        2,
        ranges={
            **LOOP,
            # Of the two micro-batches that LOOP has, through the layers of BASE.
            "drivetrain/tp_symmetric/all_gather": Count(8 * BASE.model.num_layers, 60),
            "drivetrain/tp_symmetric/reduce_scatter": Count(8 * BASE.model.num_layers, 60),
        },
    ),
    "keep_freed_memory": Observation(2, host_memory=HostMemory(True, page_faults_per_step=3.0)),
    "optimizer_offload": Observation(2, ranges={**LOOP, "drivetrain/offload/optimizer": Count(6, 90)}),
    "embedding_offload": Observation(2, ranges={**LOOP, "drivetrain/offload/embedding": Count(6, 90)}),
    "optimizer_state_dtype": Observation(2, ranges={**LOOP, "drivetrain/optimizer/bf16_state": Count(6, 90)}),
    "activation_offload": Observation(2, ranges={**LOOP, "drivetrain/offload/activations": Count(6, 90)}),
}
OF_FETCHES = {
    "bake_transforms": "baked",
    "packing": "packed",
    "prefetch": "prefetched",
    "sample_cache": "sample_cache",
}
SHOWN |= {
    name: Observation(2, ranges={**LOOP, f"drivetrain/fetch/{mark}": Count(2, 1)})
    for name, mark in OF_FETCHES.items()
}
SHOWN |= {
    name: Observation(2, ranges={**LOOP, f"drivetrain/operator/{name}/inductor": Count(8, 90)})
    for name in OPERATORS
}
SHOWN["fusion_level"] = SHOWN["glu"]
ABSENT = {
    "async_save": Observation(2, ranges=SAVE),
    "bf16": Observation(2, matmul_dtypes={"fp32": Count(9, 900), "unknown": Count(1, 1)}),
    "fp16": Observation(2, matmul_dtypes={"bf16": Count(9, 900), "unknown": Count(1, 1)}),
    "compile": Observation(2, ranges=LOOP, operators={"aten::mm": Count(8, 100)}),
    "data_workers": Observation(2, ranges=LOOP),
    "ddp_bucket": Observation(2, collective_bytes={"all_reduce": (32, 13_000, 4, 32, 13_000, 4)}),
    "micro_batch": Observation(2, ranges={**LOOP, "drivetrain/forward": Count(32, 900)}),
    "fused_adamw": Observation(2, ranges=LOOP, operators={"aten::addcdiv_": Count(40, 50)}),
    "grad_reduce_dtype": Observation(2, ranges=LOOP),
    "overlap_param_gather": Observation(2, ranges={**LOOP, "drivetrain/gather/blocking": Count(2, 50)}),
    "hierarchical_collectives": Observation(2, ranges=LOOP),
    "prefetch_blocks": Observation(2, ranges={**LOOP, "FSDP::all_gather (blocks.0)": Count(8, 50)}),
    "tp_chunks": Observation(2, ranges=LOOP, collective_bytes={"all_reduce": (4_000_000,) * 8}),
    "recompute": Observation(2, ranges=LOOP),
    "tp_async_gradient": Observation(2, ranges=LOOP, collective_bytes={"all_reduce": (4_000_000,) * 8}),
    "tp_symmetric_memory": Observation(2, ranges=LOOP, collective_bytes={"all_gather": (4_000_000,) * 8}),
    "keep_freed_memory": Observation(2, host_memory=HostMemory(False, page_faults_per_step=9_000.0)),
    "optimizer_offload": Observation(2, ranges={**LOOP, "drivetrain/offload/activations": Count(6, 90)}),
    "embedding_offload": Observation(2, ranges={**LOOP, "drivetrain/offload/optimizer": Count(6, 90)}),
    "optimizer_state_dtype": Observation(2, ranges=LOOP),
    "activation_offload": Observation(2, ranges={**LOOP, "drivetrain/offload/optimizer": Count(6, 90)}),
}

ABSENT |= dict.fromkeys(OF_FETCHES, Observation(2, ranges=LOOP))
ABSENT |= {
    name: Observation(2, ranges={**LOOP, "drivetrain/operator/other/eager": Count(8, 90)})
    for name in (*OPERATORS, "fusion_level")
}


def config_with(move: Mapping[str, Any], *overrides: str) -> RunConfig:
    texts = [f"{leaf}={str(value).lower()}" for leaf, value in move.items()]
    return load_config("llama-2m", [*FOR_TWO, *overrides, *texts]).config


def names() -> list[str]:
    return [one.name for one in catalogue()]


@pytest.mark.parametrize("name", names())
def test_on_switches_on_and_off_takes_away_and_both_are_legal(name: str) -> None:
    one, model = entry(name), MODELS.get(name, [])
    facts = FACTS.get(name, TWO)
    off = config_with(one.off(BASE), *model)
    assert not one.requested(off)
    assert violations(off, facts, all_rules()) == []
    move = one.on(off, facts)
    assert move is not None
    on = config_with(move, *model)
    assert one.requested(on)
    assert violations(on, facts, all_rules()) == []
    assert one.on(on, facts) is None, "it is on already"
    assert one.applies(on, facts) is None
    assert one.field in move
    assert one.field in one.off(on)


@pytest.mark.parametrize("name", names())
def test_the_ends_of_a_knob_are_legal_values_and_decide_something(name: str) -> None:
    one, model = entry(name), MODELS.get(name, [])
    base = one.on(config_with(one.off(BASE), *model), FACTS.get(name, TWO))
    assert base is not None
    for knob in one.knobs:
        given = {**base, **FOR_KNOBS.get(knob.field, {})}
        here = config_with(given, *model)
        assert knob.refused(here, TWO) is None
        legal = (knob.low, knob.high) if knob.values is None else knob.values(here, TWO)
        assert len(legal) >= 2
        assert knob.low <= legal[0] < legal[-1] <= knob.high
        for number in legal if knob.values is not None else (legal[0], legal[-1]):
            config = config_with({**given, knob.field: knob.leaf_value(number)}, *model)
            assert knob.number(config) == number
            assert violations(config, TWO, all_rules()) == []
            assert knob.field not in [idle.field for idle in idle_fields(config, TWO)]


def test_a_knob_holds_a_number_whatever_its_leaf_is() -> None:
    knobs = {knob.field: knob for one in catalogue() for knob in one.knobs}
    chunks, layers = knobs["overlap.tp_chunks"], knobs["memory.recompute_num_layers"]
    shared = ["parallelism.tensor_model_parallel_size=2"]
    assert chunks.number(config_with({"overlap.tp_chunks": "8"}, *shared)) == 8
    assert chunks.leaf_value(4) == "4"
    tuned = config_with({"overlap.tp_chunks": "tuned"}, *shared)
    assert chunks.number(tuned) is None
    owner = chunks.refused(tuned, TWO)
    assert owner is not None
    assert "ops tune" in owner
    assert layers.number(BASE) == 1, "absent is one layer"
    assert layers.refused(BASE, TWO) is not None


def test_a_micro_batch_is_a_knob_where_its_size_changes_rounding_alone() -> None:
    one = entry("micro_batch")
    (knob,) = one.knobs
    assert knob.values is not None
    assert list(knob.values(BASE, TWO)) == [1, 2, 4, 8]
    assert list(knob.values(BASE, LaunchFacts())) == [1, 2, 4, 8, 16]
    pipeline = ["parallelism.pipeline_model_parallel_size=2", "training.micro_batch_size=4"]
    assert list(knob.values(load_config("llama-2m", pipeline).config, TWO)) == [1, 2, 4, 8], (
        "two passes at least"
    )
    dropping = config_with({}, "model.hidden_dropout=0.1")
    why = knob.refused(dropping, TWO)
    assert why is not None
    assert "other masks" in why
    assert one.on(config_with({"training.micro_batch_size": 1}, "model.hidden_dropout=0.1"), TWO) is None
    assert (
        one.evidence(load_config("llama-2m", pipeline).config, SHOWN["micro_batch"], None).kind == "unknown"
    )


def test_knobs_that_interact_are_known_and_are_knobs() -> None:
    pairs = {pair for one in catalogue() for pair in one.interacts_with}
    assert ("training.micro_batch_size", "memory.recompute_num_layers") in pairs
    assert ("data.num_workers", "data.prefetch_factor") in pairs


@pytest.mark.parametrize("name", names())
def test_evidence_is_shown_absent_or_unknown_by_what_was_recorded(name: str) -> None:
    one = entry(name)
    config = config_with({"fusion.level": "all"}) if name == "fusion_level" else BASE
    assert one.evidence(config, SHOWN[name], None).kind == "shown"
    assert one.evidence(config, ABSENT[name], None).kind == "absent"
    assert one.evidence(config, NOTHING, None).kind == "unknown", "what was not recorded is not absent"


def test_page_faults_are_named_beside_the_evidence_of_kept_memory_and_decide_nothing() -> None:
    one = entry("keep_freed_memory")
    few_without = Observation(2, host_memory=HostMemory(False, page_faults_per_step=2.0))
    found = one.evidence(BASE, few_without, None)
    assert (found.kind, "; 2 page faults a step" in found.why) == ("absent", True)
    not_counted = Observation(2, host_memory=HostMemory(True))
    assert "page faults" not in one.evidence(BASE, not_counted, None).why
    other = Observation(2, host_memory=HostMemory(None, "tensors lie in memory of another allocator"))
    assert one.evidence(BASE, other, None).kind == "unknown"
    assert one.evidence(BASE, other, None).why == "tensors lie in memory of another allocator"


def test_memory_of_the_host_is_not_kept_for_a_cuda_device() -> None:
    one = entry("keep_freed_memory")
    config = config_with({"run.device": "cuda"})
    assert one.on(config, TWO) is None
    why = one.applies(config, TWO)
    assert why is not None
    assert "CUDA" in why


def test_operators_are_switched_on_together_by_their_level() -> None:
    moves = {name: entry(name).on(config_with({"fusion.level": "off"}), LaunchFacts()) for name in OPERATORS}
    assert set(moves.values()) == {None}
    assert entry("fusion_level").on(config_with({"fusion.level": "off"}), LaunchFacts()) == {
        "fusion.level": "all"
    }


def test_an_operator_that_another_backend_serves_than_was_asked_for_is_absent() -> None:
    by_eager = Observation(2, ranges={**LOOP, "drivetrain/operator/glu/eager": Count(8, 90)})
    asked = config_with({"fusion.glu": "inductor"})
    found = entry("glu").evidence(asked, by_eager, None)
    assert (found.kind, found.why) == ("absent", "calls were served by others than inductor: 8 by eager")
    assert entry("glu").evidence(asked, SHOWN["glu"], None).kind == "shown"


def test_compiled_code_of_operators_is_no_evidence_of_compiled_blocks() -> None:
    graphs = "## Call CompiledFxGraph f1 ##"
    of_operators = {**LOOP, "drivetrain/operator/glu/inductor": Count(8, 90), graphs: Count(16, 80)}
    assert entry("compile").evidence(BASE, Observation(2, ranges=of_operators), None).kind == "unknown"
    more = {**of_operators, "## Call CompiledFxGraph f2 ##": Count(8, 70)}
    assert entry("compile").evidence(BASE, Observation(2, ranges=more), None).kind == "shown"


def test_a_level_asks_for_operators_and_a_field_of_their_own_has_the_last_word() -> None:
    core = config_with({"fusion.level": "core"})
    assert entry("glu").requested(core)
    assert not entry("linear_cross_entropy").requested(core)
    assert not entry("glu").requested(config_with({"fusion.level": "core", "fusion.glu": "off"}))
    assert entry("glu").effective_value(core) == "auto"
    assert entry("glu").effective_value(config_with({"fusion.glu": "inductor"})) == "inductor"
    dropping = config_with({"fusion.level": "all"}, "model.hidden_dropout=0.1")
    assert not entry("bias_dropout_add").requested(dropping), "another draw of the mask is in no level"


def test_what_a_level_asks_for_and_a_model_has_not_is_nothing_that_anybody_asked_for() -> None:
    llama = config_with({"fusion.level": "all"})
    assert not entry("layer_norm").is_asked_for(llama, LaunchFacts())
    assert entry("layer_norm").is_asked_for(config_with({"fusion.layer_norm": "eager"}), LaunchFacts())


def test_a_single_process_has_no_buckets_to_switch_on() -> None:
    one = entry("ddp_bucket")
    config = BASE
    assert one.on(config, LaunchFacts()) is None
    assert one.applies(config, LaunchFacts()) is not None


def test_a_bucket_that_holds_everything_has_no_effect_and_is_made_smaller() -> None:
    one = entry("ddp_bucket")
    config = load_config(
        "llama-2m"
    ).config  # 1.95 million parameters: 7.8 MB of gradients in a bucket of 25 MB
    why = one.applies(config, TWO)
    assert why is not None
    assert "7.81 MB" in why
    assert one.on(config, TWO) == {"overlap.bucket_size_mb": 2.0}
    assert one.applies(config_with({"overlap.bucket_size_mb": 2.0}), TWO) is None


def test_buckets_of_a_pipeline_hide_nothing_and_are_not_switched_on() -> None:
    one = entry("ddp_bucket")
    size, layout = "overlap.bucket_size_mb", ["parallelism.pipeline_model_parallel_size=2"]
    for value in (0, 2):
        config = load_config("llama-2m", [*layout, f"{size}={value}"]).config
        why = one.applies(config, LaunchFacts(world_size=4))
        assert why is not None
        assert "nothing is reduced before" in why
        assert one.on(config, LaunchFacts(world_size=4)) is None


def account_of(window_ns: int, classes: dict[str, int]) -> Account:
    window = Window(
        window_ns=window_ns,
        busy_ns=None,
        idle_ns=None,
        compute_ns=None,
        communication_ns=None,
        overlapped_communication_ns=None,
        exposed_communication_ns=None,
        copy_ns=None,
        exposed_copy_ns=None,
        classes=classes,
        unexplained_ns=window_ns - sum(classes.values()),
    )
    step = StepAccount(step=1, window=window, start_ns=0, end_ns=window_ns, first=False)
    return Account(health=(), ranks=(RankAccount(rank=0, view="host", whole=window, steps=(step,)),))


@pytest.mark.parametrize("one", catalogue(), ids=lambda one: one.name)
def test_each_entry_predicts_the_gain_of_its_move_or_says_why_not(one: Optimisation) -> None:
    model, facts = MODELS.get(one.name, []), FACTS.get(one.name, TWO)
    before = config_with(one.off(BASE), *model)
    after = config_with(one.on(before, facts) or {}, *model)
    some = account_of(100, {"compute.matmul": 40, "data.loader": 20, "communication.dp.transfer": 10})
    found = one.expects(facts_of_account(some, before, facts), after)
    if isinstance(found, NoPrediction):
        assert found.why
    else:
        treated = mean_step(some)
        assert treated is not None
        assert found.ratio <= 100 / (100 - treated.ns_of(one.treats))
        assert found.rule
    if one.time_model is None:
        assert found == NoPrediction(one.no_prediction)
    else:
        assert isinstance(one.expects(None, after), NoPrediction)


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(DrivetrainError, match="did you mean compile"):
        entry("compiled")
    assert entry_of_field("data.prefetch_factor") is entry("data_workers"), "a knob belongs to its entry"
    assert entry_of_field("optimizer.lr") is None


def test_dtypes_of_one_field_exclude_each_other_and_leave_no_loss_scale_behind() -> None:
    fp16 = config_with({"precision.params_dtype": "fp16"}, "precision.initial_loss_scale=1024")
    assert violations(fp16, TWO, all_rules()) == []
    to_bf16 = entry("bf16").on(fp16, TWO)
    assert to_bf16 == {"precision.params_dtype": "bf16", "precision.initial_loss_scale": 65536.0}
    for move in (to_bf16, entry("fp16").off(fp16)):
        changed = config_with(move)
        assert violations(changed, TWO, all_rules()) == []
        assert not entry("fp16").requested(changed)
    assert entry("fp16").on(config_with({"precision.params_dtype": "bf16"}), TWO) is None, "no gain in that"
    assert entry_of_field("precision.params_dtype") is entry("bf16")


def variant(name: str, **changes: Any) -> Optimisation:
    return dataclasses.replace(entry(name), **changes)


def test_what_an_entry_requires_is_a_rule_only_while_it_is_requested() -> None:
    rule = Rule("odd-steps", ("training.train_iters",), lambda config, _: "7 is odd", "The steps are even.")
    (held,) = rules_of((variant("compile", requires=(rule,)),))
    assert held.id == "odd-steps"
    assert violations(config_with({"fusion.compile": False}), rules=(held,)) == []
    (found,) = violations(config_with({"fusion.compile": True}), rules=(held,))
    assert str(found) == "training.train_iters: 7 is odd"


def test_entries_that_exclude_each_other_are_one_rule_with_both_remedies() -> None:
    entries = (variant("compile", conflicts=("bf16",)), variant("bf16", conflicts=("compile",)))
    (rule,) = rules_of(entries)
    (found,) = violations(
        config_with({"fusion.compile": True, "precision.params_dtype": "bf16"}), rules=(rule,)
    )
    assert "precision.params_dtype=fp32, or fusion.compile=false" in found.message
    assert violations(config_with({"precision.params_dtype": "fp32"}), rules=(rule,)) == []


def test_rules_of_entries_are_tried_with_the_basic_ones() -> None:
    assert all_rules()[: len(BASIC_RULES)] == BASIC_RULES
    identifiers = [rule.id for rule in all_rules()]
    assert len(set(identifiers)) == len(identifiers)


def test_an_entry_is_a_document_for_json() -> None:
    document = variant("data_workers", requires=(BASIC_RULES[0],), conflicts=("compile",)).to_document()
    assert document["requires"] == [BASIC_RULES[0].doc]
    assert document["conflicts"] == ["compile"]
    assert document["knobs"][0] == {
        "field": "data.num_workers",
        "low": 1,
        "high": 16,
        "whole": True,
        "scale": "log",
    }


def test_a_knob_has_a_range() -> None:
    with pytest.raises(AssertionError):
        Knob("data.num_workers", 4, 4)
    with pytest.raises(AssertionError):
        Knob("data.num_workers", 0, 4, scale="log")


@pytest.mark.parametrize("name", names())
def test_the_field_of_an_entry_is_a_leaf_whose_value_the_record_can_hold(name: str) -> None:
    assert leaves()[entry(name).field].kind in ("true or false", "whole number", "number", "choice", "text")
