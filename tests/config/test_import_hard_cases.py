"""Files of arguments that are unlucky, or made to break the import: nothing is lost in silence, and nothing crashes."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from drivetrain.catalogue.rules import all_rules
from drivetrain.config.importing import Imported, import_file
from drivetrain.config.importing.shell_values import commands_of
from drivetrain.errors import ConfigurationError

GIVEN: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "train_iters": 100,
    "lr": 1e-3,
    "vocab_size": 1000,
}
RUN = "torchrun pretrain_gpt.py " + " ".join(
    f"--{name.replace('_', '-')} {value}" for name, value in GIVEN.items()
)
RUN += " --data-path corpus/books"
JOB = '[model]\nname = "llama3"\n[training]\nsteps = 100\n[parallelism]\npipeline_parallel_degree = 2\n'


def imported(folder: Path, text: str, name: str = "train.sh", **options: Any) -> Imported:
    file = folder / name
    file.write_bytes(text.encode())
    return import_file(file, rules=all_rules(), **options)


def refusal(folder: Path, text: str, name: str = "train.sh", **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        imported(folder, text, name, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "script",
    [
        f'if [ "$MODE" = moe ]; then X="--num-experts 8"; fi\n{RUN} $X',
        f'if [ "$MODE" = moe ]; then X=(--num-experts 8); fi\n{RUN} "${{X[@]}}"',
        f"{RUN} $(cat more.txt)",
        f"{RUN} --swiglu $(cat more.txt)",
        f'main() {{\n{RUN} $ARGS\n}}\nARGS="--num-experts 8"\nmain',
        f"X=$(cat more.txt)\n{RUN} --no-masked-softmax-fusion $X",
        f"if [ -f x ]; then MORE_ARGS=$(cat x); fi\n{RUN} --use-some-switch $MORE_ARGS",
        f"X=--bf16\nread X\n{RUN} $X",
    ],
)
def test_words_that_may_hold_arguments_stop_the_import_where_their_value_is_unknown(
    tmp_path: Path, script: str
) -> None:
    found = imported(tmp_path, script)
    assert any(one.effect == "curve" and "it may hold arguments" in one.reason for one in found.missing)
    assert found.changes_training


def test_words_that_are_empty_where_nobody_sets_them_stop_nothing(tmp_path: Path) -> None:
    assert not imported(tmp_path, f'{RUN} $EXTRA_ARGS "$@"').changes_training


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('E=()\nrun a "${E[@]}" b', ["run", "a", "b"]),
        ('run a "" b', ["run", "a", "", "b"]),
        ('E=\nrun a "$E" b', ["run", "a", "", "b"]),
        ('E=(1 2)\nrun "x${E[@]}y"', ["run", "x1", "2y"]),
        ('E=" --b "\nrun --a$E--c', ["run", "--a", "--b", "--c"]),
        ("A=(1)\nA[0]=2\nrun $A", ["run", "$A"]),
        ("i=1\n((i+=1))\nrun $i", ["run", "$i"]),
        ("i=1\n((j = i + 1, k++))\nrun $i $j $k", ["run", "1", "$j", "$k"]),
        ("i=1\nif ((i == 1)); then j=2; fi\nrun $i $j", ["run", "1", "$j"]),
        ("X=1\nprintf -v X 2\nlet X=3\nrun $X", ["run", "$X"]),
        ("if [ ! ! a = a ]; then X=1; fi\nrun $X", ["run", "1"]),
    ],
)
def test_words_are_those_of_a_shell_or_unknown(script: str, expected: list[str]) -> None:
    commands, _ = commands_of(script, "a.sh", {})
    assert [word.text for word in commands[-1].words] == expected


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("f() " * 3000 + "{ :; }", "nested more than 40 deep"),
        ("function f " * 3000 + "{ :; }", "nested more than 40 deep"),
        ("((i=1", r"\(\( is not closed"),
        ("A=" + "x" * 50_000 + '\nrun "' + "$A" * 1000 + '"', "more than 1,000,000 characters"),
        ('A+=("")\n' * 5000, "more than 1,000,000 characters"),
    ],
)
def test_endless_scripts_are_refused(script: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        commands_of(script, "a.sh", {})


def test_any_number_of_negations_is_answered() -> None:
    commands, _ = commands_of("[ " + "! " * 3001 + "a ] && X=1\nrun $X", "a.sh", {})
    assert [word.text for word in commands[-1].words] == ["run", "$X"]


def test_a_device_without_an_end_is_not_read_to_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), before[1]))
    try:
        with pytest.raises(ConfigurationError, match="more than 1,048,576 bytes"):
            import_file(Path("/dev/zero"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_lines_may_end_as_in_dos(tmp_path: Path) -> None:
    script = f'A="\\\n  --bf16 \\\n  --swiglu"\n{RUN} \\\n $A\n'.replace("\n", "\r\n")
    found = imported(tmp_path, script)
    assert not found.changes_training
    assert (found.config.precision.params_dtype, found.config.model.activation_func) == ("bf16", "swiglu")


def test_python_in_a_here_document_makes_no_python_of_a_shell_script(tmp_path: Path) -> None:
    script = f"#!/usr/bin/env bash\npython - <<EOF\nimport os\nimport sys\nEOF\n{RUN}\n"
    assert imported(tmp_path, script, "train").config.model.num_layers == 4
    assert "is a Python script" in refusal(tmp_path, "x = 1", "job.py", trainer="torchtitan")


def test_a_dump_holds_what_was_derived_beside_what_it_was_derived_from(tmp_path: Path) -> None:
    dump = {**GIVEN, "encoder_num_layers": 4, "encoder_seq_length": 32, "train_samples": 1605}
    found = imported(tmp_path, json.dumps(dump), "args.json")
    assert found.config.training.train_iters == 100
    # The decay is over all samples, also over those that make no whole step.
    assert found.config.lr_schedule.lr_decay_tokens == 1605 * 32
    dump["train_samples"] = 3200
    assert "contradict each other" in refusal(tmp_path, json.dumps(dump), "args.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--lr-warmup-fraction 1e308", "the nearest legal value is 1"),
        ("--lr-warmup-fraction -1", "the nearest legal value is 0"),
        ("--no-position-embedding", "Megatron refuses it"),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage -2",
            "the nearest legal value is 1",
        ),
    ],
)
def test_illegal_arguments_have_one_message(tmp_path: Path, arguments: str, message: str) -> None:
    assert message in refusal(tmp_path, f"{RUN} {arguments}")


def test_the_vocabulary_is_padded_by_an_older_name_of_the_ranks_too(tmp_path: Path) -> None:
    found = imported(tmp_path, f"{RUN.replace('1000', '1100')} --model-parallel-size 2")
    assert found.config.model.vocab_size == 1280


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("pipeline_parallel_layers_per_stage = 0", "the nearest legal value is 1"),
        ("pipeline_parallel_layers_per_stage = -1", "the nearest legal value is 1"),
        ("tensor_parallel_degree = 0", "expected at least 1"),
        ("data_parallel_shard_degree = -2", "expected at least 1, or -1 for what the others leave"),
        ("pipeline_parallel_first_stage_less_layers = -20", "a stage would have -"),
        ("tensor_parallel_degree = 0x" + "f" * 6000, "is no size"),
        ("[lr_scheduler]\ndecay_ratio = 1e308", "the nearest legal value is 1"),
        ('[optimizer]\nimplementation = "fsed"', "expected one of for-loop, foreach, fused"),
    ],
)
def test_illegal_fields_of_a_job_file_have_one_message(tmp_path: Path, more: str, message: str) -> None:
    assert message in refusal(tmp_path, f"{JOB}{more}\n", "job.toml", devices=8)


def test_fields_of_a_job_file_that_are_switches_or_no_digits_of_ours(tmp_path: Path) -> None:
    more = '[activation_checkpoint]\nselective_ac_option = "²"\n[optimizer]\nfused = false\n'
    found = imported(tmp_path, JOB + more, "job.toml", devices=8)
    assert not found.config.optimizer.fused
    assert "memory" in {one.effect for one in found.missing}
    fused = imported(tmp_path, JOB + "[optimizer]\nfused = true\n", "job.toml", devices=8)
    assert fused.config.optimizer.fused


def test_llama3_of_torchtitan_scales_rotary_positions_as_its_last_versions_do(tmp_path: Path) -> None:
    model = imported(tmp_path, JOB, "job.toml", devices=8).config.model
    assert model.use_rope_scaling
    assert (model.rope_scaling_factor, model.rope_scaling_high_freq_factor) == (8.0, 4.0)
    older = JOB.replace("steps = 100", "steps = 100\nbatch_size = 8")
    found = imported(tmp_path, older, "job.toml", devices=8)
    assert not found.config.model.use_rope_scaling
    assert any(one.name == "scaling of rotary positions" for one in found.missing)
    qwen = JOB.replace("llama3", "qwen3")
    assert not imported(tmp_path, qwen, "job.toml", devices=8).config.model.use_rope_scaling
