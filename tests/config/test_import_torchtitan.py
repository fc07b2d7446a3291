"""A torchtitan job file, in its newest form with TOML and an older one, becomes the same configuration."""

from pathlib import Path
from typing import Any

import pytest

from drivetrain.catalogue.rules import all_rules
from drivetrain.config import parse_config
from drivetrain.config.importing import Imported, import_file, imported_toml
from drivetrain.errors import ConfigurationError

JOB = """
[job]
dump_folder = "out"
description = "a small one"

[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "assets"

[optimizer]
name = "AdamW"
lr = 1e-3

[lr_scheduler]
warmup_steps = 20
decay_ratio = 0.5
decay_type = "cosine"
min_lr_factor = 0.1

[training]
local_batch_size = 4
seq_len = 128
steps = 100
dataset = "c4"

[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2

[checkpoint]
enable = true
interval = 50

[activation_checkpoint]
mode = "full"

[compile]
enable = true
"""
OLDER = """
[model]
name = "llama3"
flavor = "debugmodel"

[optimizer]
name = "AdamW"
lr = 1e-3

[training]
batch_size = 4
seq_len = 128
warmup_steps = 20
steps = 100
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
compile = true
dataset = "c4"

[experimental]
pipeline_parallel_degree = 1

[activation_checkpoint]
mode = "none"
"""


def imported(folder: Path, text: str, name: str = "job.toml", **options: Any) -> Imported:
    file = folder / name
    file.write_text(text)
    return import_file(file, rules=all_rules(), **options)


def refusal(folder: Path, text: str, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        imported(folder, text, **options)
    return str(caught.value)


def test_a_job_file_becomes_the_configuration_that_it_trains(tmp_path: Path) -> None:
    found = imported(tmp_path, JOB, devices=8)
    config = found.config
    step = 16 * 128
    assert found.conversion.source.trainer == "torchtitan"
    assert (config.model.hidden_size, config.model.ffn_size, config.model.vocab_size) == (256, 768, 2048)
    assert config.training.global_batch_size == 16
    assert config.parallelism.data_parallel_size == 4
    assert config.parallelism.zero_stage == 3
    assert config.parallelism.sequence_parallel
    schedule = config.lr_schedule
    assert (schedule.lr_decay_style, schedule.lr_wsd_decay_style) == ("WSD", "cosine")
    assert (schedule.lr_warmup_tokens, schedule.lr_wsd_decay_tokens) == (20 * step, 50 * step)
    assert schedule.min_lr == pytest.approx(1e-4)
    assert config.checkpoint.save_interval == 50
    assert config.memory.recompute_granularity == "full"
    assert config.fusion.compile
    assert config.optimizer.adam_beta2 == 0.95
    assert config.model.untie_embeddings_and_output_weights
    assert parse_config(imported_toml(found)) == config


def test_decay_is_the_same_function_of_the_step_and_the_warm_up_one_step_later(tmp_path: Path) -> None:
    from drivetrain.engine.schedule import learning_rate

    config = imported(tmp_path, JOB, devices=8).config
    step = 16 * 128

    def rate(number: int) -> float:
        return learning_rate(number * step, config.optimizer, config.lr_schedule, 100 * step)

    assert rate(10) == pytest.approx(1e-3 * 10 / 20)
    assert rate(40) == pytest.approx(1e-3)
    # (step - 50) / 50 of half a cosine from 1 to 0.1.
    assert rate(75) == pytest.approx(1e-3 * (0.1 + 0.9 * 0.5))


def test_an_older_job_file_is_read_by_its_older_places(tmp_path: Path) -> None:
    config = imported(tmp_path, OLDER).config
    assert config.training.micro_batch_size == 4
    assert config.training.global_batch_size == 16
    assert config.parallelism.tensor_model_parallel_size == 2
    assert config.lr_schedule.lr_warmup_tokens == 20 * 16 * 128
    assert config.lr_schedule.lr_wsd_decay_style == "linear"
    assert config.fusion.compile
    assert config.memory.recompute_granularity == "none"


def test_what_is_left_out_changes_the_curve_and_is_named(tmp_path: Path) -> None:
    found = imported(tmp_path, JOB.replace('hf_assets_path = "assets"', 'converters = ["float8"]'), devices=8)
    names = [one.name for one in found.missing if one.effect == "curve"]
    assert {"training.dataset", "model.converters", "first weights"} <= set(names)
    assert found.changes_training


def test_every_field_is_in_one_list(tmp_path: Path) -> None:
    found = imported(tmp_path, JOB.replace("[compile]", "[compile]\nbackendd = 1"), devices=8)
    conversion = found.conversion
    lists = [
        {one.name for one in group}
        for group in (conversion.taken, conversion.same, conversion.lacking, conversion.unknown)
    ]
    for name in conversion.source.arguments:
        assert sum(name in group for group in lists) == 1, name
    assert [(one.name, one.nearest) for one in conversion.unknown] == [
        ("compile.backendd", "compile.backend")
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('flavor = "debugmodel"', 'flavor = "debugmodl"', "did you mean debugmodel"),
        ('name = "llama3"', 'name = "deepseek_v3"', "model.name deepseek_v3: its shape is not known here"),
        ("steps = 100", 'steps = "many"', "training.steps many: expected a whole number"),
        ("seq_len = 128", "seq_len = 127", "sequence_parallel"),
        ("seq_len = 128", "seq_len = [1, 2]", "training.seq_len: expected a whole number"),
    ],
)
def test_illegal_fields_are_reported_under_their_own_names(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert message in refusal(tmp_path, JOB.replace(old, new), devices=8)


def test_without_the_number_of_devices_the_global_batch_is_asked_for(tmp_path: Path) -> None:
    assert "give --devices N" in refusal(tmp_path, JOB)
    assert "are not the product of all degrees" in refusal(tmp_path, JOB, devices=7)


def test_ends_of_a_pipeline_have_fewer_layers(tmp_path: Path) -> None:
    text = JOB.replace("tensor_parallel_degree = 2", "pipeline_parallel_degree = 4").replace(
        "local_batch_size = 4", "local_batch_size = 8"
    )
    config = imported(tmp_path, text.replace('mode = "full"', 'mode = "none"'), devices=4).config
    assert config.parallelism.pipeline_model_parallel_layout == "1,2,2,1"
    assert config.training.micro_batch_size == 1
    assert config.training.global_batch_size == 8


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.sh", b"", "is empty"),
        ("a.sh", b"\n \n", "is empty"),
        ("a.sh", b"\x7fELF\0\0", "is a binary file"),
        ("a.sh", b"\xff\xfe--num-layers", "is no text in UTF-8"),
        ("a.py", b"x = 1\n", "is a Python script"),
        ("train", b"import torch\nimport sys\n\ndef main():\n    pass\n", "is a Python script"),
        ("train", b"#!/usr/bin/env python3\nprint(1)\n", "is a Python script"),
        ("a.txt", b"one two three\n", "holds no arguments of Megatron-LM"),
        ("a.toml", b"[tool]\nx = 1\n", "holds no arguments of Megatron-LM"),
        ("a.toml", b"[training\n", "is no valid TOML"),
        ("a.toml", b"schema = 1\n[model]\nnum_layers = 2\n", "is a configuration of Drivetrain already"),
        ("a.json", b"{", "is no valid JSON"),
        ("a.json", b"[1]", "holds no names with values"),
        ("a.json", b'{"a": 1}', "holds no arguments of Megatron-LM"),
        ("a.json", b'{"a":' * 40 + b"1" + b"}" * 40, "nested more than 12 deep"),
        ("a.yaml", b"a: [", "is no valid YAML"),
        ("a.yaml", b"a: &x [1]\nb: *x\n", "has aliases"),
        ("a.sh", b"x" * (1 << 20) + b"y", "has 1,048,577 bytes"),
        (
            "a.sh",
            b"run --num-layers 1 --hidden-size 2 --lr 1\nrun --num-layers 1 --hidden-size 2 --lr 1",
            "starts training 2 times, at the lines 1, 2",
        ),
    ],
)
def test_what_is_no_list_of_arguments_is_refused_with_one_message(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        import_file(file)
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1


def test_a_file_that_is_not_there_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="can't be read: No such file"):
        import_file(tmp_path / "none.sh")
    with pytest.raises(ConfigurationError, match="is a directory"):
        import_file(tmp_path)
