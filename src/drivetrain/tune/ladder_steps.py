"""One step of a ladder: a change that is tried against its parent, gated where it is better, and kept or discarded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.catalogue import Numerics
from drivetrain.config import RunConfig
from drivetrain.errors import DrivetrainError
from drivetrain.measure.optimisation import NoPrediction, Prediction
from drivetrain.tune.candidates import Candidate
from drivetrain.tune.gate import TIERS
from drivetrain.tune.goals import Goal, kept_speed
from drivetrain.tune.ladder_bench import Bench
from drivetrain.tune.ladder_predictions import Predictions, write_prediction, write_score
from drivetrain.tune.ladder_records import Kept, Rung, View, empty_step, fill, in_words
from drivetrain.tune.moves import Change, changed

__all__ = ["Steps"]


class Steps:
    """Makes steps, and knows what was kept.

    Attributes:
        bench: makes the pieces.
        view: is written to.
        kept: the changes that are part of the configuration, in their order.
    """

    def __init__(self, bench: Bench, view: View) -> None:
        self.bench = bench
        self.view = view
        self.kept: list[Kept] = []
        self._predictions: dict[int, Predictions] = {}

    # -- budget -------------------------------------------------------------------------------------------------

    def fits(
        self,
        current: Rung,
        candidate: Candidate,
        growth: float = 1.0,
        after: RunConfig | None = None,
    ) -> bool:
        """Whether the step fits the budget, and then still the end of the ladder.

        Args:
            growth: tokens of the candidate's step over those of its parent's.
            after: the candidate's configuration, whose runs may be longer (more batches ready ahead); None: as now.
        """
        return self.estimate_s(current, candidate, growth, after) <= self.bench.left_s

    def estimate_s(
        self,
        current: Rung,
        candidate: Candidate,
        growth: float = 1.0,
        after: RunConfig | None = None,
    ) -> float:
        """Seconds of the step and of the end of the ladder after it."""
        config = current.config if after is None else after
        own_s = self.bench.costs.of_step(config, candidate.numerics, growth)
        return own_s + self.end_s(config, candidate, growth)

    def end_s(self, config: RunConfig, candidate: Candidate, growth: float = 1.0) -> float:
        """Seconds of the final trial and its gate, if ``candidate`` is kept.

        With one change switched on alone, its trial and gate can stand for those of the final configuration.
        """
        if not self.kept and candidate.knob is None:
            return 0.0
        return self.whole_end_s(config, candidate, growth)

    def whole_end_s(self, config: RunConfig, candidate: Candidate, growth: float = 1.0) -> float:
        """The same, whatever can stand for it."""
        costs = self.bench.costs
        gate_s = costs.of_gate(self.strictest(candidate.numerics))
        return costs.of_final_trial(config, growth) + gate_s

    def strictest(self, tier: Numerics) -> Numerics:
        """The strictest gate of what is kept, and ``tier``."""
        return max([tier, *(kept.numerics for kept in self.kept)], key=TIERS.index)

    # -- one step -----------------------------------------------------------------------------------------------

    def begin(self, current: Rung, candidate: Candidate, change: Change) -> dict[str, Any]:
        """A new step of the view, of which nothing is measured yet."""
        self.bench.say(f"{in_words(change)}, for {candidate.treats[0]}")
        step = empty_step(len(self.view.steps) + 1, candidate.name, change, candidate.treats)
        step["move"] = candidate.move_name
        step["classes_before"] = dict(current.profile.classes)
        self.view.steps.append(step)
        return step

    def predict(self, current: Rung, candidate: Candidate, step: dict[str, Any], change: Change) -> None:
        """Lay over a step what is expected of it."""
        write_prediction(step, self._expected(current, candidate, changed(current.config, change)))

    def _expected(self, current: Rung, candidate: Candidate, after: RunConfig) -> Prediction | NoPrediction:
        if candidate.layout is not None:
            return candidate.layout.expected
        if len(candidate.names) > 1:
            return NoPrediction("models are of one optimisation at a time, and two change")
        assert candidate.entry is not None
        facts = self.bench.facts_of(current.config)
        known = self._predictions.setdefault(facts.world_size, Predictions(facts))
        return known.of_entry(current, candidate.entry, after)

    @property
    def goal(self) -> Goal:
        """What the next trial is judged by: what is kept has used up, or won, some of the speed that may be lost."""
        return self.bench.goal.after(kept_speed([one.step for one in self.kept]))

    def measure(
        self, current: Rung, candidate: Candidate, step: dict[str, Any], change: Change
    ) -> tuple[RunConfig, Path]:
        """The trial of a step; ``faster`` is added to it."""
        before = self.bench.journal.device_seconds
        config = changed(current.config, change)
        file = self.bench.write(config)
        found = self.bench.trial(
            f"trial-{step['index']}",
            current,
            file,
            config,
            entry=candidate.must_be_active(config),
            goal=self.goal,
        )
        fill(step, found)
        write_score(step, self.goal.name)
        step["faster"] = found["faster"]
        step["device_seconds"] += self.bench.journal.device_seconds - before
        self.bench.save()
        self.bench.say(f"  {found['why']}")
        return config, file

    def gate_and_keep(
        self,
        current: Rung,
        step: dict[str, Any],
        candidate: Candidate,
        change: Change,
        made: tuple[RunConfig, Path],
    ) -> Rung:
        """Keep a change that was measured to be better, if it passes its gate.

        Args:
            made: of :meth:`measure`.

        Returns:
            The configuration that the ladder goes on from.
        """
        config, file = made
        before = self.bench.journal.device_seconds
        index = step["index"]
        verdict = self.bench.gate(f"gate-{index}", current, file, config, candidate.numerics)
        step["gate"] = {key: verdict[key] for key in ("tier", "verdict", "why")}
        rung = current
        if verdict["verdict"] != "pass":
            step["why"] += f"; discarded: its gate says {verdict['verdict']}: {verdict['why']}"
        else:
            try:
                profile = self.bench.profile(file, config, f"profile-{index}")
            except DrivetrainError as error:
                step["why"] += f"; discarded: {error}"
            else:
                step["kept"] = True
                step["classes_after"] = dict(profile.classes)
                self.kept.append(_kept(current, step, candidate, change))
                self._note_refuted(candidate.names, change, profile.inactive)
                rung = Rung(file, config, profile)
                self.bench.say(f"  kept: {profile.step_s * 1e3:.1f} ms a step")
        step["device_seconds"] += self.bench.journal.device_seconds - before
        return rung

    def _note_refuted(self, names: Sequence[str], change: Change, inactive: Any) -> None:
        for name in names:
            if name in inactive:
                self.view.findings.append(
                    f"{in_words(change)} was kept, and has no effect in its own profile: {inactive[name]}"
                )


def _kept(current: Rung, step: dict[str, Any], candidate: Candidate, change: Change) -> Kept:
    return Kept(
        step,
        change,
        takes_back=change.before(current.config),
        entry=candidate.entry,
        parent=current.file,
        searched=candidate.knob is not None,
        move=candidate.move,
        numerics=candidate.numerics,
        summary=candidate.summary,
    )
