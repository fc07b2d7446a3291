"""Arguments of Megatron-LM and MindSpeed: each ends in one list, defaults are written out, and nothing is dropped."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.catalogue.rules import all_rules
from drivetrain.config import parse_config
from drivetrain.config.importing import Imported, import_file, imported_toml
from drivetrain.config.importing.arguments import known_names
from drivetrain.config.importing.stage_layout import StageLayoutError, layers_of_stages
from drivetrain.errors import ConfigurationError

SMALL = """
--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 2 --global-batch-size 16 --train-iters 100 --lr 1e-3 --vocab-size 1000
--data-path corpus/books --split 98,2
"""
SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=4
NODES=2
DATA=${1:-corpus/books}
TP=2

LAUNCH=(
    --nproc_per_node $GPUS   # on each machine
    --nnodes $NODES
    --master_addr ${MASTER_ADDR:-localhost}
)
MODEL=(
    --num-layers 4
    --hidden-size 64
    --num-attention-heads 8
    --group-query-attention
    --num-query-groups 2
    --seq-length 32
    --max-position-embeddings 64
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --vocab-size 1000
    --make-vocab-size-divisible-by 8
)
TRAIN="
    --micro-batch-size 1 \\
    --global-batch-size 32 \\
    --train-iters 200 \\
    --lr 3.0e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction .1 \\
    --lr-decay-iters 180 \\
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \\
    --hidden-dropout 0.0 --attention-dropout 0.0
"
PARALLEL="--tensor-model-parallel-size $TP --pipeline-model-parallel-size 2 --sequence-parallel"
if [[ $TP -gt 1 ]]; then
    PARALLEL="$PARALLEL --use-distributed-optimizer --overlap-grad-reduce"
fi
torchrun ${LAUNCH[@]} pretrain_gpt.py \\
    ${MODEL[@]} $TRAIN $PARALLEL --bf16 \\
    --data-path $DATA --split 949,50,1 --save out --load out \\
    --log-interval 10 --eval-iters 5 --eval-interval 50 --tensorboard-dir tb "$@"
"""


def imported(folder: Path, text: str, name: str = "train.sh", **options: Any) -> Imported:
    file = folder / name
    file.write_text(text)
    return import_file(file, rules=all_rules(), **options)


def refusal(folder: Path, text: str, name: str = "train.sh", **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        imported(folder, text, name, **options)
    return str(caught.value)


def values(found: Imported) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, fields in found.config.model_dump().items()
        for name, value in fields.items()
    }


def lists_of(found: Imported) -> dict[str, set[str]]:
    """Argument → the lists it is in."""
    conversion = found.conversion
    where: dict[str, set[str]] = {}
    for title, members in (
        ("taken", conversion.taken),
        ("same", conversion.same),
        ("lacking", conversion.lacking),
        ("unknown", conversion.unknown),
    ):
        for one in members:
            where.setdefault(one.name, set()).add(title)
    return where


def test_a_launch_script_becomes_the_configuration_that_it_trains(tmp_path: Path) -> None:
    found = imported(tmp_path, SCRIPT)
    ours = values(found)
    step = 32 * 32
    expected = {
        "model.num_layers": 4,
        "model.num_query_groups": 2,
        "model.rotary_base": 500000.0,
        "model.norm_epsilon": 1e-6,
        "model.ffn_hidden_size": 128,
        "model.vocab_size": 1008,
        "model.activation_func": "swiglu",
        "training.global_batch_size": 32,
        "lr_schedule.lr_decay_tokens": 180 * step,
        "lr_schedule.lr_warmup_tokens": 18 * step,
        "lr_schedule.min_lr": 3e-5,
        "data.data_path": "corpus/books",
        "data.split": "949,51",
        "parallelism.tensor_model_parallel_size": 2,
        "parallelism.pipeline_model_parallel_size": 2,
        "parallelism.data_parallel_size": 2,
        "parallelism.sequence_parallel": True,
        "parallelism.zero_stage": 1,
        "overlap.bucket_size_mb": 160.0,
        "precision.params_dtype": "bf16",
        "training.eval_interval": 50,
    }
    assert {name: ours[name] for name in expected} == expected
    assert not found.changes_training
    assert found.conversion.source.processes == 8


def test_defaults_that_differ_from_ours_are_written_out(tmp_path: Path) -> None:
    found = imported(tmp_path, SMALL)
    ours = values(found)
    expected = {
        "model.activation_func": "gelu",
        "model.ffn_hidden_size": 256,
        "model.normalization": "LayerNorm",
        "model.position_embedding_type": "learned_absolute",
        "model.add_bias_linear": True,
        "model.untie_embeddings_and_output_weights": False,
        "model.hidden_dropout": 0.1,
        "model.attention_dropout": 0.1,
        "model.norm_epsilon": 1e-5,
        "model.init_method_std": 0.02,
        "model.vocab_size": 1024,
        "optimizer.weight_decay": 0.01,
        "optimizer.adam_beta2": 0.999,
        "optimizer.adam_eps": 1e-8,
        "training.clip_grad": 1.0,
        "precision.params_dtype": "fp32",
        "lr_schedule.lr_decay_style": "WSD",
        "lr_schedule.lr_wsd_decay_style": "linear",
        "lr_schedule.lr_wsd_decay_tokens": 100 * 16 * 32,
        "data.reset_attention_mask": False,
        "data.num_workers": 2,
        "overlap.bucket_size_mb": 0.0,
        "monitor.log_interval": 100,
    }
    assert {name: ours[name] for name in expected} == expected
    written = imported_toml(found)
    assert "hidden_dropout = 0.1  # the default of --hidden-dropout" in written
    assert parse_config(written) == found.config


def test_a_line_is_linear_decay_from_the_warm_up_to_the_end(tmp_path: Path) -> None:
    """Megatron's linear style and ours of WSD are the same function of the step."""
    from drivetrain.engine.schedule import learning_rate

    config = imported(tmp_path, SMALL + " --lr-warmup-iters 20 --min-lr 1e-4").config
    step = 16 * 32
    for number in (0, 10, 20, 21, 60, 99, 100):
        warm = 1e-3 * number / 20
        decayed = 1e-4 + (1e-3 - 1e-4) * (1 - (number - 20) / 80)
        expected = warm if number <= 20 else decayed
        found = learning_rate(number * step, config.optimizer, config.lr_schedule, 100 * step)
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "name", "effect"),
    [
        ("--num-experts 8", "--num-experts", "curve"),
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size", "curve"),
        ("--squared-relu", "--squared-relu", "curve"),
        ("--rotary-percent 0.5", "--rotary-percent", "curve"),
        ("--optimizer muon", "--optimizer", "curve"),
        ("--rampup-batch-size 4 4 1000", "--rampup-batch-size", "curve"),
        ("--fp8-format hybrid", "--fp8-format", "curve"),
        ("--position-embedding-type yarn", "--position-embedding-type", "curve"),
        ("--lr-decay-style inverse-square-root", "--lr-decay-style", "curve"),
        ("--init-method-xavier-uniform", "--init-method-xavier-uniform", "curve"),
        ("--no-bias-gelu-fusion", "--no-bias-gelu-fusion", "curve"),
        ("--load elsewhere", "--load", "curve"),
        ("--window-size 128,0", "--window-size", "curve"),
        ("--context-parallel-size 2", "--context-parallel-size", "memory"),
        ("--distribute-saved-activations", "--distribute-saved-activations", "memory"),
        ("--no-gradient-accumulation-fusion", "--no-gradient-accumulation-fusion", "speed"),
        ("--valid-data-path x", "--valid-data-path", "operation"),
    ],
)
def test_what_is_not_supported_is_named_with_what_it_would_change(
    tmp_path: Path, arguments: str, name: str, effect: str
) -> None:
    found = imported(tmp_path, f"{SMALL} {arguments}")
    assert [one.effect for one in found.missing if one.name == name] == [effect]
    assert found.changes_training == (effect == "curve")
    assert name in imported_toml(found)


@pytest.mark.parametrize(
    "arguments",
    [
        "--rotary-percent 1.0",
        "--optimizer adam",
        "--expert-model-parallel-size 1",
        "--context-parallel-size 1",
        "--lr-warmup-init 0",
    ],
)
def test_what_is_given_the_value_that_it_has_anyway_changes_nothing(tmp_path: Path, arguments: str) -> None:
    found = imported(tmp_path, f"{SMALL} {arguments}")
    assert lists_of(found)[arguments.split()[0]] == {"same"}
    assert not found.changes_training


def test_gelu_without_a_bias_is_another_form_than_ours(tmp_path: Path) -> None:
    found = imported(tmp_path, f"{SMALL} --disable-bias-linear")
    assert any("exact GELU" in one.reason for one in found.missing)
    assert found.changes_training


def test_an_unknown_argument_has_its_nearest_name_and_stops_the_import(tmp_path: Path) -> None:
    found = imported(tmp_path, f"{SMALL} --hiden-dropout 0.2 --zzyzx")
    assert [(one.name, one.nearest) for one in found.conversion.unknown] == [
        ("--hiden-dropout", "--hidden-dropout"),
        ("--zzyzx", None),
    ]
    assert found.changes_training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--bf16 --fp16", "--bf16 and --fp16 contradict each other"),
        ("--train-samples 1000", "--train-iters and --train-samples contradict each other"),
        ("--num-layers four", "--num-layers four: expected a whole number"),
        ("--lr fast", "--lr fast: expected a number"),
        ("--clip-grad nan", "--clip-grad nan: expected a number"),
        ("--seq-length 32 64", "--seq-length: expected a whole number, got '32 64'"),
        ("--normalization BatchNorm", "--normalization BatchNorm: expected one of RMSNorm, LayerNorm"),
        ("--hidden-dropout 1.5", "by --hidden-dropout\\): got 1.5, must be < 1"),
        ("--num-attention-heads 5", "--hidden-size, --num-attention-heads \\(model.hidden_size\\)"),
        ("--global-batch-size 15", "--global-batch-size"),
        ("--split a,b", "--split a,b: expected up to three weights"),
        ("--num-layers $LAYERS", "\\$LAYERS \\(not set in the file\\); give it with --set"),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'E(tt|L'",
            "a bracket is not closed",
        ),
    ],
)
def test_illegal_values_are_reported_under_their_own_names(
    tmp_path: Path, arguments: str, message: str
) -> None:
    text = refusal(tmp_path, f"{SMALL} {arguments}")
    assert re.search(message, text), text
    assert str(tmp_path / "train.sh") in text


def test_what_is_required_and_absent_is_reported_all_at_once(tmp_path: Path) -> None:
    text = refusal(tmp_path, "--num-layers 2 --hidden-size 32 --bf16 --swiglu")
    for name in ("--num-attention-heads", "--seq-length", "--micro-batch-size", "--train-iters", "--lr"):
        assert f"{name}" in text


def test_the_vocabulary_of_a_tokenizer_is_asked_for(tmp_path: Path) -> None:
    without = SMALL.replace("--vocab-size 1000", "--tokenizer-type GPT2BPETokenizer")
    assert "give model.vocab_size=N" in refusal(tmp_path, without)
    found = imported(tmp_path, without, overrides=["model.vocab_size=50304"])
    assert found.config.model.vocab_size == 50304


def test_a_value_that_only_the_environment_has_is_given_with_set(tmp_path: Path) -> None:
    text = SMALL.replace("--num-layers 4", "--num-layers $LAYERS").replace("corpus/books", "$DATA")
    found = imported(tmp_path, text, given={"LAYERS": "3", "DATA": "a/b"})
    assert (found.config.model.num_layers, found.config.data.data_path) == (3, "a/b")
    unknown_data = imported(tmp_path, text, given={"LAYERS": "3"})
    assert [one.name for one in unknown_data.missing if one.effect == "curve"] == ["--data-path"]
    settled = imported(tmp_path, text, given={"LAYERS": "3"}, overrides=["data.data_path=x/y"])
    assert not settled.changes_training


def test_corpora_are_mixed_by_weights_alone(tmp_path: Path) -> None:
    mixed = imported(tmp_path, SMALL.replace("corpus/books", "0.3 a 0.7 b"))
    assert mixed.config.data.data_path == "0.3 a 0.7 b"
    assert imported(tmp_path, SMALL.replace("corpus/books", "a b")).changes_training


def test_a_pipeline_of_uneven_stages_keeps_its_layers(tmp_path: Path) -> None:
    base = SMALL + " --pipeline-model-parallel-size 2 "
    for arguments, layout in (
        ("--decoder-first-pipeline-num-layers 1", "1,3"),
        ("--pipeline-model-parallel-layout 'Et|tttL'", "1,3"),
        ("--decoder-last-pipeline-num-layers 1", "3,1"),
    ):
        found = imported(tmp_path, base + arguments)
        assert found.config.parallelism.pipeline_model_parallel_layout == layout
    interleaved = imported(tmp_path, base + "--num-layers-per-virtual-pipeline-stage 1")
    assert interleaved.config.parallelism.pipeline_schedule == "interleaved_1f1b"
    assert interleaved.config.parallelism.virtual_pipeline_model_parallel_size == 2


@pytest.mark.parametrize(
    ("text", "layers"),
    [("Et*3|(tt|)*2t|L", [3, 2, 2, 1, 0]), ("E,t,t|t,L", [2, 1]), ("(t(t|)*2)*2", [2, 1, 2, 1, 0])],
)
def test_a_layout_in_letters_counts_its_layers(text: str, layers: list[int]) -> None:
    assert layers_of_stages(text) == layers


@given(st.text(alphabet="EtLm|()*0123456789, x", max_size=40))
def test_any_layout_in_letters_is_counted_or_refused(text: str) -> None:
    with contextlib.suppress(StageLayoutError):
        assert sum(layers_of_stages(text)) <= 10_000


def test_sizes_of_the_launcher_make_the_data_parallel_ranks(tmp_path: Path) -> None:
    without = SMALL.replace("--global-batch-size 16", "")
    sizes = "--tensor-model-parallel-size 2"
    text = f"torchrun --nproc_per_node 8 --nnodes=2 pretrain.py {' '.join(without.split())} {sizes}"
    found = imported(tmp_path, text)
    assert found.config.parallelism.data_parallel_size == 8
    assert found.config.training.global_batch_size == 16
    assert "give training.global_batch_size=N" in refusal(tmp_path, without)
    assert imported(tmp_path, without, devices=4).config.training.global_batch_size == 8
    assert "no multiple of the 3" in refusal(tmp_path, f"{SMALL} --tensor-model-parallel-size 3", devices=4)


def test_mindspeed_is_known_by_its_own_arguments(tmp_path: Path) -> None:
    own = (
        "--use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-flash-attn --normalization RMSNorm "
        "--swiglu --use-rotary-position-embeddings --padded-vocab-size 1056 --tokenizer-type PretrainedFromHF "
        "--tokenizer-name-or-path some/folder --recompute-activation-function --swap-optimizer --swap-attention "
        "--tensor-model-parallel-size 2 --use-ascend-coc --coc-parallel-num 4 --sequence-parallel"
    )
    found = imported(tmp_path, f"{SMALL} {own}")
    ours = values(found)
    assert found.conversion.source.trainer == "mindspeed"
    expected = {
        "fusion.rms_norm": "auto",
        "fusion.glu": "auto",
        "fusion.rotary": "auto",
        "fusion.attention": "auto",
        "model.vocab_size": 1056,
        "model.position_embedding_type": "rope",
        "memory.recompute_granularity": "selective",
        "memory.recompute_modules": "mlp_act",
        "memory.optimizer_offload_fraction": 1.0,
        "overlap.tp_chunks": "4",
    }
    assert {name: ours[name] for name in expected} == expected
    assert [one.name for one in found.missing] == ["--swap-attention"]
    assert any(
        one.name == "--swap-attention"
        for one in imported(tmp_path, f"{SMALL} {own}", trainer="megatron").conversion.unknown
    )


def test_arguments_as_a_table_of_flags_or_as_a_dump(tmp_path: Path) -> None:
    flags = """
MODEL_ARGS:
  --num-layers: 4
  --hidden-size: 64
  --num-attention-heads: 4
  --seq-length: 32
  --max-position-embeddings: 32
  --micro-batch-size: 2
  --global-batch-size: 16
  --train-iters: 100
  --lr: 0.001
  --vocab-size: 1000
  --swiglu: true
  --bf16: true
  --fp16: false
  --data-path: corpus/books
"""
    dump = """{"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "swiglu": true,
"max_position_embeddings": 32, "micro_batch_size": 2, "global_batch_size": 16, "train_iters": 100, "lr": 0.001,
"vocab_size": 1000, "bf16": true, "fp16": false, "data_path": ["corpus/books"], "num_experts": null,
"apply_rope_fusion": true, "moe_router_topk": 2, "world_size": 1, "consumed_train_samples": 0,
"tensor_model_parallel_size": 1, "add_bias_linear": true, "lr_warmup_iters": 0}"""
    one = imported(tmp_path, flags, "model.yaml")
    other = imported(tmp_path, dump, "args.json")
    assert not one.changes_training
    assert not other.changes_training, other.missing
    for found in (one, other):
        assert found.config.model.activation_func == "swiglu"
        assert found.config.precision.params_dtype == "bf16"
    assert other.config.parallelism.data_parallel_size == 1


def test_every_argument_is_in_one_list_and_every_value_of_the_file_comes_back(tmp_path: Path) -> None:
    for text in (
        SCRIPT,
        SMALL,
        f"{SMALL} --num-experts 8 --lr 5 --frob 1 --recompute-activations --use-megatron-fsdp",
    ):
        found = imported(tmp_path, text)
        lists = lists_of(found)
        assert set(found.conversion.source.arguments) <= set(lists)
        assert all(len(lists[name]) == 1 for name in found.conversion.source.arguments if name != "--lr")
        assert parse_config(imported_toml(found)) == found.config


NAMES = sorted(known_names("mindspeed"))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.one_of(st.just(""), st.integers(-2, 9).map(str), st.sampled_from(["0.1", "x", "full"])),
        ),
        max_size=6,
    )
)
def test_any_known_arguments_are_imported_or_refused_with_messages(
    tmp_path_factory: pytest.TempPathFactory, more: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    text = " ".join([*SMALL.split(), *(f"{name} {value}" for name, value in more)])
    try:
        found = imported(folder, text, "any.sh")
    except ConfigurationError:
        return
    lists = lists_of(found)
    for name in found.conversion.source.arguments:
        assert lists[name], name
    assert parse_config(imported_toml(found)) == found.config


def test_no_name_is_listed_twice_and_each_effect_is_a_known_one() -> None:
    for trainer in ("megatron", "mindspeed", "torchtitan"):
        effects = {one.effect for one in known_names(trainer).values()}
        assert effects <= {"converted", "same", "curve", "memory", "speed", "operation"}
