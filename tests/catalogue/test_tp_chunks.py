"""When chunks of tensor parallelism are refused, have no effect, or are proposed."""

import json
import subprocess
import sys

import pytest

from drivetrain.catalogue import entry
from drivetrain.catalogue.rules import all_rules
from drivetrain.catalogue.tp_chunks import rows_of_rank
from drivetrain.config import LaunchFacts, RunConfig, load_config, parse_config, violations
from drivetrain.config.serialise import to_toml
from drivetrain.errors import ConfigurationError

FIELD = "overlap.tp_chunks"
TP = "parallelism.tensor_model_parallel_size"
TWO = LaunchFacts(world_size=2)


def config_of(*overrides: str) -> RunConfig:
    return load_config("llama-2m", overrides).config


@pytest.mark.parametrize(("written", "wanted"), [("1", 1), ("4", 4), ("'32'", 32), ("tuned", None)])
def test_a_number_or_tuned_is_taken_and_read_back(written: str, wanted: int | None) -> None:
    config = config_of(f"{FIELD}={written}")
    assert config.overlap.wanted_tp_chunks == wanted
    assert parse_config(to_toml(config)) == config


@pytest.mark.parametrize("written", ["0", "-1", "4.0", "2.5", "all", "true", "''", "10000"])
def test_anything_else_is_refused(written: str) -> None:
    with pytest.raises(ConfigurationError, match=r"overlap\.tp_chunks.*tuned\|"):
        config_of(f"{FIELD}={written}")


@pytest.mark.parametrize("chunks", ["4", "tuned"])
def test_chunks_without_tensor_parallelism_are_refused_with_what_is_legal(chunks: str) -> None:
    (found,) = violations(config_of(f"{FIELD}={chunks}"), LaunchFacts(), all_rules())
    assert found.rule == "tp-chunks-need-ranks"
    assert "overlap.tp_chunks = 1" in found.message
    assert f"{TP} = 2" in found.message
    assert violations(config_of(f"{FIELD}={chunks}", f"{TP}=2"), TWO, all_rules()) == []


def test_the_command_line_refuses_it_before_anything_is_started() -> None:
    command = [sys.executable, "-m", "drivetrain", "check", "llama-2m", f"{FIELD}=4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1, done.stderr
    assert [one["rule"] for one in json.loads(done.stdout)["violations"]] == ["tp-chunks-need-ranks"]


def test_it_is_proposed_where_ranks_share_layers_and_nowhere_else() -> None:
    one = entry("tp_chunks")
    assert one.on(config_of(), TWO) is None
    assert one.on(config_of(f"{TP}=2"), TWO) == {FIELD: "4"}
    assert one.on(config_of(f"{TP}=2", f"{FIELD}=2"), TWO) is None


def test_rows_are_a_rank_s_tokens() -> None:
    sizes = ("training.micro_batch_size=2", "model.seq_length=64", f"{TP}=2")
    assert rows_of_rank(config_of(*sizes)) == 128
    assert rows_of_rank(config_of(*sizes, "parallelism.sequence_parallel=true")) == 64


def test_a_single_row_has_nothing_to_cut() -> None:
    config = config_of(
        f"{TP}=2",
        f"{FIELD}=4",
        "parallelism.sequence_parallel=true",
        "training.micro_batch_size=1",
        "model.seq_length=2",
    )
    why = entry("tp_chunks").applies(config, TWO)
    assert why is not None
    assert "one chunk" in why
