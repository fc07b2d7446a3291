"""The logic of ``benchmarks/operators.py``; its times are not looked at."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

import operators
from harness.claims import verdict
from harness.elementwise_workloads import IN_WORDS, TARGETS, build
from harness.sides import Sides


def measured(ours: list[float], theirs: list[float], target: float) -> operators.Measured:
    sides = {"ours": ours, "theirs": theirs}
    return operators.Measured("SwiGLU", "torch eager", target, "two tokens", sides, sides, sides, "2.13")


def sides(ours: torch.Tensor, theirs: torch.Tensor) -> Sides:
    return Sides("a workload", lambda: (ours,), lambda: (theirs,), 0.0, "")


def test_the_measuring_process_starts_with_mallocs_settings_for_both_sides() -> None:
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=operators.environment({"PATH": "/bin", "OMP_NUM_THREADS": "7"}),
        capture_output=True,
        text=True,
        check=True,
    )
    seen = json.loads(done.stdout)
    assert seen["MALLOC_MMAP_MAX_"] == "0"
    assert int(seen["MALLOC_TRIM_THRESHOLD_"]) > 2**33
    assert seen["OMP_NUM_THREADS"] == "1"
    assert seen["PATH"] == "/bin"


def test_measuring_without_mallocs_settings_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    with pytest.raises(AssertionError, match="MALLOC_MMAP_MAX_"):
        operators.run_all(tmp_path / "result.json", operators.PACES["quick"], [], 1)


def test_a_workload_that_is_claimed_is_won_or_lost_and_one_without_target_is_information() -> None:
    won, cpu = operators.claims_of([measured([1.0, 1.0], [2.1, 2.1], 2.0)])
    assert (verdict(won), verdict(cpu)) == ("won", "information")
    assert "at most 1/2 of the peer's" in won.claim
    lost, _ = operators.claims_of([measured([1.0, 1.0], [1.9, 1.9], 2.0)])
    assert verdict(lost) == "lost"
    told, _ = operators.claims_of([measured([1.0, 1.0], [0.8, 0.8], 0.0)])
    assert verdict(told) == "information"
    assert told.note.startswith("for information")
    assert told.ratio == pytest.approx(0.8)


def test_claims_are_those_that_were_promised() -> None:
    assert TARGETS == {
        ("add_rms_norm", "float32"): 2.2,
        ("add_rms_norm", "bfloat16"): 3.5,
        ("glu", "float32"): 2.0,
        ("glu", "bfloat16"): 2.0,
        ("rotary", "float32"): 2.0,
        ("rotary", "bfloat16"): 2.0,
    }
    assert set(operators.QUICK) <= set(operators.WORKLOADS)
    for what, dtype in TARGETS:
        assert f"{what} {dtype}" in operators.WORKLOADS


def test_sides_that_compute_something_else_are_not_compared() -> None:
    right = torch.randn(64, 8)
    operators.require_same_results(sides(right, right * (1 + 1e-7)))
    with pytest.raises(operators.DifferentResultsError, match="result 0 differs"):
        operators.require_same_results(sides(right, right * 1.01))
    with pytest.raises(operators.DifferentResultsError):
        operators.require_same_results(sides(right * torch.nan, right))


def test_turns_are_interleaved_so_that_drift_hits_both_sides(monkeypatch) -> None:
    order: list[str] = []
    one = torch.ones(2)

    def side(name: str):
        def call() -> tuple[torch.Tensor]:
            order.append(name)
            return (one,)

        return call

    monkeypatch.setattr(operators, "wait_until_quiet", lambda **_: 0.0)
    pace = operators.Pace(calls=1, rounds=2, patience_s=0.0, attempts=1)
    found = operators.measure(Sides("x", side("a"), side("b"), 0.0, ""), pace, 1)
    turns = order[4::2]
    assert turns == ["a", "b", "b", "a"] * 2
    assert {name: len(times) for name, times in found.times.items()} == {"ours": 4, "theirs": 4}


def test_a_disturbed_turn_is_repeated(monkeypatch) -> None:
    shares = iter([0.5, 0.4, 0.0])
    monkeypatch.setattr(operators, "wait_until_quiet", lambda **_: 0.0)
    monkeypatch.setattr(operators, "foreign_share", lambda *_: next(shares))
    calls: list[int] = []
    pace = operators.Pace(calls=2, rounds=1, patience_s=0.0, attempts=3)
    assert operators.quiet_turn(lambda: calls.append(1), pace, 1)[2] == 0.0
    assert len(calls) == 9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", list(IN_WORDS))
def test_both_sides_of_every_workload_are_as_described(what: str, dtype: str, monkeypatch) -> None:
    """With eager in the place of compiled code, which takes seconds each: the numerics of that are tested elsewhere."""
    from drivetrain.engine.ops.discovery import operator_named

    operator = operator_named(what.split()[0])
    eager = operator.backend("eager")
    assert eager is not None
    monkeypatch.setattr(type(operator), "backend", lambda *_: dataclasses.replace(eager, name="inductor"))
    made = build(what, dtype, 3)
    assert made.target == TARGETS.get((what, dtype), 0.0)
    assert "3 tokens" in made.note
    if made.same_results:
        operators.require_same_results(made)
    ours, theirs = made.ours(), made.theirs()
    assert [(one.shape, one.dtype) for one in ours] == [(one.shape, one.dtype) for one in theirs]
    assert all(bool(one.isfinite().all()) and bool(one.any()) for one in (*ours, *theirs))


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_the_quick_benchmark_prints_one_document() -> None:
    script = operators.__file__
    done = subprocess.run(
        [sys.executable, script, "--quick", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=1700,
    )
    claims = json.loads(done.stdout)["claims"]
    # Time and CPU time of each, and the live bytes of attention and of the loss.
    assert len(claims) == 2 * len(operators.QUICK) + 2
    assert all(claim["ratio"] > 0 for claim in claims)
