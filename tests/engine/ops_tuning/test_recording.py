"""Which calls a configuration makes: recorded from its model without computing anything."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from drivetrain.config import RunConfig, load_config
from drivetrain.engine.model.batch import Batch, check_batch, whole_sequences
from drivetrain.engine.ops._tuned_key import key_of
from drivetrain.engine.ops.attention.mask import Mask
from drivetrain.engine.ops_tuning.recording import (
    Packing,
    RecordedCall,
    evaluations_per_step,
    example_packings,
    recorded_as_served,
    recorded_calls,
)

TINY = (
    "model.num_layers=3",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.ffn_hidden_size=48",
    "model.seq_length=16",
    "model.vocab_size=300",
    "training.micro_batch_size=2",
    "training.global_batch_size=6",
)


def tiny(*overrides: str) -> RunConfig:
    return load_config("llama-2m", [*TINY, *overrides]).config


def packing(lengths: Sequence[int], share: float) -> Packing:
    batch = whole_sequences(torch.zeros(2, 16, dtype=torch.int64))
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return Packing(
        Batch(
            batch.token_ids,
            batch.labels,
            batch.loss_mask,
            batch.position_ids,
            borders,
            30,
            sum(length**2 for length in lengths),
        ),
        share,
    )


WHOLE = packing([16, 16], 0.25)
PACKED = packing([5, 11, 9, 7], 0.75)


def counts(calls: Sequence[RecordedCall]) -> Counter[str]:
    found: Counter[str] = Counter()
    for call in calls:
        found[call.operator.name] += call.calls_per_step  # type: ignore[assignment]
    return found


def test_each_operator_is_called_as_often_as_a_step_has_layers_and_micro_batches() -> None:
    calls = recorded_calls(tiny(), "cpu", [WHOLE, PACKED], {})
    layers = 3 * 3
    assert counts(calls) == {
        "add_rms_norm": layers,
        "attention": layers,
        "gate_up_product": layers,
        "glu": layers,
        "linear": 2 * layers,
        "linear_cross_entropy": 3,
        "qkv_product": layers,
        "rms_norm": layers + 3,
        "rotary": 2 * layers,
    }
    assert {call.signature.device for call in calls} == {"cpu"}
    assert all(call.signature.requires_grad for call in calls)


def test_packed_and_whole_micro_batches_are_told_apart_by_how_often_they_come() -> None:
    calls = recorded_calls(tiny(), "cpu", [WHOLE, PACKED], {})
    attention = {
        key_of(call.signature).call.rpartition("mask ")[2]: call.calls_per_step
        for call in calls
        if call.operator.name == "attention"
    }
    assert attention == {"causal + equal documents of 16": 9 * 0.25, "causal + documents": 9 * 0.75}
    (packed,) = (
        mask
        for call in calls
        if isinstance(mask := call.signature.option("mask"), Mask)
        and mask.documents
        and not mask.documents.equal
    )
    assert packed.documents is not None
    assert packed.documents.borders_q == [0, 5, 16, 25, 32]


def test_sizes_and_dtype_are_those_of_the_configuration() -> None:
    calls = recorded_calls(tiny("precision.params_dtype=fp32"), "cpu", [PACKED], {})
    by_name = {call.operator.name: call for call in calls}
    q = by_name["attention"].signature.argument("q")
    k = by_name["attention"].signature.argument("k")
    assert q is not None
    assert k is not None
    assert (q.shape, k.shape, q.dtype) == ((32, 4, 8), (32, 2, 8), torch.float32)
    weight = by_name["linear_cross_entropy"].signature.argument("weight")
    assert weight is not None
    assert weight.shape == (300, 32)


def test_the_heaviest_call_comes_first() -> None:
    calls = recorded_calls(tiny("model.vocab_size=30000"), "cpu", [PACKED], {})
    assert calls[0].operator.name == "linear_cross_entropy"


def test_the_layout_that_a_chosen_product_gives_is_what_the_next_operator_is_given() -> None:
    def with_gaps(chosen: dict[str, str]) -> set[str]:
        calls = recorded_calls(tiny(), "cpu", [PACKED], chosen)
        return {
            call.operator.name
            for call in calls
            if any(not argument.contiguous for _, argument in call.signature.arguments)
        }

    assert with_gaps({}) == set()
    assert with_gaps({"qkv_product": "joined"}) == {"rotary", "attention"}
    assert with_gaps({"gate_up_product": "joined"}) == {"glu"}


def test_a_gpt_is_recorded_with_its_dropout_and_layer_norms() -> None:
    gpt = tiny(
        "model.normalization=LayerNorm",
        "model.position_embedding_type=learned_absolute",
        "model.activation_func=gelu",
        "model.add_bias_linear=true",
        "model.hidden_dropout=0.1",
    )
    names = set(counts(recorded_calls(gpt, "cpu", [PACKED], {})))
    assert {"layer_norm", "bias_dropout_add", "linear", "attention"} <= names
    assert not names & {"rms_norm", "rotary", "glu"}


def test_layers_that_are_cut_over_ranks_are_refused() -> None:
    from drivetrain.errors import DrivetrainError

    with pytest.raises(DrivetrainError, match="tensor_model_parallel_size=1"):
        recorded_calls(tiny("parallelism.tensor_model_parallel_size=2"), "cpu", [PACKED], {})


def test_calls_of_evaluation_want_no_gradient_and_count_by_how_seldom_it_comes() -> None:
    seldom = tiny("training.train_iters=100", "training.eval_interval=25", "training.eval_iters=5")
    # After steps 25, 50 and 75, and at the end.
    assert evaluations_per_step(seldom) == 0.04
    calls = recorded_calls(seldom, "cpu", [WHOLE, PACKED], {}, evaluation=True)
    assert not any(call.signature.requires_grad for call in calls)
    # 5 global batches of 3 micro-batches each, 3 layers.
    assert counts(calls)["glu"] == pytest.approx(0.04 * 5 * 3 * 3)
    trained = recorded_calls(seldom, "cpu", [WHOLE, PACKED], {})
    assert not {call.signature for call in calls} & {call.signature for call in trained}
    assert counts(calls).keys() == counts(trained).keys()


def test_a_run_without_evaluation_makes_none_of_its_calls() -> None:
    never = tiny("training.eval_iters=0")
    assert evaluations_per_step(never) == 0.0
    at_the_end = tiny("training.train_iters=50", "training.eval_interval=0", "training.eval_iters=2")
    assert evaluations_per_step(at_the_end) == 0.02

    def kinds(config: RunConfig) -> set[bool]:
        calls = recorded_as_served(config, "cpu", [PACKED], lambda _: "eager")
        return {call.signature.requires_grad for call in calls}

    assert kinds(never) == {True}
    assert kinds(at_the_end) == {True, False}


def test_evaluation_drops_nothing() -> None:
    dropping = tiny("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
    trained = counts(recorded_calls(dropping, "cpu", [PACKED], {}))
    evaluated = recorded_calls(dropping, "cpu", [PACKED], {}, evaluation=True)
    assert "bias_dropout_add" in trained
    assert "bias_dropout_add" not in counts(evaluated)
    masks = [call.signature.option("mask") for call in evaluated if call.operator.name == "attention"]
    assert [mask.dropout for mask in masks if isinstance(mask, Mask)] == [None]


def test_training_and_evaluation_are_each_laid_out_as_their_products_leave_them() -> None:
    def choose(call: RecordedCall) -> str:
        joins = call.operator.name == "qkv_product" and call.signature.requires_grad
        return "joined" if joins else "eager"

    calls = recorded_as_served(tiny(), "cpu", [PACKED], choose)
    gaps = {
        call.signature.requires_grad: any(not one.contiguous for _, one in call.signature.arguments)
        for call in calls
        if call.operator.name == "rotary"
    }
    assert gaps == {True: True, False: False}
    weights = [call.calls_per_step for call in calls if call.operator.name == "glu"]
    assert weights == sorted(weights, reverse=True), "the heaviest first, of both kinds"


def test_only_what_is_asked_for_is_recorded() -> None:
    calls = recorded_calls(tiny(), "cpu", [PACKED], {}, asked=("glu", "attention"))
    assert counts(calls).keys() == {"glu", "attention"}


@pytest.mark.parametrize("overrides", [(), ("training.micro_batch_size=1", "training.global_batch_size=3")])
def test_examples_of_packings_are_sound_batches_of_both_kinds(overrides: tuple[str, ...]) -> None:
    config = tiny(*overrides)
    whole, packed = example_packings(config)
    for one in (whole, packed):
        check_batch(one.batch, config.model.vocab_size)
    assert set(whole.batch.cu_seqlens.diff().tolist()) == {16}
    assert set(packed.batch.cu_seqlens.diff().tolist()) == {5, 11}
    (only,) = example_packings(tiny("data.reset_attention_mask=false", *overrides))
    assert torch.equal(only.batch.cu_seqlens, whole.batch.cu_seqlens)
    shortest = example_packings(tiny("model.seq_length=1"))
    assert all(set(one.batch.cu_seqlens.diff().tolist()) == {1} for one in shortest)
