"""``benchmarks/memory.py``: the limit and what runs under it, and what is made of measured times and bytes."""

from collections.abc import Sequence
from typing import Any

import pytest

import memory
from drivetrain.catalogue import StepEstimate
from drivetrain.config import load_config
from drivetrain.errors import ConfigurationError
from drivetrain.measure.parameters import parameter_count
from harness.claims import Claim, verdict
from harness.lanes import Block, Done
from harness.session import Ran

PRESET = "llama-2m"
LENGTH = 256


def needs(_preset: str, batch: int, settings: Sequence[str]) -> StepEstimate:
    """100 bytes and 100 a sequence; a budget fits its limit down to 50 a sequence, whole layers take 60."""
    given = dict(one.split("=") for one in settings)
    granularity = given.get("memory.recompute_granularity", "none")
    limit = int(given.get("memory.budget_bytes", given.get("memory.device_memory_limit_bytes", 10**9)))
    if granularity == "none":
        return StepEstimate(100 + 100 * batch, 0, "")
    if granularity == "full":
        return StepEstimate(100 + 60 * batch, 900, "6 x all")
    if 100 + 50 * batch > limit:
        raise ConfigurationError("whatever is recomputed, too much is alive at once")
    return StepEstimate(min(limit, 100 + 100 * batch), 100 * batch, "3 x norm")


@pytest.fixture(autouse=True)
def nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "needs_of", needs)
    monkeypatch.setattr(
        memory, "same_plan", lambda _preset, _batch, budget, _limit: (*budget, "memory.budget_bytes=400")
    )
    monkeypatch.setattr(memory, "refuse_larger_plain", lambda *_: "live bytes above the limit")


def played(monkeypatch: pytest.MonkeyPatch, step_s: dict[str, float], counted: dict[str, int]) -> None:
    def session(_preset: str, rows: Sequence[Any], *_: Any) -> Any:
        done = Done(1, 1, [1.0], 1, [0.0])
        ran = {
            row.name: Ran(row.name, [Block([step_s[row.name[0]]] * 3, 0.0) for _ in range(4)], done)
            for row in rows
        }
        return ran, {row.name: row for row in rows}

    monkeypatch.setattr(memory, "session", session)
    monkeypatch.setattr(memory, "counted_bytes", lambda row: counted.get(row.name[0], row.needs.peak_bytes))


def test_the_limit_lets_a_plain_step_have_four_sequences_and_not_five() -> None:
    rows, limit = memory.lanes_of(PRESET, 16)
    assert limit == 550
    by_letter = {row.name[0]: row for row in rows}
    assert by_letter["A"].batch == by_letter["B"].batch == 4
    assert by_letter["C"].batch == 9, "100 + 50 x 9 is the limit"
    assert by_letter["E"].batch == 5
    assert "D" not in by_letter, "whole layers of nine sequences do not fit, and are not run"
    assert all(row.needs.peak_bytes <= limit for row in rows)


def test_a_model_whose_recomputation_frees_too_little_for_a_sequence_ends_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def little(preset: str, batch: int, settings: Sequence[str]) -> StepEstimate:
        if any("budget" in one for one in settings):
            raise ConfigurationError("too much is alive at once")
        return needs(preset, batch, settings)

    monkeypatch.setattr(memory, "needs_of", little)
    with pytest.raises(SystemExit, match="no recomputation makes room for a batch of 5"):
        memory.lanes_of(PRESET, 16)


def trade(monkeypatch: pytest.MonkeyPatch, c_step_s: float, counted: dict[str, int]) -> dict[str, Claim]:
    played(monkeypatch, {"A": 0.4, "B": 0.5, "C": c_step_s, "E": 0.6}, counted)
    claims = memory.recompute_part(PRESET, memory.QUICK, 16, None)
    return {
        claim.claim.split(": ")[1][0] if "tokens/s" in claim.claim else "bytes": claim for claim in claims
    }


def test_tokens_a_second_are_compared_and_not_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trade(monkeypatch, 0.75, {})
    assert found["C"].ratio == pytest.approx((0.4 / 4) / (0.75 / 9))
    assert found["C"].a[0] == pytest.approx(0.75 / (9 * LENGTH))
    assert verdict(found["C"]) == "won"
    assert found["B"].ratio == pytest.approx(0.4 / 0.5)
    assert verdict(found["B"]) == "information"


def test_a_trade_that_does_not_pay_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(trade(monkeypatch, 0.9, {})["C"]) == "lost"
    assert verdict(trade(monkeypatch, 1.1, {})["C"]) == "lost"


def test_a_prediction_off_by_more_than_three_percent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(trade(monkeypatch, 0.9, {"B": 396})["bytes"]) == "won"
    assert verdict(trade(monkeypatch, 0.9, {"B": 380})["bytes"]) == "lost"


def test_offload_has_a_price_by_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {"offloaded 0%": 0.40, "offloaded 100%": 0.43}

    def session(_preset: str, rows: Sequence[Any], *_: Any) -> Any:
        done = Done(1, 1, [1.0], 1, [0.0])
        ran = {
            row.name: Ran(row.name, [Block([steps[row.name]] * 3, 0.0) for _ in range(4)], done)
            for row in rows
        }
        return ran, {row.name: row.name for row in rows}

    moved = {"offloaded 0%": 0.0, "offloaded 100%": 20e6}
    monkeypatch.setattr(memory, "session", session)
    monkeypatch.setattr(
        memory, "offloaded", lambda run, what, _: moved[run] if what == "moved_bytes" else 0.001
    )
    step, link = memory.offload_part(PRESET, memory.QUICK, (0.0, 1.0), None)
    assert step.ratio == pytest.approx(0.40 / 0.43)
    assert "10,000,000 bytes live on the host" in step.note
    assert "3 s a step and GB" in step.note
    elements = parameter_count(load_config(PRESET).config.model).total
    assert link.ratio == pytest.approx(16 * elements / 20e6)
    assert verdict(link) == "won"
