"""``check --dry-run``: ranks of a world of any size from the command line."""

import json
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from drivetrain.cli import check_ranks
from drivetrain.cli.application import application
from drivetrain.cli.check_ranks import parse_ranks, print_dry_run
from drivetrain.errors import DrivetrainError

SMALL = (
    "model.num_layers=4",
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    "model.seq_length=16",
    "model.vocab_size=130",
    "data.data_path=corpus",
    "training.micro_batch_size=1",
    "parallelism.tensor_model_parallel_size=2",
    "parallelism.pipeline_model_parallel_size=4",
    "parallelism.zero_stage=3",
)
LARGE = ("--devices", "4096", "--per-host", "8", "training.global_batch_size=2048")


def check(*arguments: str) -> Result:
    return CliRunner().invoke(application(), ["check", "llama-2m", *SMALL, *arguments])


def document(*arguments: str) -> dict[str, Any]:
    done = check(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_world_of_4096_is_shown_by_one_rank_of_each_kind() -> None:
    shown = document(*LARGE, "--dry-run")["dry_run"]
    assert shown["failed"] == []
    # 130 rows of the vocabulary are 65 for both tensor-parallel ranks: kinds differ by stage alone.
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 2, 6]
    assert [rank["stands_for"] for rank in shown["ranks"]] == [1024, 2048, 1024]
    assert shown["kinds"] == 3
    first = shown["ranks"][0]
    assert first["place"] == {"tp": 0, "cp": 0, "pp": 0, "dp": 0, "dp_shard": 0, "dp_replicate": 0}
    assert {first[what]["source"] for what in ("parameters", "gradients", "moments")} == {"counted"}
    assert {one["source"] for one in first["collectives"]} == {"counted"}
    assert {one["group"] for one in first["collectives"]} == {"tp", "pp", "dp_shard"}
    assert all(one["calls"] > 0 and one["bytes"] > 0 for one in first["collectives"])
    assert first["why_formula"] is None
    assert "by_parameter" not in first
    total = shown["all_ranks"]["parameters"]
    assert total["elements"] > shown["model_elements"], "norms are replicated, and the embedding has two ends"
    assert total["source"] == "formula"


def test_ranks_can_be_chosen_and_their_parts_listed() -> None:
    shown = document(*LARGE, "--dry-run", "--ranks", "4095,0", "--shapes")["dry_run"]
    last, first = shown["ranks"]
    assert (last["rank"], first["rank"]) == (4095, 0)
    (embedding,) = [part for part in first["by_parameter"] if part["name"] == "embedding.weight"]
    assert embedding == {
        "name": "embedding.weight",
        "full_shape": [130, 64],
        "shape": [1, 64],
        "offset": [0, 0],
    }
    for rank in shown["ranks"]:
        elements = sum(
            part["shape"][0] * part["shape"][-1] ** (len(part["shape"]) - 1) for part in rank["by_parameter"]
        )
        assert elements == rank["parameters"]["elements"]
    # 512 ranks share 65 rows: most of them hold none, and padding all the same.
    assert last["parameters"]["elements"] == 0
    assert last["parameters"]["bytes"] > 0


def test_a_pass_that_would_take_too_long_gives_way_to_the_formulas_and_says_why() -> None:
    shown = document(*LARGE[:4], "training.global_batch_size=2097152", "--dry-run", "--ranks", "0")["dry_run"]
    (rank,) = shown["ranks"]
    assert {one["source"] for one in rank["collectives"]} == {"formula"}
    assert rank["gradients"]["source"] == "formula"
    assert rank["parameters"]["source"] == rank["moments"]["source"] == "counted"
    assert "operators" in rank["why_formula"]


def test_text_shows_ranks_places_and_collectives() -> None:
    done = check(*LARGE, "--dry-run", "--ranks", "6")
    assert done.exit_code == 0, done.output
    assert "rank 6 (tp 0, cp 0, pp 3, dp 0, dp_replicate 0, dp_shard 0; 1024 ranks are alike)" in done.stdout
    assert "dp_shard     all_gather" in done.stdout
    assert "all ranks together" in done.stdout


def test_failures_come_first_and_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    nothing = {"elements": 0, "bytes": 0, "source": "formula"}
    print_dry_run(
        {
            "failed": [{"rank": 7, "error": "it broke", "traceback": None}],
            "ranks": [],
            "kinds": 1,
            "all_ranks": {"parameters": nothing, "gradients": nothing, "moments": nothing},
        }
    )
    assert capsys.readouterr().err == "rank 7 cannot be shown: it broke\n"


def test_a_rank_that_failed_is_the_answer_no(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"elements": 0, "bytes": 0, "source": "formula"}
    failed = {
        "failed": [{"rank": 0, "error": "it broke", "traceback": None}],
        "ranks": [],
        "kinds": 1,
        "all_ranks": {"parameters": nothing, "gradients": nothing, "moments": nothing},
    }
    monkeypatch.setattr(check_ranks, "dry_run_document", lambda *_, **__: failed)
    done = check(*LARGE, "--dry-run", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["dry_run"]["failed"][0]["error"] == "it broke"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--dry-run", "--ranks", "0,4096"),
            "4096 processes have the ranks 0 to 4095; the nearest to 4096 is 4095",
        ),
        (("--dry-run", "--ranks", "first"), "expected rank numbers with commas between them, such as 0,4095"),
        (("--ranks", "0"), "add --dry-run, or drop it"),
        (("--dry-run", "training.global_batch_size=7"), "training.global_batch_size"),
    ],
)
def test_bad_input_is_one_message(arguments: tuple[str, ...], message: str) -> None:
    done = check(*LARGE, *arguments, "--json")
    assert isinstance(done.exception, DrivetrainError)
    assert message in str(done.exception)
    assert done.stdout == ""


def test_ranks_are_read_in_the_order_given() -> None:
    assert parse_ranks("7,0", 8) == [7, 0]
