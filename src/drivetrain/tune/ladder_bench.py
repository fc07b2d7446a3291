"""The pieces of a ladder: profiles, trials and gates in its folder, each made once, and what they may cost."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from drivetrain.archive.atomic import write_text
from drivetrain.catalogue import Numerics, StepEstimate
from drivetrain.config import LaunchFacts, RunConfig, config_hash, load_config, to_toml
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.measure.memory import CATEGORIES
from drivetrain.tune.candidates import illegal
from drivetrain.tune.gate import Verdict
from drivetrain.tune.gate_runs import run_gate
from drivetrain.tune.goals import Goal, counted_event
from drivetrain.tune.ladder_cost import Costs
from drivetrain.tune.ladder_moves import Estimate
from drivetrain.tune.ladder_records import Profile, Rung, profiled
from drivetrain.tune.ladder_settings import LadderSettings
from drivetrain.tune.layouts import processes_of
from drivetrain.tune.moves import Change, changed
from drivetrain.tune.pieces import Journal, Meter
from drivetrain.tune.short_run import as_override
from drivetrain.tune.trainer import Runner, Trainer
from drivetrain.tune.trial import run_trial
from drivetrain.tune.trial_statistics import Noise

__all__ = ["Bench", "Gate"]

Gate = Callable[[Path, Path, Numerics, Trainer], Verdict]
"""(baseline, candidate, tier, trainer) → verdict."""


class Bench:
    """Makes the pieces in ``folder`` and counts what they cost.

    Args:
        folder: of the tune.
        settings: declared.
        runner: makes the runs.
        entries: pieces that are there.
        save: called after each new piece.
        gate: None: :func:`drivetrain.tune.gate_runs.run_gate`, with the tune's own archive.
        estimate: what a step of a configuration needs; None: nobody can tell.
        say: told what happens, in lines.
    """

    def __init__(
        self,
        folder: Path,
        settings: LadderSettings,
        runner: Runner,
        *,
        entries: Sequence[dict[str, Any]],
        save: Callable[[], None],
        gate: Gate | None,
        estimate: Estimate | None = None,
        say: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.costs = Costs(settings)
        self.say = say
        self._meter = Meter(runner)
        self.goal = replace(settings.goal, allocator_counts=settings.device_type == "cuda")
        self.save = save
        self.journal = Journal(entries, self._meter, save)
        self._gate = gate if gate is not None else self._run_gate
        self._estimate = estimate
        self._needs: dict[str, StepEstimate | str] = {}
        self._noise = Noise()
        self._written = 0

    @property
    def left_s(self) -> float:
        """What is left of the budget."""
        return self.settings.budget_s - self.journal.elapsed_s

    def processes_of(self, config: RunConfig) -> int:
        """Processes of a run of ``config``."""
        return processes_of(config, self.settings.world_size)

    def facts_of(self, config: RunConfig) -> LaunchFacts:
        """Of a launch of ``config``."""
        return LaunchFacts(world_size=self.processes_of(config), device_type=self.settings.device_type)

    def why_illegal(self, config: RunConfig, change: Change) -> str | None:
        """Why ``config`` after ``change`` may not be run, or not be judged; None where it may."""
        try:
            after = changed(config, change)
        except ConfigurationError as error:
            return str(error)
        return illegal(config, change, self.facts_of(after)) or self.why_not_counted(after)

    def why_not_counted(self, config: RunConfig) -> str | None:
        """Why the live bytes of ``config``, which are the goal, cannot be counted; None where they can or need not
        be."""
        leaves = self._counting(config)
        broken = illegal(config, Change(leaves), self.facts_of(config)) if leaves else None
        return None if broken is None else f"its live bytes cannot be counted: {broken}"

    def require_counted(self, config: RunConfig) -> None:
        """Raise ConfigurationError where the goal is memory and the baseline's cannot be counted."""
        why = self.why_not_counted(config)
        if why is not None:
            raise ConfigurationError(f"--goal memory: {why}")

    def _counting(self, config: RunConfig) -> dict[str, Any]:
        return self.goal.counting(config)

    def live_categories(self, profile: Profile) -> Mapping[str, float]:
        """Live bytes of the profile's run at its peak, by category; where nothing counted them (a device's allocator
        knows no categories), every category alike."""
        event = counted_event(Path(profile.run))
        return dict.fromkeys(CATEGORIES, 1.0) if event is None else dict(event["by_category"])

    def write(self, config: RunConfig) -> Path:
        """The next configuration of the ladder, as a file."""
        self._written += 1
        file = self.folder / "configs" / f"{self._written:03d}.toml"
        write_text(file, to_toml(config))
        return file

    def needs(self, config: RunConfig) -> StepEstimate | str:
        """What a step of ``config`` needs, or why nothing is known of it: tried once, without memory."""
        key = f"memory {config_hash(config)[:8]}"
        if key not in self._needs:

            def work() -> dict[str, Any]:
                if self._estimate is None:
                    return {"why": "nothing here tells what a step of it needs"}
                self.say(f"  what a step needs with {_sizes(config)}")
                found = self._estimate(config)
                return {"why": found} if isinstance(found, str) else asdict(found)

            found = self.journal.do(key, work)
            self._needs[key] = found["why"] if "why" in found else StepEstimate(**found)
        return self._needs[key]

    def profile(
        self,
        file: Path,
        config: RunConfig,
        name: str,
        *,
        timeout_s: float | None = None,
        keep_failure: bool = True,
    ) -> Profile:
        """A profile of the configuration in ``file``.

        Args:
            keep_failure: a profile that fails is a result like others. False: nothing is kept of it, and whoever
                resumes the tune profiles again.

        Raises:
            DrivetrainError: it ended otherwise than well.
        """

        def work() -> dict[str, Any]:
            attempt = self._meter.profile(
                file,
                [
                    as_override("run.runs_dir", str(self.folder / "runs")),
                    f"run.name={name}",
                    *(as_override(leaf, value) for leaf, value in self._counting(config).items()),
                ],
                steps=self.settings.profile_steps,
                world_size=self.processes_of(config),
                timeout_s=timeout_s,
            )
            self._remove_checkpoints()
            found: dict[str, Any] = {"outcome": attempt.outcome, "message": attempt.message}
            if attempt.outcome == "finished" and attempt.run is not None:
                found = profiled(attempt.run, attempt.summary or {})
            if not keep_failure:
                _require_finished(name, found)
            return found

        key = f"{name} {config_hash(config)[:8]}"
        result = self.journal.do(key, work)
        _require_finished(name, result)
        self.costs.learn_profile(self.journal.cost_of(key)[0])
        return Profile.from_document(result)

    def trial(
        self,
        name: str,
        parent: Rung,
        file: Path,
        config: RunConfig,
        *,
        entry: str | None = None,
        final: bool = False,
        goal: Goal | None = None,
    ) -> dict[str, Any]:
        """``config`` in ``file`` against ``parent``: the document of a :class:`~drivetrain.tune.trial.TrialResult`.

        Args:
            entry: that must be in effect in the candidate.
            final: it is the last one, whose blocks carry a profiled window each.
            goal: by what it is judged; None: that of the settings, from the baseline on.
        """
        settings = self.costs.trial_settings(parent.profile.step_s, final=final)

        def work() -> dict[str, Any]:
            result = run_trial(
                parent.file,
                file,
                trainer=self._meter,
                runs_dir=self.folder / "runs",
                name=name,
                settings=settings,
                world_size=(self.processes_of(parent.config), self.processes_of(config)),
                noise=self._noise,
                must_be_active=entry,
                goal=goal or self.goal,
                progress=lambda message: self.say(f"  {message}"),
            )
            return result.to_document()

        key = f"{name} {config_hash(parent.config)[:8]} {config_hash(config)[:8]}"
        found = self.journal.do(key, work)
        self._noise += Noise(**found["noise"])
        self.costs.learn_trial(self.journal.cost_of(key)[0], len(found["blocks"]))
        return found

    def gate(
        self, name: str, baseline: Rung, file: Path, config: RunConfig, tier: Numerics
    ) -> dict[str, Any]:
        """The gate's verdict, as its document."""

        def work() -> dict[str, Any]:
            verdict = self._gate(baseline.file, file, tier, self._meter)
            self._remove_checkpoints()
            return verdict.to_document()

        key = f"{name} {tier} {config_hash(baseline.config)[:8]} {config_hash(config)[:8]}"
        found = self.journal.do(key, work)
        self.costs.learn_gate(tier, self.journal.cost_of(key)[0])
        self.say(f"  gate, {tier}: {found['verdict']}: {found['why']}")
        return found

    def _run_gate(self, baseline: Path, candidate: Path, tier: Numerics, trainer: Trainer) -> Verdict:
        return run_gate(
            baseline,
            candidate,
            tier,
            trainer=trainer,
            folder=self.folder / "runs",
            settings=replace(self.settings.gate, world_size=self.settings.world_size),
            world_sizes=(
                self.processes_of(load_config(str(baseline)).config),
                self.processes_of(load_config(str(candidate)).config),
            ),
            progress=lambda message: self.say(f"  {message}"),
        )

    def _remove_checkpoints(self) -> None:
        """The weights of a short run are of no use to anybody."""
        for checkpoints in (self.folder / "runs").glob("*/checkpoints"):
            shutil.rmtree(checkpoints, ignore_errors=True)


def _sizes(config: RunConfig) -> str:
    training = config.training
    return (
        f"micro-batch {training.micro_batch_size} of {training.global_batch_size}, recompute "
        f"{config.memory.recompute_granularity}"
    )


def _require_finished(name: str, result: Mapping[str, Any]) -> None:
    if result["outcome"] != "finished":
        how = str(result["outcome"]).replace("_", " ")
        raise DrivetrainError(f"{name} cannot be profiled, it ended as {how}: {result['message']}")
