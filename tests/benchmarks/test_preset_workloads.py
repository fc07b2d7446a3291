"""The benchmark of a preset's calls as tuned: who serves on each side, and that both compute the same."""

from collections.abc import Mapping
from typing import Any

import pytest

import operators
from harness import preset_workloads
from harness.claims import verdict
from harness.preset_workloads import TunedCalls, tuned_against, tuned_calls
from harness.sides import Sides

TINY = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.ffn_hidden_size=48",
    "model.seq_length=16",
    "model.vocab_size=300",
    "training.micro_batch_size=2",
    "training.global_batch_size=4",
    "training.eval_iters=0",
    "data.reset_attention_mask=false",
    "run.device=cpu",
    "run.num_threads=1",
)
QUICK = {"joined", "transposed_gradient", "chunked"}


def answer(request: Mapping[str, Any], *, limit_s: float) -> Any:
    """As the tuner's processes would: what :data:`QUICK` names takes half the time, and all is right."""
    from drivetrain.engine.ops_tuning.processes import Answer

    if request["do"] == "time":
        seconds = {name: [0.5 if name in QUICK else 1.0] * 7 for name in request["backends"]}
        return Answer({"seconds": seconds, "problems": {}}, None, False, 0.1)
    return Answer({"problems": [], "measured": [], "peak_bytes": None}, None, False, 0.1)


def tuned(ask: Any = answer) -> TunedCalls:
    from drivetrain.engine.ops_tuning.session import Settings

    return tuned_calls("llama-2m", TINY, Settings(budget_s=600.0, ask=ask))


@pytest.fixture(scope="module")
def small() -> TunedCalls:
    return tuned()


def by_operator(calls: TunedCalls) -> dict[str, tuple[int, set[str]]]:
    found: dict[str, tuple[int, set[str]]] = {}
    for call, times, backend in calls.calls:
        count, names = found.get(call.operator.name, (0, set()))
        found[call.operator.name] = (count + times, names | {backend})
    return found


def test_each_call_of_a_micro_batch_is_made_by_what_was_tuned(small: TunedCalls) -> None:
    found = by_operator(small)
    assert found["qkv_product"] == (2, {"joined"})
    assert found["linear"] == (4, {"transposed_gradient"})
    assert found["rotary"] == (4, {"eager"})
    assert found["linear_cross_entropy"] == (1, {"chunked"})
    gaps = {
        call.operator.name
        for call, _, _ in small.calls
        if any(not one.contiguous for _, one in call.signature.arguments)
    }
    assert gaps == {"rotary", "attention", "glu"}, "as the joined products leave their results"


def test_both_sides_compute_the_same_and_theirs_is_the_peer_wherever_it_serves(small: TunedCalls) -> None:
    sides = tuned_against("eager", small, "tiny")
    operators.require_same_results(sides)
    assert (sides.target, sides.no_slower) == (1.0, True)
    count = sum(times for _, times, _ in small.calls)
    assert sides.name == f"all {count} operator calls of a micro-batch of tiny"
    assert "; as tuned: " in sides.note
    assert "4 by transposed_gradient" in sides.note
    assert {f"preset {peer}" for peer in preset_workloads.PEERS} <= set(operators.WORKLOADS)


def test_a_tuned_choice_that_computes_something_else_is_found_out(
    small: TunedCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    call, times, _ = next(one for one in small.calls if one[0].operator.name == "glu")
    eager = call.operator.backend("eager")
    assert eager is not None
    wrong = replace(eager, name="wrong", call=lambda **given: eager.call(**given) * 1.5)
    planted = replace(call, operator=replace(call.operator, backends=(eager, wrong), untuned={}))
    with pytest.raises(operators.DifferentResultsError):
        operators.require_same_results(tuned_against("eager", TunedCalls([(planted, times, "wrong")])))


def test_what_could_not_be_tuned_is_no_benchmark() -> None:
    def nothing_is_right(request: Mapping[str, Any], *, limit_s: float) -> Any:
        from drivetrain.engine.ops_tuning.processes import Answer

        return Answer({"problems": ["wrong"], "measured": [], "peak_bytes": None}, None, False, 0.1)

    with pytest.raises(RuntimeError, match="was not tuned: failed"):
        tuned(nothing_is_right)


def test_no_slower_is_claimed_within_the_least_effect_that_counts() -> None:
    def claim(ours: list[float], theirs: list[float]) -> operators.Claim:
        times = {"ours": ours, "theirs": theirs}
        found = operators.Measured("all", "eager", 1.0, "", times, times, times, "2.13", no_slower=True)
        return operators.claims_of([found])[0]

    steady = claim([1.0] * 4, [0.995] * 4)
    assert (verdict(steady), steady.target) == ("won", 0.99)
    assert "but for the 1.0% below which" in steady.claim
    assert verdict(claim([1.0] * 4, [0.98] * 4)) == "lost"
    # Every other turn 4% apart: twice that may be noise.
    noisy = claim([1.0, 1.04, 1.0, 1.04], [0.95] * 4)
    assert noisy.target == pytest.approx(0.92, abs=1e-6)
    assert verdict(noisy) == "won"


def test_sides_claim_a_ratio_unless_they_say_otherwise() -> None:
    assert not Sides("x", lambda: (), lambda: (), 2.0, "").no_slower
