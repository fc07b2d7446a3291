"""``drivetrain ops``: what there is, what is right, and that a wrong backend is said to be."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from drivetrain.cli.application import application
from drivetrain.engine.ops import discovery
from drivetrain.engine.ops.operator import Backend, serves_all
from drivetrain.errors import DrivetrainError


def answer(*arguments: str) -> Any:
    return CliRunner().invoke(application(), ["ops", *arguments])


def test_the_list_names_each_operator_with_its_backends_and_where_they_ran() -> None:
    document = json.loads(answer("list", "--json").stdout)
    assert [one["name"] for one in document["operators"]] == [one.name for one in discovery.operators()]
    for one in document["operators"]:
        assert one["equation"]
        assert "eager" in [backend["name"] for backend in one["backends"]]
    text = answer("list", "rms_norm").stdout
    assert "ran on cpu" in text
    assert "never run on a device it is for" in text  # Triton


def test_a_right_backend_is_graded_right_in_every_case() -> None:
    result = answer("check", "rotary", "--backend", "eager", "--dtype", "fp32", "--json")
    assert result.exit_code == 0
    (row,) = json.loads(result.stdout)["graded"]
    assert row["cases"] == len(list(discovery.operator_named("rotary").cases()))
    assert row["problems"] == []
    assert 0 < row["worst"]["error"] <= row["worst"]["allowed"]


def test_a_wrong_backend_ends_with_1_and_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = discovery.operator_named("rms_norm")

    def without_the_root(**given: Any) -> torch.Tensor:
        out = right.reference(**given)
        assert isinstance(out, torch.Tensor)
        return out * 1.001

    wrong = replace(right, backends=(*right.backends, Backend("wrong", without_the_root, serves_all)))
    monkeypatch.setattr(discovery, "operators", lambda: (wrong,))
    result = answer("check", "rms_norm", "--backend", "wrong", "--dtype", "fp32")
    assert result.exit_code == 1
    assert "WRONG" in result.stdout
    assert "output 0: relative error" in result.stdout


def test_a_backend_that_cannot_run_here_is_not_called_right() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device, on which Triton's kernels run")
    result = answer("check", "rms_norm", "--backend", "triton", "--dtype", "fp32")
    assert result.exit_code == 0
    assert "not graded: " in result.stdout
    assert "right" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "rms_nrm"], "did you mean rms_norm?"),
        (["check", "rms_norm", "--backend", "tritn"], "there are: eager"),
        (["check", "rms_norm", "--dtype", "fp8"], "none of fp32, bf16, fp16"),
        (["check", "rms_norm", "--device", "tpu"], "neither cpu nor cuda"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(arguments: list[str], said: str) -> None:
    error = answer(*arguments).exception
    assert isinstance(error, DrivetrainError)
    assert said in str(error)
