"""Where a configuration comes from, and what a user reads when it is wrong."""

from pathlib import Path

import pytest

from drivetrain.config import load_config, nearest, parse_config, to_toml
from drivetrain.errors import ConfigurationError


def problems(source: str | Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        load_config(str(source), overrides)
    shown = caught.value.__context__ is not None and not caught.value.__suppress_context__
    assert not shown, "the validator's own words would be shown"
    assert str(caught.value) == "\n".join(caught.value.problems)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # wrong type
        ("training.train_iters=abc", "training.train_iters: expected a whole number, got 'abc'"),
        ("training.train_iters=1.5", "training.train_iters: expected a whole number, got 1.5"),
        ("training.train_iters=true", "training.train_iters: expected a whole number, got true"),
        ("training.train_iters=none", "training.train_iters: expected a whole number, got 'none'"),
        ("training.train_iters=[1]", "training.train_iters: expected a whole number, got a list"),
        ("model.kv_channels={a=1}", "model.kv_channels: expected a whole number, or none, got a table"),
        ("optimizer.lr=fast", "optimizer.lr: expected a number, got 'fast'"),
        ("optimizer.lr=nan", "optimizer.lr: expected a finite number, got nan"),
        ("optimizer.lr=1" + "0" * 400, "optimizer.lr: a number of 1329 bits is too large"),
        ("fusion.compile=yes", "fusion.compile: expected true or false, got 'yes'"),
        (
            "precision.params_dtype=bf61",
            "precision.params_dtype: expected one of fp32, bf16, fp16, got 'bf61'; did you mean bf16?",
        ),
        (
            "data.split=95",
            r"data.split: expected text of the form ^[0-9]+(\.[0-9]+)?,[0-9]+(\.[0-9]+)?$ such as 95,5, got '95'",
        ),
        ("data.data_path=", "data.data_path: must not be empty; for no value write none"),
        # unknown field
        (
            "training.train_itres=5",
            "training.train_itres: no such field; did you mean training.train_iters?",
        ),
        ("train_iters=5", "train_iters: no such section; did you mean training.train_iters?"),
        ("training.lr=5", "training.lr: no such field; did you mean optimizer.lr?"),
        (
            "trainng.train_iters=5",
            "trainng.train_iters: no section is called 'trainng'; did you mean training.train_iters?",
        ),
        ("model.n_kv_heads=5", "model.n_kv_heads: no such field; did you mean model.num_query_groups?"),
        (
            "optimizer.warmup_steps=5",
            "optimizer.warmup_steps: no such field; did you mean lr_schedule.lr_warmup_tokens?",
        ),
        (
            "precision.zzz=5",
            "precision.zzz: no such field; the fields of precision are params_dtype, grad_reduce_dtype, "
            "optimizer_state_dtype, loss_scale, initial_loss_scale, min_loss_scale, loss_scale_window, hysteresis",
        ),
        ("model.num_layers.x=5", "model.num_layers.x: no such field; did you mean model.num_layers?"),
        ("optimizer=5", "optimizer: is a section; set one of its fields, as in optimizer.field=value"),
        (
            "training.train_iters",
            "override 'training.train_iters': expected section.field=value, such as training.train_iters=...",
        ),
        # out of range
        (
            "training.train_iters=0",
            "training.train_iters: got 0, must be >= 1; the nearest legal value is 1",
        ),
        (
            "model.num_layers=5000",
            "model.num_layers: got 5000, must be <= 1024; the nearest legal value is 1024",
        ),
        ("model.hidden_dropout=1", "model.hidden_dropout: got 1, must be < 1; the default is 0.0"),
        ("optimizer.lr=0", "optimizer.lr: got 0, must be > 0; the default is 0.001"),
        ("optimizer.lr=11", "optimizer.lr: got 11, must be <= 10; the nearest legal value is 10.0"),
    ],
)
def test_an_override_that_is_wrong_is_told_in_plain_words(override: str, message: str) -> None:
    assert problems("llama-2m", override) == [message]


def test_all_problems_are_told_at_once() -> None:
    lines = problems("llama-2m", "training.train_iters=0", "nonsense", "data.splt=1,1", "optimizer.lr=x")
    assert len(lines) == 4


def test_values_of_overrides_are_read_by_the_type_of_the_field() -> None:
    config = load_config(
        "llama-2m",
        [
            "training.train_iters=1e2",
            "lr_schedule.lr_warmup_tokens=1_000",
            "optimizer.lr=1",
            "run.name=2026",
            "run.runs_dir = none ",
            "data.split=90,10",
            "data.data_path='my corpus/x'",
            "precision.params_dtype=fp32",
            "model.qk_layernorm=true",
        ],
    ).config
    assert config.training.train_iters == 100
    assert config.lr_schedule.lr_warmup_tokens == 1000
    assert isinstance(config.optimizer.lr, float)
    assert config.run.name == "2026"
    assert config.run.runs_dir == "none"  # not optional: the word itself
    assert config.data.split == "90,10"
    assert config.data.data_path == "my corpus/x"
    assert config.precision.params_dtype == "fp32"
    assert config.model.qk_layernorm


def test_none_takes_the_value_of_a_preset_away() -> None:
    assert load_config("llama3-8b").config.model.num_query_groups == 8
    config = load_config("llama3-8b", ["model.num_query_groups=none"]).config
    assert config.model.num_query_groups is None


def test_of_two_overrides_the_later_wins() -> None:
    config = load_config("llama-2m", ["run.seed=1", "run.seed=2"]).config
    assert config.run.seed == 2


def test_overrides_do_not_leak_into_the_preset() -> None:
    before = load_config("llama-2m").config
    load_config("llama-2m", ["run.seed=77", "model.num_layers=1"])
    assert load_config("llama-2m").config == before


def test_a_file_starts_from_a_preset_and_overrides_come_last(tmp_path: Path) -> None:
    path = tmp_path / "my run.toml"
    path.write_text('preset = "llama-10m"\n[training]\ntrain_iters = 7\neval_iters = 3\n')
    loaded = load_config(str(path), ["training.eval_iters=4"])
    assert loaded.name == "my-run"
    assert loaded.source == str(path)
    assert loaded.config.training.train_iters == 7
    assert loaded.config.training.eval_iters == 4
    assert loaded.config.model == load_config("llama-10m").config.model
    assert loaded.config.training.global_batch_size == 32


def test_a_byte_order_mark_in_front_of_a_file_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "notepad.toml"
    path.write_bytes(b'\xef\xbb\xbfpreset = "llama-2m"\n[training]\ntrain_iters = 7\n')
    assert load_config(str(path)).config.training.train_iters == 7


def test_problems_of_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        'preset = "llama-2m"\nschema = 9\ntrain_iters = 3\ndata = 3\n'
        "[training]\ntrain_iters = 0\nmicro_batch_size = 0\n[modl]\nx = 1\n"
    )
    assert problems(path, "training.micro_batch_size=-1") == [
        f"schema (in {path}): got 9, this version of Drivetrain reads schema 1",
        f"data (in {path}): expected a section ([data] with its fields below), got 3",
        "training.micro_batch_size: got -1, must be >= 1; the nearest legal value is 1",
        f"training.train_iters (in {path}): got 0, must be >= 1; the nearest legal value is 1",
        f"train_iters (in {path}): no such section; did you mean training.train_iters?",
        f"modl (in {path}): no such section; did you mean [model]?",
    ]


def test_a_file_without_a_model_is_told_each_missing_field(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("")
    lines = problems(path)
    assert [line.partition(":")[0] for line in lines] == [
        "model.num_layers",
        "model.hidden_size",
        "model.num_attention_heads",
        "model.seq_length",
        "model.vocab_size",
    ]
    assert lines[0] == (
        "model.num_layers: required (Number of transformer blocks); give it, or start from a preset"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[model]\nnum_layers = = 3\n", "at line 2"),
        (b"[model]\n[model]\n", "line 2"),
        (b"x = \xff", "not UTF-8 text (byte 4)"),
        (b"x = " + b"9" * 5000, "no valid TOML"),
        (b"x = " + b"[" * 10_000, "no valid TOML"),
        (b'preset = "llama-3m"', "did you mean llama-2m?"),
        (b"preset = 3\n[model]", "expected a preset's name, got 3"),
    ],
)
def test_a_damaged_file_is_one_message_with_the_place(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "damaged.toml"
    path.write_bytes(content)
    first = problems(path)[0]
    assert words in first
    assert str(path) in first


def test_a_run_directory_gives_its_configuration_and_name(tmp_path: Path) -> None:
    config = load_config("llama-2m", ["run.seed=5"]).config
    directory = tmp_path / "20261129-141503-llama-2m-3f2a"
    directory.mkdir()
    (directory / "config.toml").write_text(to_toml(config))
    loaded = load_config(str(directory))
    assert loaded.config == config
    assert loaded.name == "llama-2m"


def test_sources_that_do_not_exist_are_told_the_nearest(tmp_path: Path) -> None:
    assert problems("lama-2m")[0].startswith(
        "no preset is called 'lama-2m'; did you mean llama-2m? The presets are gpt2-124m, "
    )
    (tmp_path / "mine.toml").write_text("")
    assert problems(tmp_path / "mime.toml") == [
        f"{tmp_path / 'mime.toml'} does not exist; did you mean mine.toml?"
    ]
    assert "neither does its folder" in problems(tmp_path / "no" / "x.toml")[0]
    assert "without config.toml" in problems(tmp_path)[0]
    assert "File name too long" in problems("a" * 5000)[0]
    assert problems("")[0].startswith("no preset is called ''")
    assert "embedded null byte" in problems("a\0b")[0]


def test_parse_config_reads_the_text_of_a_file() -> None:
    config = load_config("llama-2m").config
    assert parse_config(to_toml(config)) == config
    with pytest.raises(ConfigurationError, match=r"training\.x \(in here\.toml\): no such field"):
        parse_config(to_toml(config).replace("[training]", "[training]\nx = 1"), where="here.toml")


def test_the_nearest_word_ignores_case_and_gives_up_on_strangers() -> None:
    assert nearest("rmsnorm", ["LayerNorm", "RMSNorm"]) == "RMSNorm"
    assert nearest("zebra", ["LayerNorm", "RMSNorm"]) is None
    assert nearest("", ["a"]) is None
