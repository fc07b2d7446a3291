"""The ladder: profile, treat the largest class, measure, pass the gate, keep or discard, and again.

To be read from :meth:`Ladder.climb` down. Nothing here looks at a clock or at chance: what is decided follows from the
results of the pieces (:mod:`drivetrain.tune.pieces`), so that a ladder that is resumed decides as it would have.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.catalogue import Optimisation, Setting, catalogue
from drivetrain.catalogue.rules import all_rules
from drivetrain.config import load_config, tokens_per_step, violations
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.tune.budget_plan import plan_document, plan_lines
from drivetrain.tune.candidates import Candidate, Survey, account_of, survey
from drivetrain.tune.joint_search import JointSampler, optuna_sampler, optuna_version
from drivetrain.tune.ladder_bench import Bench, Gate
from drivetrain.tune.ladder_moves import Estimate, choose_size, counted_bytes, memory_in_words
from drivetrain.tune.ladder_predictions import write_prediction
from drivetrain.tune.ladder_records import BASELINE_FILE, Rung, View, in_words
from drivetrain.tune.ladder_search import KnobSearch
from drivetrain.tune.ladder_settings import LadderSettings
from drivetrain.tune.ladder_steps import Steps
from drivetrain.tune.ladder_top import Top
from drivetrain.tune.layouts import LayoutProposal, processes_of, propose_layouts
from drivetrain.tune.moves import Change, changed
from drivetrain.tune.trainer import Runner

__all__ = ["LAYOUTS", "Ladder"]

LAYOUTS = "layout"
"""What stands for all layouts where the names of entries do."""


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
        self.view = View(goal=settings.goal.to_document())
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
        self._steps = Steps(self.bench, self.view)
        self._optuna: str | None = None
        self._asked_for_optuna = False

    def _save(self) -> None:
        self._write_state(self)

    def climb(self) -> None:
        """The whole ladder; what it found is in :attr:`view`.

        Raises:
            ConfigurationError: the baseline breaks a rule.
            DrivetrainError: the baseline cannot be trained, or the budget does not hold one step.
        """
        baseline = self.plan()
        assert self.view.plan is not None
        for line in plan_lines(self.view.plan):
            self._say(line)
        current = baseline
        tried: set[str] = set()
        search = KnobSearch(self._steps, self._sampler)
        while (candidate := self._next(current, tried)) is not None:
            tried.update(candidate.keys)
            if candidate.move is not None:
                current = self._try_move(current, candidate)
            elif candidate.knob is not None:
                current = search.search(current, candidate)
            else:
                current = self._try_change(current, candidate)
            self._save()
        kept = self._steps.kept
        if kept:
            top = Top(self.bench, self.view, kept, baseline)
            if self.settings.leave_one_out:
                current = top.leave_one_out(current)
            # An entry and its knob's value may be all that was kept, and go together.
            if kept:
                top.finish(current)

    def plan(self) -> Rung:
        """The baseline, and in :attr:`view` what is expected to be tried within the budget.

        Raises:
            ConfigurationError, DrivetrainError: as :meth:`climb`.
        """
        baseline = self._start()
        found, _ = self._survey(baseline, frozenset())
        self.view.plan = plan_document(found.candidates, baseline, self._steps)
        self._save()
        return baseline

    def _start(self) -> Rung:
        file = self.folder / BASELINE_FILE
        config = load_config(str(file)).config
        broken = violations(config, self.bench.facts_of(config), all_rules())
        if broken:
            raise ConfigurationError(*map(str, broken))
        self.bench.require_counted(config)
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

    def _survey(self, current: Rung, tried: Iterable[str]) -> tuple[Survey, Mapping[str, str]]:
        """What can be tried now, and which layouts are not proposed, with the reason."""
        of_memory = self.settings.goal.is_of_memory
        layouts, rejected = self._layouts(current)
        found = survey(
            self.bench.live_categories(current.profile) if of_memory else current.profile.classes,
            current.config,
            self.bench.facts_of(current.config),
            entries=self._entries,
            tried=set(tried),
            batch_rule=self.settings.batch_rule,
            missing=self._missing,
            active=lambda name: name not in current.profile.inactive,
            of_memory=of_memory,
            layouts=layouts,
        )
        return found, rejected

    def _layouts(self, current: Rung) -> tuple[Sequence[LayoutProposal], Mapping[str, str]]:
        config, goal = current.config, self.settings.goal
        processes = processes_of(config, self.settings.world_size)
        if processes == 1 or (self.settings.only and LAYOUTS not in self.settings.only):
            return (), {}

        return propose_layouts(
            config,
            processes,
            account_of(Path(current.profile.run)),
            legal=lambda leaves: self.bench.why_illegal(config, Change(leaves, LAYOUTS)),
            fewer=goal.name == "cost",
            for_memory=goal.is_of_memory,
        )

    def _next(self, current: Rung, tried: set[str]) -> Candidate | None:
        found, no_layouts = self._survey(current, tried)
        for candidate in found.candidates:
            if self._steps.fits(current, candidate):
                return candidate
        if found.candidates and not tried:
            self._refuse_budget(current, found.candidates)
        if found.candidates:
            names = ", ".join(one.key for one in found.candidates)
            self.view.findings.append(f"the budget left no room to try {names}")
        for name, why in {**found.rejected, **no_layouts}.items():
            if name not in tried:
                self.view.findings.append(f"{name} was not tried: {why}")
        return None

    def _refuse_budget(self, current: Rung, candidates: Sequence[Candidate]) -> None:
        spent = self.bench.journal.elapsed_s
        least = spent + min(self._steps.estimate_s(current, one) for one in candidates)
        raise DrivetrainError(
            f"--budget {self.settings.budget_s:.0f}s is too small for one trial: the baseline took {spent:.0f} s, and "
            f"the cheapest trial with its gate would bring it to {least:.0f} s; give --budget {math.ceil(least)}s or "
            f"more"
        )

    def _sampler(self) -> JointSampler | str:
        """Who proposes pairs of knobs. Whether optuna is there is a piece: who resumes the ladder decides as before."""
        if not self._asked_for_optuna:
            self._optuna = self.bench.journal.do("optuna", lambda: {"version": optuna_version()})["version"]
            self._asked_for_optuna = True
        if self._optuna is None:
            return "optuna is not installed (pip install 'drivetrain[tune]')"
        here = optuna_version()
        if here != self._optuna:
            raise DrivetrainError(
                f"the tune was begun with optuna {self._optuna}, whose proposals another does not repeat, and "
                f"{'none' if here is None else here} is installed; pip install optuna=={self._optuna}, or start anew"
            )
        return optuna_sampler()

    # -- one step -----------------------------------------------------------------------------------------------

    def _try_change(self, current: Rung, candidate: Candidate) -> Rung:
        change = candidate.change
        assert change is not None
        step = self._steps.begin(current, candidate, change)
        self._steps.predict(current, candidate, step, change)
        made = self._steps.measure(current, candidate, step, change)
        if not step.pop("faster"):
            return current
        return self._steps.gate_and_keep(current, step, candidate, change, made)

    def _try_move(self, current: Rung, candidate: Candidate) -> Rung:
        move, entry = candidate.move, candidate.entry
        limit_bytes = current.config.memory.device_memory_limit_bytes
        assert move is not None
        assert entry is not None
        assert limit_bytes is not None
        size = choose_size(
            entry,
            move,
            current.config,
            Setting(self.bench.facts_of(current.config), self.settings.batch_rule),
            estimate=self.bench.needs,
            account=account_of(Path(current.profile.run)),
        )
        if isinstance(size, str):
            self.view.findings.append(f"{candidate.key} was not tried: {size}")
            return current
        larger = tokens_per_step(changed(current.config, size.change)) / tokens_per_step(current.config)
        if not self._steps.fits(current, candidate, larger):
            self.view.findings.append(f"the budget left no room to try {in_words(size.change)}")
            return current
        step = self._steps.begin(current, candidate, size.change)
        write_prediction(step, size.predicted)
        step["memory"] = size.memory_document(self.bench.needs(current.config), limit_bytes)
        made = self._steps.measure(current, candidate, step, size.change)
        step["memory"]["counted_bytes"] = counted_bytes(step["blocks"])
        step["why"] += f"; {memory_in_words(step['memory'])}"
        if not step.pop("faster"):
            return current
        return self._steps.gate_and_keep(current, step, candidate, size.change, made)
