"""``drivetrain mfu``: the contract, and the impossible figures that articles print."""

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from drivetrain.cli import mfu
from drivetrain.errors import DrivetrainError

CONTRACT = {
    "peak_flops",
    "peak_source",
    "model_flops_per_step",
    "hardware_flops_per_step",
    "mfu",
    "hfu",
    "others",
}


def command_line() -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None)
    app.callback()(lambda: None)
    mfu.register(app)
    return app


def answer(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(command_line(), ["mfu", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def refusal(*arguments: str) -> str:
    with pytest.raises(DrivetrainError) as caught:
        CliRunner().invoke(command_line(), ["mfu", *arguments], catch_exceptions=False)
    return str(caught.value)


def figure(step_time: str, *more: str) -> tuple[str, ...]:
    return (
        *("llama2-7b", "--seq-length", "4096", "--global-batch-size", "512", "--step-time", step_time),
        *("--devices", "32", "--device", "A100-SXM-80GB", "--dtype", "bf16", *more),
    )


def test_the_document_has_the_keys_of_the_contract() -> None:
    document = answer(*figure("14.6"))
    assert set(document) >= CONTRACT
    assert set(document["mfu"]) == set(document["model_flops_per_step"]) == {"causal", "full_attention"}
    assert all(set(other) >= {"rule", "mfu", "verdict"} for other in document["others"])
    assert document["peak_flops"] == 312e12
    assert document["peak_source"].startswith("A100-SXM-80GB bf16")
    assert document["impossible"] is False
    assert document["verdict"] == "possible"


def test_the_figures_follow_from_each_other() -> None:
    document = answer(*figure("14.6", "--recompute", "full"))
    capacity = 14.6 * 32 * 312e12
    for convention in ("causal", "full_attention"):
        flops = document["model_flops_per_step"][convention]
        assert document["mfu"][convention] == pytest.approx(flops / capacity)
    assert document["hfu"] == pytest.approx(document["hardware_flops_per_step"] / capacity)
    # 6 FLOPs for each multiplying weight and token, plus attention: 6 x layers x width x length, causal.
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11_008) + 32_000 * 4096
    per_token = 6 * weights + 6 * 32 * 4096 * 4096
    assert document["model_flops_per_step"]["causal"] == per_token * 512 * 4096


def test_recomputation_raises_hfu_and_not_mfu() -> None:
    none, selective, full = (
        answer(*figure("14.6", "--recompute", how)) for how in ("none", "selective", "full")
    )
    assert none["mfu"] == selective["mfu"] == full["mfu"]
    assert none["hfu"] == none["mfu"]["causal"] < selective["hfu"] < full["hfu"]


def test_tokens_per_second_may_stand_for_the_step_time() -> None:
    by_time = answer(*figure("16"))
    by_rate = answer(
        *("llama2-7b", "--seq-length", "4096", "--global-batch-size", "512", "--tokens-per-second", "131072"),
        *("--devices", "32", "--device", "A100-SXM-80GB"),
    )
    assert by_rate["step_time_s"] == 16
    assert by_rate["mfu"] == by_time["mfu"]


def test_wrong_rules_are_called_wrong() -> None:
    verdicts = {other["rule"]: other["verdict"] for other in answer(*figure("14.6"))["others"]}
    assert verdicts["18N"].startswith("wrong: ")
    assert verdicts["2N"].startswith("wrong: ")
    assert verdicts["8N"].startswith("wrong as MFU")
    assert verdicts["6N"].startswith("approximation: ")
    assert verdicts["exact products, causal half"] == "right"


# --- figures that articles print


def article_a(step_time: str) -> dict[str, Any]:
    """13B on 32 cards. The digest states neither batch nor peak: 128 sequences of 4096 tokens and 320 TFLOP/s
    (the figure some SKUs of the 910A are sold with) are what its 97, 133, 166 and 499% imply."""
    return answer(
        *("llama2-13b", "--seq-length", "4096", "--global-batch-size", "128", "--step-time", step_time),
        *("--devices", "32", "--device", "Ascend 910A (910 ProA/B)", "--peak-flops", "320e12"),
    )


@pytest.mark.parametrize(("step_time", "six_n"), [("4.1", 0.97), ("3.0", 1.33), ("2.4", 1.66)])
def test_the_step_times_of_a_13b_model_on_32_cards_are_impossible(step_time: str, six_n: float) -> None:
    document = article_a(step_time)
    by_rule = {other["rule"]: other["mfu"] for other in document["others"]}
    assert by_rule["6N"] == pytest.approx(six_n, abs=0.01)
    assert document["impossible"] is True
    assert document["verdict"].startswith("impossible: MFU 1")


def test_the_worked_example_is_499_percent_by_its_own_rule() -> None:
    others = {other["rule"]: other for other in article_a("2.4")["others"]}
    assert others["18N"]["mfu"] == pytest.approx(4.99, abs=0.02)
    assert "impossible" in others["18N"]["verdict"]


def test_a_possible_mfu_is_impossible_where_full_recomputation_would_exceed_the_peak() -> None:
    # 7B, batch 160, 63,200 tokens/s: 88% MFU and 118% HFU. The digest states no hardware; eight cards of
    # 376 TFLOP/s and N = 7e9 give exactly its figures, length 2048 or 4096 both stay within two points.
    document = answer(
        *("llama2-7b", "--seq-length", "2048", "--global-batch-size", "160", "--tokens-per-second", "63200"),
        *("--devices", "8", "--peak-flops", "376e12", "--recompute", "full"),
    )
    assert document["mfu"]["causal"] == pytest.approx(0.88, abs=0.02)
    assert document["hfu"] == pytest.approx(1.18, abs=0.03)
    assert document["impossible"] is True
    assert "HFU" in document["verdict"]


def test_a_rate_and_a_step_time_that_contradict_each_other_are_impossible() -> None:
    # 1,280 tokens/s and 78 s for 1,000 steps: 100 tokens a step, less than one sequence. Any hardware.
    document = answer(
        *("llama2-7b", "--seq-length", "4096", "--global-batch-size", "1", "--tokens-per-second", "1280"),
        *("--step-time", "0.078", "--devices", "8", "--device", "H100-SXM-80GB"),
    )
    assert document["mfu"]["causal"] < 1
    assert document["impossible"] is True
    assert "100 tokens a step" in document["verdict"]


def test_a_rate_that_agrees_with_the_step_time_is_no_contradiction() -> None:
    assert answer(*figure("16", "--tokens-per-second", "131000"))["impossible"] is False


def test_full_attention_above_the_peak_is_not_yet_impossible() -> None:
    document = answer(
        *("llama3-8b", "--seq-length", "131072", "--global-batch-size", "8", "--step-time", "240"),
        *("--devices", "1", "--device", "H100-SXM-80GB"),
    )
    assert document["mfu"]["causal"] < 0.9 < 1 < document["mfu"]["full_attention"]
    assert document["impossible"] is False


def test_a_figure_just_below_the_peak_is_not_believed() -> None:
    document = answer(*figure("9.4"))
    assert 0.9 < document["mfu"]["causal"] <= 1
    assert (document["impossible"], document["credible"]) == (False, False)
    assert document["verdict"].startswith("not credible")


def test_flops_beyond_64_bits_are_printed() -> None:
    document = answer(
        *("llama3-405b", "--seq-length", "131072", "--global-batch-size", "1024", "--step-time", "1000"),
        *("--devices", "16384", "--device", "H100-SXM-80GB"),
    )
    assert document["model_flops_per_step"]["causal"] > 2**64


def test_a_person_reads_the_error_in_words() -> None:
    result = CliRunner().invoke(command_line(), ["mfu", *figure("1.0")], catch_exceptions=False)
    assert result.exit_code == 0
    assert "ERROR impossible: MFU" in result.stdout
    assert "18N" in result.stdout


# --- bad input


@pytest.mark.parametrize(
    ("device", "candidates"),
    [("H100", ("H100-SXM-80GB", "H100-PCIe-80GB")), ("A101", ("A100-SXM-80GB", "TPU v4"))],
)
def test_an_ambiguous_or_unknown_device_is_refused_with_candidates(
    device: str, candidates: tuple[str, ...]
) -> None:
    message = refusal("llama2-7b", "--step-time", "1", "--device", device)
    assert all(candidate in message for candidate in candidates)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step-time", "1"), "there is no default peak"),
        (("--device", "H200"), "neither a step time nor tokens per second"),
        (("--step-time", "0", "--device", "H200"), "step time of 0.0"),
        (("--step-time", "nan", "--device", "H200"), "step time of nan"),
        (("--step-time", "1", "--devices", "0", "--device", "H200"), "number of devices of 0"),
        (("--step-time", "1", "--seq-length", "0", "--device", "H200"), "sequence length of 0"),
        (("--step-time", "1", "--global-batch-size", "-3", "--device", "H200"), "global batch size of -3"),
        (("--step-time", "1", "--device", "V100", "--dtype", "bf16"), "no trusted bf16 peak"),
        (("--step-time", "1", "--device", "H200", "--dtype", "int4"), "no dtype 'int4'"),
        (("--step-time", "1", "--device", "Ascend 910B1"), "--peak-flops"),
        (("--step-time", "1", "--device", "H200", "--recompute", "some"), "none, selective, full"),
        (("--step-time", "1", "--peak-flops", "-1"), "positive number"),
        (("model.hidden_size=4097", "--step-time", "1", "--device", "H200"), "4097 is not divisible"),
    ],
)
def test_bad_input_is_refused_with_what_would_be_right(arguments: tuple[str, ...], message: str) -> None:
    assert message in refusal("llama2-7b", *arguments)


def test_an_override_changes_the_shape() -> None:
    wider = answer(
        *("llama2-7b", "model.num_layers=64", "--seq-length", "4096", "--global-batch-size", "512"),
        *("--step-time", "14.6", "--devices", "32", "--device", "A100-SXM-80GB"),
    )
    assert wider["mfu"]["causal"] > 1.9 * answer(*figure("14.6"))["mfu"]["causal"]


def test_a_sequence_longer_than_the_presets_is_a_model_with_as_many_positions() -> None:
    document = answer(
        *("gpt2-124m", "--seq-length", "8192", "--global-batch-size", "8", "--step-time", "1"),
        *("--device", "H100-SXM-80GB"),
    )
    assert document["tokens_per_step"] == 65_536


@pytest.mark.parametrize(
    "arguments",
    [
        ("--step-time", "1e-320", "--peak-flops", "1e15"),
        ("--step-time", "1e-300", "--peak-flops", "1e-300"),
        ("--tokens-per-second", "1e-320", "--peak-flops", "1e15"),
        ("--step-time", "1", "--peak-flops", "1e15", "--devices", "9" * 400),
        ("--step-time", "1", "--peak-flops", "1e15", "--global-batch-size", "9" * 400),
        ("--step-time", "1", "--peak-flops", "1e15", "--seq-length", "9" * 400),
    ],
)
def test_figures_that_no_float_can_hold_are_refused_and_not_infinite(arguments: tuple[str, ...]) -> None:
    assert "the most is" in (message := refusal("llama2-7b", *arguments)) or "must be" in message


def test_the_document_stays_plain_json_at_the_bounds() -> None:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    for time_s, peak in (("1e-18", "1"), ("1e24", "1e24")):
        bounds = ("--seq-length", str(10**15), "--global-batch-size", str(10**15), "--devices", "1")
        arguments = ["mfu", "llama2-7b", "--step-time", time_s, "--peak-flops", peak, *bounds, "--json"]
        result = CliRunner().invoke(command_line(), arguments, catch_exceptions=False)
        json.loads(result.stdout, parse_constant=no_constant)
