"""Loss curves of 200 steps in several layouts, each held against a single process by the gate's round-off tier.

The envelope comes from the single process, trained again three times from weights moved by one unit in the last place.
A layout passes when loss and gradient norm of every step, the mean loss of the last fifth, and each parameter's
gradient of step 1 stay inside it. Control: the same with gradients that are doubled on one rank, or averaged where they
should be summed, has to fail; the same way of starting ranks without harm has to pass.

``compare --gate`` does not compare runs of different world sizes, and is right: a user who changed a layout *and*
something else would get an answer to another question. Here the layout is the one thing that differs, so the world size
is declared as the change under test, and the tier's own function judges the evidence that it reads from the runs.

Finished runs are kept in ``--folder``, and a second call goes on from there.

    python benchmarks/layout_curves.py --json
    python benchmarks/layout_curves.py --quick --json
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.archive.atomic import write_json
from drivetrain.tune.gate import Evidence, Verdict
from drivetrain.tune.gate_files import read_evidence
from drivetrain.tune.gate_roundoff import round_off_gate
from harness.claims import Claim, document, wilson
from harness.layout_runs import LAYOUTS, LayoutRuns, Ranks, options_of

SINGLE = "one process"
WORLD_SIZE = "parallelism.data_parallel_size"
"""The leaf by which the gate knows that the world size is what was changed."""
DOUBLED, MEAN, NOTHING = "doubled-on-one-rank", "mean-over-ranks", "nothing"
MOST_ROOM = 1e6
"""Where nothing differs at all, the room is infinite, which JSON has no number for."""


@dataclass(frozen=True)
class Plan:
    """How much is done.

    Attributes:
        steps: of each run.
        layouts: held against the single process.
        harmed: (layout, harm) that must fail; with harm "nothing", must pass.
        perturbations: runs that make the envelope.
    """

    steps: int
    layouts: Sequence[str]
    harmed: Sequence[tuple[str, str]]
    perturbations: int = 3


_HELD_AGAINST_ONE = ("tp2", "pp2 1f1b", "dp2 zero3", "tp2 pp2", "dp4 hsdp")
FULL = Plan(
    steps=200,
    layouts=_HELD_AGAINST_ONE,
    harmed=[
        ("dp2 zero3", NOTHING),
        ("dp2 zero3", MEAN),
        ("dp4 hsdp", MEAN),
        ("tp2", DOUBLED),
        ("pp2 1f1b", DOUBLED),
        ("tp2 pp2", DOUBLED),
    ],
)
QUICK = Plan(steps=20, layouts=["dp2 zero3"], harmed=[("dp2 zero3", MEAN)])


@dataclass(frozen=True)
class Judged:
    """What the gate says of one layout.

    Attributes:
        layout: its name.
        harm: that was planted; None: the layout as it is.
        room: how often the largest difference fits into what is allowed, over all that is compared; below 1: outside.
    """

    layout: str
    harm: str | None
    verdict: Verdict
    room: float

    @property
    def is_sound(self) -> bool:
        """Whether it ought to pass."""
        return self.harm in (None, NOTHING)


def judge(
    layout: str, harm: str | None, baseline: Evidence, candidate: Evidence, perturbed: Sequence[Evidence]
) -> Judged:
    """Ask the round-off tier, and take the room from its numbers."""
    verdict = round_off_gate(baseline, candidate, perturbed)
    room = room_of(verdict)
    assert verdict.passed == (room >= 1), f"room {room} of {layout} contradicts the gate: {verdict.why}"
    return Judged(layout, harm, verdict, room)


def room_of(verdict: Verdict) -> float:
    """The least of limit / difference over all comparisons; 0 where nothing could be compared, or is no number."""
    if verdict.verdict not in ("pass", "fail"):
        return 0.0
    return min(_room(difference, limit) for difference, limit in _compared(verdict.numbers).values())


def _compared(numbers: Mapping[str, Any]) -> dict[str, tuple[float | None, float]]:
    """Comparison → (largest difference, limit)."""
    keys = {
        "loss": "worst",
        "log_grad_norm": "worst",
        "last_fifth": "mean",
        "gradient_cosine": "value",
        "gradient_norm": "value",
    }
    return {name: (numbers[name][key], numbers[name]["limit"]) for name, key in keys.items()}


def _room(difference: float | None, limit: float) -> float:
    if difference is None or not math.isfinite(difference):
        return 0.0
    return min(MOST_ROOM, limit / abs(difference)) if difference else MOST_ROOM


class Session:
    """The judgements of a plan over one folder of runs."""

    def __init__(self, runs: LayoutRuns, plan: Plan) -> None:
        self.runs = runs
        self.plan = plan
        self.judged: list[Judged] = []

    def run(self) -> None:
        """Everything that the plan holds."""
        single = LAYOUTS[SINGLE]
        baseline = self._evidence("single", single)
        perturbed = [
            self._evidence(f"single-ulp{seed}", single, options=("--perturb-ulp", str(seed)))
            for seed in range(1, self.plan.perturbations + 1)
        ]
        for layout, harm in [*((layout, None) for layout in self.plan.layouts), *self.plan.harmed]:
            word = layout.replace(" ", "-")
            name = word if harm is None else f"{word}-{harm}"
            candidate = self._evidence(name, LAYOUTS[layout], harm=harm)
            self._note(judge(layout, harm, baseline, candidate, perturbed))

    def _evidence(
        self, name: str, ranks: Ranks, *, options: Sequence[str] = (), harm: str | None = None
    ) -> Evidence:
        steps = [f"training.train_iters={self.plan.steps}"]
        run = self.runs.get(name, ranks, steps, options=["--probe", *options], harm=harm)
        return read_evidence(run, changed=[WORLD_SIZE])

    def _note(self, one: Judged) -> None:
        self.judged.append(one)
        harm = "" if one.harm is None else f", {one.harm}"
        print(
            f"{one.layout}{harm}: {one.verdict.verdict}, room {one.room:.3g}: {one.verdict.why}",
            file=sys.stderr,
            flush=True,
        )
        told = [
            {"layout": each.layout, "harm": each.harm, "room": each.room, **each.verdict.to_document()}
            for each in self.judged
        ]
        write_json(self.runs.folder / "judged.json", {"schema": 1, "judged": told})


def claims_of(judged: Sequence[Judged], plan: Plan, note: str) -> list[Claim]:
    """One of each sound layout, one of all planted harm."""
    claims = []
    for one in judged:
        if not one.is_sound:
            continue
        started = "" if one.harm is None else " started as the harmed ones, without harm"
        claims.append(
            _claim(
                f"{one.layout}{started}: {plan.steps} steps inside the envelope of {plan.perturbations} perturbed "
                "single processes; limit over the largest difference",
                (one.room, one.room, one.room),
                f"{one.verdict.verdict}: {one.verdict.why}. {_figures(one.verdict)}. {note}",
            )
        )
    harmed = [one for one in judged if not one.is_sound]
    if harmed:
        rejected = sum(one.verdict.verdict == "fail" for one in harmed)
        told = "; ".join(
            f"{one.layout}, {one.harm}: {one.verdict.verdict} (room {one.room:.2g})" for one in harmed
        )
        claims.append(
            _claim(
                f"planted harm that the same comparison rejects: {rejected} of {len(harmed)}",
                (rejected / len(harmed), *wilson(rejected, len(harmed))),
                f"{told}. {note}",
            )
        )
    return claims


def _claim(text: str, ratio: tuple[float, float, float], note: str) -> Claim:
    return Claim(text, "one process", "", [], [], *ratio, 1.0, note)


def _figures(verdict: Verdict) -> str:
    """The largest difference of each comparison over its limit."""
    if verdict.verdict not in ("pass", "fail"):
        return "nothing was compared"
    words = {
        "loss": "loss",
        "log_grad_norm": "log gradient norm",
        "last_fifth": "mean loss of the last fifth",
        "gradient_cosine": "1 - cosine of a gradient",
        "gradient_norm": "log norm ratio of a gradient",
    }
    found = []
    for name, (difference, limit) in _compared(verdict.numbers).items():
        step = (
            f" at step {verdict.numbers[name]['worst_at_step']}"
            if "worst_at_step" in verdict.numbers[name]
            else ""
        )
        size = "not finite" if difference is None else f"{abs(difference):.2g}"
        found.append(f"{words[name]} {size} of {limit:.2g} allowed{step}")
    return "; ".join(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options = options_of(
        arguments, name="layout-curves", description=__doc__, quick="one layout, one harm, 20 steps"
    )
    plan = QUICK if options.quick else FULL
    session = Session(LayoutRuns(options.folder), plan)
    session.run()
    if options.json:
        print(document(claims_of(session.judged, plan, session.runs.note())))


if __name__ == "__main__":
    main()
