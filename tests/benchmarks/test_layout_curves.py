"""The benchmark of loss curves: what it plants, what it reads from the gate's numbers, and what it claims of them."""

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import layout_curves
from drivetrain.config import LaunchFacts, load_config, violations
from drivetrain.engine.step import Stepper
from drivetrain.tune.gate import Evidence, Leak, Point, Verdict
from drivetrain.tune.gate_files import ENVIRONMENT_OF_LEAF
from harness.claims import verdict
from harness.layout_runs import LAYOUTS, LayoutRuns
from harness.packed_text import MODULES, functions_of
from harness.planted_rank import RANK_HARMS, planted
from layout_curves import (
    DOUBLED,
    FULL,
    MEAN,
    MOST_ROOM,
    NOTHING,
    QUICK,
    Plan,
    Session,
    claims_of,
    judge,
    room_of,
)

STEPS = 20


def evidence(name: str, noise: float = 0.0, gradient: float = 1.0, **changes: Any) -> Evidence:
    draw = np.random.default_rng(len(name))
    points = tuple(
        Point(
            100 * step, 5.0 - step / 10 + noise * draw.standard_normal(), 1.0 + noise * draw.standard_normal()
        )
        for step in range(1, STEPS + 1)
    )
    values = np.linspace(-1, 1, 50, dtype=np.float32)
    moved = (gradient * (values + noise * draw.standard_normal(50))).astype(np.float32)
    made = Evidence(
        name=name,
        end="finished",
        reason="",
        points=points,
        environment={"torch": "2"},
        dataset="a",
        seed=1,
        data_seed=1,
        deterministic=True,
        epsilon=2.0**-23,
        leak=Leak("clean", "no loss moved"),
        gradients=lambda: {"weight": moved},
    )
    return replace(made, **changes)


PERTURBED = [evidence("u" * count, 1e-5) for count in range(2, 5)]


def test_every_layout_that_is_named_obeys_the_rules(tmp_path: Path) -> None:
    names = {*FULL.layouts, *QUICK.layouts, *(layout for layout, _ in (*FULL.harmed, *QUICK.harmed))}
    assert names <= LAYOUTS.keys()
    assert len(FULL.layouts) >= 4
    assert FULL.steps == 200
    sizes = ["training.micro_batch_size=2", "training.global_batch_size=8", "model.num_query_groups=2"]
    for ranks in LAYOUTS.values():
        config = load_config("llama-2m", [*sizes, *ranks.overrides]).config
        assert violations(config, LaunchFacts(ranks.count)) == []


def test_the_world_size_is_what_is_declared_as_changed() -> None:
    assert ENVIRONMENT_OF_LEAF[layout_curves.WORLD_SIZE] == "world size"


def test_a_layout_inside_the_envelope_has_room_and_one_outside_has_none() -> None:
    baseline = evidence("b")
    near = judge("tp2", None, baseline, evidence("near", 5e-6), PERTURBED)
    assert near.verdict.passed
    assert 1 <= near.room < 20
    far = judge("tp2", None, baseline, evidence("far", 1e-3), PERTURBED)
    assert far.verdict.verdict == "fail"
    assert 0 < far.room < 0.1
    assert judge("tp2", None, baseline, evidence("b"), PERTURBED).room == MOST_ROOM


def test_a_gradient_that_is_doubled_is_outside_although_the_losses_agree() -> None:
    harmed = judge("tp2", DOUBLED, evidence("b"), evidence("near", 5e-6, gradient=2.0), PERTURBED)
    assert harmed.verdict.verdict == "fail"
    assert harmed.room < 1e-3


def test_what_was_not_compared_has_no_room() -> None:
    assert room_of(Verdict("round-off", "inconclusive", "too short")) == 0
    other = judge("tp2", None, evidence("b"), evidence("near", 5e-6, environment={"torch": "1"}), PERTURBED)
    assert (other.verdict.verdict, other.room) == ("not comparable", 0)


def test_a_loss_that_is_no_number_has_no_room() -> None:
    sick = evidence("near", 5e-6)
    points = (*sick.points[:-1], replace(sick.points[-1], loss=float("nan")))
    assert judge("tp2", None, evidence("b"), replace(sick, points=points), PERTURBED).room == 0


def test_claims_are_won_by_layouts_that_pass_and_harm_that_fails() -> None:
    near, far = evidence("near", 5e-6), evidence("far", 1e-3)
    judged = [
        judge("tp2", None, evidence("b"), near, PERTURBED),
        judge("dp2 zero3", NOTHING, evidence("b"), near, PERTURBED),
        judge("dp2 zero3", MEAN, evidence("b"), far, PERTURBED),
        judge("tp2", DOUBLED, evidence("b"), near, PERTURBED),
    ]
    sound, started, control = claims_of(judged, FULL, "a note")
    assert [verdict(one) for one in (sound, started, control)] == ["won", "won", "lost"]
    assert "at step" in sound.note
    assert control.ratio == 0.5
    lost, _ = claims_of([judge("tp2", None, evidence("b"), far, PERTURBED), judged[2]], FULL, "a note")
    assert verdict(lost) == "lost"


def stepper(rank: int, dp: int = 4) -> Any:
    held = {"a": SimpleNamespace(tensor=torch.ones(3)), "b": SimpleNamespace(tensor=torch.full((2,), 3.0))}
    return SimpleNamespace(
        group=SimpleNamespace(ranks=SimpleNamespace(rank=rank)),
        mesh=SimpleNamespace(size=lambda dim: {"dp": dp}[dim]),
        sync=SimpleNamespace(gradients=lambda: held),
        held=held,
    )


@pytest.mark.parametrize(
    ("harm", "rank", "factor"),
    [
        (NOTHING, 1, 1.0),
        (DOUBLED, 0, 1.0),
        (DOUBLED, 1, 2.0),
        (DOUBLED, 2, 1.0),
        (MEAN, 0, 0.25),
        (MEAN, 3, 0.25),
    ],
)
def test_a_harm_scales_the_gradients_it_says(harm: str, rank: int, factor: float) -> None:
    one = stepper(rank)
    RANK_HARMS[harm](one)
    assert one.held["a"].tensor.tolist() == [factor] * 3
    assert one.held["b"].tensor.tolist() == [3 * factor] * 2


def test_a_planted_step_does_its_harm_before_the_gradients_are_kept_and_only_for_its_block() -> None:
    before, kept = Stepper.step, []

    def step(self: Any, batches: Any, *, on_gradients: Callable[[], None], stop_requested: bool) -> str:
        on_gradients()
        return "figures"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "step", step)
        one = stepper(1)
        with planted(DOUBLED):
            keep = lambda: kept.append(one.held["a"].tensor.tolist())  # noqa: E731
            figures = Stepper.step(one, [], on_gradients=keep, stop_requested=False)  # type: ignore[call-arg]
        assert Stepper.step is step
    assert figures == "figures"
    assert kept == [[2.0, 2.0, 2.0]]
    assert Stepper.step is before


def test_documents_are_functions_and_methods_with_their_bodies() -> None:
    source = "import a\n\ndef one():\n    return 1\n\nclass B:\n    x = 1\n    async def two(self):\n        pass\n"
    assert list(functions_of(source)) == [
        "def one():\n    return 1\n",
        "    async def two(self):\n        pass\n",
    ]
    library = Path(ast.__file__).parent
    assert all((library / f"{module}.py").is_file() for module in MODULES)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_a_layout_passes_and_the_same_layout_with_a_mean_instead_of_a_sum_fails(tmp_path: Path) -> None:
    plan = Plan(steps=20, layouts=["dp2 zero3"], harmed=[("dp2 zero3", MEAN), ("dp2 zero3", NOTHING)])
    session = Session(LayoutRuns(tmp_path), plan)
    session.run()
    assert [one.verdict.verdict for one in session.judged] == ["pass", "fail", "pass"]
    again = Session(LayoutRuns(tmp_path), plan)
    again.runs.arguments = None  # type: ignore[method-assign, assignment] - whatever would train fails
    again.run()
    assert [one.room for one in again.judged] == [one.room for one in session.judged], (
        "finished runs are kept"
    )
