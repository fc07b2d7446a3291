"""The ladder: profile, treat the largest class, measure, pass the gate, keep or discard, and again.

To be read from :meth:`Ladder.climb` down. Nothing here looks at a clock or at chance: what is decided follows from the
results of the pieces (:mod:`drivetrain.tune.pieces`), so that a ladder that is resumed decides as it would have.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.catalogue import Numerics, Optimisation, Setting, catalogue
from drivetrain.catalogue.rules import all_rules
from drivetrain.config import RunConfig, load_config, tokens_per_step, violations
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.tune.candidates import Candidate, account_of, illegal, survey
from drivetrain.tune.gate import TIERS
from drivetrain.tune.golden import golden_section
from drivetrain.tune.ladder_bench import Bench, Gate
from drivetrain.tune.ladder_moves import Estimate, choose_size, counted_bytes, memory_in_words
from drivetrain.tune.ladder_predictions import Predictions, write_prediction, write_score
from drivetrain.tune.ladder_records import (
    BASELINE_FILE,
    Kept,
    Rung,
    View,
    empty_step,
    fill,
    in_words,
    value_of,
)
from drivetrain.tune.ladder_settings import LadderSettings
from drivetrain.tune.ladder_top import Top
from drivetrain.tune.moves import Change, changed
from drivetrain.tune.trainer import Runner

__all__ = ["Ladder"]


class Ladder:
    """One ladder in its folder.

    Args:
        folder: of the tune; ``configs/000.toml`` in it is the baseline.
        settings: declared.
        runner: makes the runs.
        entries: pieces that are there already.
        save: writes the state; called after each finished piece and step.
        gate: None: the convergence gate, with its runs in the tune's archive.
        known: entries of the catalogue; None: all there are.
        missing: capability → None, or why this machine lacks it.
        estimate: what a step of a configuration needs; None: nobody can tell, and no move that must fit a memory limit
            is tried.
        say: told what happens, in lines.
    """

    def __init__(
        self,
        folder: Path,
        settings: LadderSettings,
        runner: Runner,
        *,
        entries: Sequence[dict[str, Any]] = (),
        save: Callable[["Ladder"], None] = lambda _ladder: None,
        gate: Gate | None = None,
        known: Iterable[Optimisation] | None = None,
        missing: Callable[[str], str | None] = lambda _capability: None,
        estimate: Estimate | None = None,
        say: Callable[[str], None] = lambda _message: None,
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.view = View()
        self._write_state = save
        self.bench = Bench(
            folder,
            settings,
            runner,
            entries=entries,
            save=self._save,
            gate=gate,
            estimate=estimate,
            say=say,
        )
        entries_known = catalogue() if known is None else known
        self._entries = [one for one in entries_known if not settings.only or one.name in settings.only]
        self._missing = missing
        self._say = say
        self._kept: list[Kept] = []
        self._predictions = Predictions(self.bench.facts)

    def _save(self) -> None:
        self._write_state(self)

    def climb(self) -> None:
        """The whole ladder; what it found is in :attr:`view`.

        Raises:
            ConfigurationError: the baseline breaks a rule.
            DrivetrainError: the baseline cannot be trained, or the budget does not hold one step.
        """
        baseline = self._start()
        current = baseline
        tried: set[str] = set()
        while (candidate := self._next(current, tried)) is not None:
            tried.add(candidate.key)
            if candidate.move is not None:
                current = self._try_move(current, candidate)
            elif candidate.knob is None:
                current = self._try_entry(current, candidate)
            else:
                current = self._search_knob(current, candidate)
            self._save()
        if self._kept:
            top = Top(self.bench, self.view, self._kept, baseline)
            if self.settings.leave_one_out:
                current = top.leave_one_out(current)
            # An entry and its knob's value may be all that was kept, and go together.
            if self._kept:
                top.finish(current)

    def _start(self) -> Rung:
        file = self.folder / BASELINE_FILE
        config = load_config(str(file)).config
        broken = violations(config, self.bench.facts, all_rules())
        if broken:
            raise ConfigurationError(*map(str, broken))
        self._say("baseline")
        profile = self.bench.profile(
            file, config, "baseline", timeout_s=self.settings.budget_s, keep_failure=False
        )
        self.view.baseline = profile.to_document(BASELINE_FILE)
        for name, why in profile.inactive.items():
            self.view.findings.append(f"{name} is requested and has no effect: {why}")
        self.bench.costs.learn_baseline(self.bench.journal.elapsed_s, profile.step_s, profile.steps_s)
        return Rung(file, config, profile)

    # -- which is next ------------------------------------------------------------------------------------------

    def _next(self, current: Rung, tried: set[str]) -> Candidate | None:
        found = survey(
            current.profile.classes,
            current.config,
            self.bench.facts,
            entries=self._entries,
            tried=tried,
            batch_rule=self.settings.batch_rule,
            missing=self._missing,
            active=lambda name: name not in current.profile.inactive,
        )
        for candidate in found.candidates:
            if self._fits(current, candidate):
                return candidate
        if found.candidates and not tried:
            self._refuse_budget(current, found.candidates)
        if found.candidates:
            names = ", ".join(one.key for one in found.candidates)
            self.view.findings.append(f"the budget left no room to try {names}")
        for name, why in found.rejected.items():
            if name not in tried:
                self.view.findings.append(f"{name} was not tried: {why}")
        return None

    def _fits(self, current: Rung, candidate: Candidate, growth: float = 1.0) -> bool:
        """Whether the step fits the budget, and then still the end of the ladder."""
        return self._estimate_s(current, candidate, growth) <= self.bench.left_s

    def _estimate_s(self, current: Rung, candidate: Candidate, growth: float = 1.0) -> float:
        costs, tier = self.bench.costs, candidate.numerics
        end_s = 0.0
        # With one entry switched on alone, its trial and gate can stand for those of the final configuration.
        if self._kept or candidate.knob is not None:
            end_s = costs.of_final_trial(current.config, growth) + costs.of_gate(self._strictest(tier))
        return costs.of_step(current.config, tier, growth) + end_s

    def _strictest(self, tier: Numerics) -> Numerics:
        return max([tier, *(kept.numerics for kept in self._kept)], key=TIERS.index)

    def _refuse_budget(self, current: Rung, candidates: Sequence[Candidate]) -> None:
        spent = self.bench.journal.elapsed_s
        least = spent + min(self._estimate_s(current, one) for one in candidates)
        raise DrivetrainError(
            f"--budget {self.settings.budget_s:.0f}s is too small for one trial: the baseline took {spent:.0f} s, and "
            f"the cheapest trial with its gate would bring it to {least:.0f} s; give --budget {math.ceil(least)}s or "
            f"more"
        )

    # -- one step -----------------------------------------------------------------------------------------------

    def _new_step(self, current: Rung, candidate: Candidate, change: Change) -> dict[str, Any]:
        step = empty_step(len(self.view.steps) + 1, candidate.entry.name, change, candidate.treats)
        step["classes_before"] = dict(current.profile.classes)
        self.view.steps.append(step)
        return step

    def _try_entry(self, current: Rung, candidate: Candidate) -> Rung:
        change = candidate.change
        assert change is not None
        self._say(f"{in_words(change)}, for {candidate.treats[0]}")
        step = self._new_step(current, candidate, change)
        write_prediction(
            step, self._predictions.of_entry(current, candidate.entry, changed(current.config, change))
        )
        config, file = self._measure(current, candidate, step, change)
        if not step.pop("faster"):
            return current
        return self._gate_and_keep(current, step, candidate, change, config, file)

    def _try_move(self, current: Rung, candidate: Candidate) -> Rung:
        move, limit_bytes = candidate.move, current.config.memory.device_memory_limit_bytes
        assert move is not None
        assert limit_bytes is not None
        size = choose_size(
            candidate.entry,
            move,
            current.config,
            Setting(self.bench.facts, self.settings.batch_rule),
            estimate=self.bench.needs,
            account=account_of(Path(current.profile.run)),
        )
        if isinstance(size, str):
            self.view.findings.append(f"{candidate.key} was not tried: {size}")
            return current
        larger = tokens_per_step(changed(current.config, size.change)) / tokens_per_step(current.config)
        if not self._fits(current, candidate, larger):
            self.view.findings.append(f"the budget left no room to try {in_words(size.change)}")
            return current
        self._say(f"{in_words(size.change)}, for {candidate.treats[0]}")
        step = self._new_step(current, candidate, size.change)
        step["move"] = move.name
        write_prediction(step, size.predicted)
        step["memory"] = size.memory_document(self.bench.needs(current.config), limit_bytes)
        config, file = self._measure(current, candidate, step, size.change)
        step["memory"]["counted_bytes"] = counted_bytes(step["blocks"])
        step["why"] += f"; {memory_in_words(step['memory'])}"
        if not step.pop("faster"):
            return current
        return self._gate_and_keep(current, step, candidate, size.change, config, file)

    def _measure(
        self, current: Rung, candidate: Candidate, step: dict[str, Any], change: Change
    ) -> tuple[RunConfig, Path]:
        """The trial of a step; ``faster`` is added to it."""
        before = self.bench.journal.device_seconds
        config = changed(current.config, change)
        file = self.bench.write(config)
        # A larger batch alone asks nothing of the entry whose move it is.
        asked = candidate.move is None or candidate.entry.requested(config)
        entry = candidate.entry.name if asked else None
        found = self.bench.trial(f"trial-{step['index']}", current, file, config, entry=entry)
        fill(step, found)
        write_score(step)
        step["faster"] = found["faster"]
        step["device_seconds"] += self.bench.journal.device_seconds - before
        self._save()
        self._say(f"  {found['why']}")
        return config, file

    def _gate_and_keep(
        self,
        current: Rung,
        step: dict[str, Any],
        candidate: Candidate,
        change: Change,
        config: RunConfig,
        file: Path,
    ) -> Rung:
        """Keep a change that was measured to be faster, if it passes its gate."""
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
                self._kept.append(
                    Kept(
                        step,
                        change,
                        takes_back=change.before(current.config),
                        entry=candidate.entry,
                        parent=current.file,
                        searched=candidate.knob is not None,
                        move=candidate.move,
                    )
                )
                refuted = profile.inactive.get(candidate.entry.name)
                if refuted is not None:
                    self.view.findings.append(
                        f"{in_words(change)} was kept, and has no effect in its own profile: {refuted}"
                    )
                rung = Rung(file, config, profile)
                self._say(f"  kept: {profile.step_s * 1e3:.1f} ms a step")
        step["device_seconds"] += self.bench.journal.device_seconds - before
        return rung

    def _search_knob(self, current: Rung, candidate: Candidate) -> Rung:
        knob = candidate.knob
        assert knob is not None
        start = float(value_of(current.config, knob.field))
        if not knob.low <= start <= knob.high:
            return current
        self._say(f"search of {knob.field} from {start:g}, for {candidate.treats[0]}")
        tries: dict[float, tuple[dict[str, Any], Change, RunConfig, Path]] = {}

        def measure(value: float) -> float | None:
            change = Change({knob.field: int(value) if knob.whole else value}, candidate.key)
            if illegal(current.config, change, self.bench.facts) is not None:
                return None
            if not self._fits(current, candidate):
                return None
            self._say(f"{in_words(change)}, for {candidate.treats[0]}")
            step = self._new_step(current, candidate, change)
            write_prediction(
                step, self._predictions.of_entry(current, candidate.entry, changed(current.config, change))
            )
            tries[value] = (step, change, *self._measure(current, candidate, step, change))
            measured: Mapping[str, float] | None = step["measured"]
            return None if measured is None else math.log(measured["ratio"])

        best, _ = golden_section(knob, start, measure, trials=self.settings.knob_trials)
        rung = current
        for value, (step, change, config, file) in tries.items():
            faster = step.pop("faster")
            if value != best:
                step["why"] += f"; the search went on to {knob.field} = {best:g}"
            elif faster:
                rung = self._gate_and_keep(current, step, candidate, change, config, file)
        return rung
