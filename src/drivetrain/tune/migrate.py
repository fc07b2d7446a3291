"""From one plain process to an imported configuration: one difference at a time, each proven by the gate of its class.

To be read from :meth:`Migration.climb` down. As in the ladder, what is decided follows from the results of finished
pieces alone (:mod:`drivetrain.tune.pieces`), so that a migration that was killed goes on to the same end.
"""

import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from drivetrain.archive.atomic import write_text
from drivetrain.archive.reader import open_run
from drivetrain.catalogue.rules import all_rules
from drivetrain.config import (
    LaunchFacts,
    RunConfig,
    config_hash,
    idle_fields,
    leaf_values,
    least_processes,
    load_config,
    to_toml,
    tokens_per_step,
    violations,
)
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.measure.optimisation import OptimisationRecord
from drivetrain.tune.gate import TIERS, Tier, Verdict
from drivetrain.tune.gate_runs import run_gate
from drivetrain.tune.ladder_settings import LadderSettings
from drivetrain.tune.migrate_rungs import RungPlan, plain_start, rungs_between
from drivetrain.tune.moves import Change, changed
from drivetrain.tune.pieces import Journal, Meter
from drivetrain.tune.short_run import as_override, short_run, steps_to_run
from drivetrain.tune.trainer import Runner, Trainer
from drivetrain.tune.trial import why_without_effect

__all__ = ["TARGET_FILE", "LayoutGate", "Migration", "MigrationView", "State"]

TARGET_FILE = "configs/target.toml"
PLAIN_FILE = "configs/000.toml"
FINAL_FILE = "configs/final.toml"
_STEPS = 12

State = Literal["proven", "no effect", "not proven here", "left out", "not tried"]
"""What became of a rung. ``no effect``: it changes nothing in the imported configuration either; ``not proven here``:
this machine cannot run it, or not with an effect; ``left out``: its run or its gate failed."""
LayoutGate = Callable[[Path, Path, Tier, Trainer, tuple[int, int]], Verdict]
"""(baseline, candidate, tier, trainer, processes of both) → verdict."""


@dataclass
class MigrationView:
    """What the document shows, in the order in which it came to be.

    Attributes:
        rungs: the plain start, then each difference.
        findings: in words.
        final: the configuration at the end; None: there is none.
        final_gate: what is proven of it, against the plain start.
    """

    rungs: list[dict[str, Any]] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    final: dict[str, Any] | None = None
    final_gate: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Place:
    """Where the migration stands: everything up to here is proven."""

    file: Path
    config: RunConfig

    @property
    def processes(self) -> int:
        return least_processes(self.config)


class Migration:
    """One migration in the folder of its tune.

    Args:
        folder: of the tune; ``configs/target.toml`` in it is the imported configuration.
        settings: declared; ``world_size`` is the most processes that a run may have here.
        runner: makes the runs.
        num_threads: of each process.
        entries: pieces that are there already.
        save: writes the state; called after each piece and rung.
        gate: None: the convergence gate, with its runs in the tune's archive.
        say: told what happens, in lines.
    """

    def __init__(
        self,
        folder: Path,
        settings: LadderSettings,
        runner: Runner,
        *,
        num_threads: int,
        entries: Sequence[dict[str, Any]] = (),
        save: Callable[["Migration"], None] = lambda _migration: None,
        gate: LayoutGate | None = None,
        say: Callable[[str], None] = lambda _message: None,
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.view = MigrationView()
        self._write_state = save
        self._meter = Meter(runner)
        self.journal = Journal(entries, self._meter, self._save)
        self._gate = gate if gate is not None else self._run_gate
        self._num_threads = num_threads
        self._say = say
        self._written = 0

    def _save(self) -> None:
        self._write_state(self)

    def climb(self) -> None:
        """The whole way; what it found is in :attr:`view`.

        Raises:
            DrivetrainError: the plain start cannot be trained.
        """
        target = load_config(str(self.folder / TARGET_FILE)).config
        plain = plain_start(target, num_threads=self._num_threads)
        plans = rungs_between(plain, target)
        start = self._start(plain, target)
        place, states = start, list[tuple[RungPlan, State]]()
        if self.view.rungs[0]["state"] != "proven":
            return
        for plan in plans:
            place, state = self._rung(place, plan, target)
            states.append((plan, state))
            self._save()
        self._finish(start, place, plain, target, states)

    # -- the plain start ----------------------------------------------------------------------------------------

    def _start(self, plain: RunConfig, target: RunConfig) -> _Place:
        file = self.folder / PLAIN_FILE
        write_text(file, to_toml(plain))
        facts = LaunchFacts(world_size=1)
        broken = violations(plain, facts, all_rules())
        if broken:
            raise ConfigurationError(*map(str, broken))
        self._say("the plain start: one process, fp32, no layout, nothing fused")
        rung = self._new_rung("plain start", {}, "exact", "two runs of the same must be equal to the bit", 1)
        found = self._measure("plain", file, plain)
        if found["outcome"] != "finished":
            raise DrivetrainError(
                f"the plain start cannot be trained, it ended as {found['outcome'].replace('_', ' ')}: "
                f"{found['message']}"
            )
        _fill(rung, found)
        place = _Place(file, plain)
        verdict = self._judge("plain", place, place, "exact")
        rung["gate"] = verdict
        passed = verdict["verdict"] == "pass"
        rung["state"] = "proven" if passed else "left out"
        rung["why"] = f"{_loss_in_words(found)}; {verdict['why']}"
        batches = (plain.training.global_batch_size, target.training.global_batch_size)
        if batches[0] != batches[1]:
            self.view.findings.append(
                f"every proof is at a global batch of {batches[0]} in place of {batches[1]}, with each step's learning "
                "rate as it was; the final configuration has its own"
            )
        if target.model.hidden_dropout or target.model.attention_dropout:
            self.view.findings.append(
                "every proof is without dropout, whose masks differ between layouts; the final configuration has it"
            )
        if found["last_loss"] is not None and not found["last_loss"] < found["first_loss"]:
            self.view.findings.append(
                f"the loss of the plain start does not fall in its {found['steps']} measured steps "
                f"({_loss_in_words(found)}): if its warm-up is longer, proofs say little of learning"
            )
        if not passed:
            self.view.findings.append(
                f"nothing was brought in: the plain start itself is not proven, {verdict['why']}"
            )
        self._save()
        return place

    # -- one difference -----------------------------------------------------------------------------------------

    def _rung(self, place: _Place, plan: RungPlan, target: RunConfig) -> tuple[_Place, State]:
        config = changed(place.config, Change(plan.leaves, plan.name))
        processes = least_processes(config)
        rung = self._new_rung(plan.name, plan.leaves, plan.tier, plan.why, processes)
        state, why = self._without_run(plan, config, target)
        if state is not None:
            rung["state"], rung["why"] = state, why
            self._say(f"{plan.name}: {state}: {why}")
            # What changes nothing belongs to the configuration all the same.
            legal = not violations(config, LaunchFacts(world_size=processes), all_rules())
            if state == "no effect" and legal:
                return _Place(self._write(config), config), state
            return place, state
        self._say(f"{plan.name}: {_in_words(plan.leaves)}")
        file = self._write(config)
        found = self._measure(plan.name, file, config)
        _fill(rung, found)
        if found["outcome"] != "finished":
            rung["state"] = "left out"
            rung["why"] = f"its run ended as {found['outcome'].replace('_', ' ')}: {found['message']}"
            return place, "left out"
        refuted = [why for name, why in found["without_effect"].items() if name in _fields_of(plan)]
        if refuted:
            rung["state"], rung["why"] = "not proven here", f"without effect here: {'; '.join(refuted)}"
            return place, "not proven here"
        candidate = _Place(file, config)
        verdict = self._judge(plan.name, place, candidate, plan.tier)
        rung["gate"] = verdict
        rung["why"] = verdict["why"]
        passed = verdict["verdict"] == "pass"
        rung["state"] = "proven" if passed else "left out"
        if not passed:
            self.view.findings.append(
                f"{plan.name} is left out ({_in_words(plan.leaves)}): its gate says {verdict['verdict']}: "
                f"{verdict['why']}"
            )
            return place, "left out"
        return candidate, "proven"

    def _without_run(self, plan: RungPlan, config: RunConfig, target: RunConfig) -> tuple[State | None, str]:
        """What becomes of a rung that is not run, and why; None: it is run."""
        processes = least_processes(config)
        here = {one.field: one.reason for one in idle_fields(config, LaunchFacts(world_size=processes))}
        there = {
            one.field: one.reason
            for one in idle_fields(target, LaunchFacts(world_size=least_processes(target)))
        }
        if all(leaf in there for leaf in plan.leaves):
            return "no effect", "; ".join(dict.fromkeys(there[leaf] for leaf in plan.leaves))
        if processes > self.settings.world_size:
            return "not proven here", (
                f"it needs {processes} processes, and {self.settings.world_size} may run here (--nproc)"
            )
        broken = violations(config, LaunchFacts(world_size=processes), all_rules())
        if broken:
            return "not proven here", f"without what is not proven it breaks a rule: {broken[0]}"
        if all(leaf in here for leaf in plan.leaves):
            return "not proven here", "; ".join(dict.fromkeys(here[leaf] for leaf in plan.leaves))
        if self.journal.elapsed_s >= self.settings.budget_s:
            return "not tried", f"the budget of {self.settings.budget_s:.0f} s is used up"
        return None, ""

    def _new_rung(
        self, name: str, leaves: Mapping[str, Any], tier: Tier, claim: str, processes: int
    ) -> dict[str, Any]:
        rung = {
            "index": len(self.view.rungs),
            "name": name,
            "change": dict(leaves),
            "tier": tier,
            "claim": claim,
            "processes": processes,
            "state": None,
            "why": "",
            "step_s": None,
            "tokens_per_second": None,
            "peak_memory_bytes": None,
            "run": None,
            "gate": None,
        }
        self.view.rungs.append(rung)
        return rung

    # -- pieces -------------------------------------------------------------------------------------------------

    def _write(self, config: RunConfig) -> Path:
        self._written += 1
        file = self.folder / "configs" / f"{self._written:03d}.toml"
        write_text(file, to_toml(config))
        return file

    def _measure(self, name: str, file: Path, config: RunConfig) -> dict[str, Any]:
        """Time and memory of a step, from a short run."""
        processes = least_processes(config)

        def work() -> dict[str, Any]:
            steps = steps_to_run(config, processes, self.settings.trial_steps or _STEPS)
            attempt = self._meter.train(
                file,
                [
                    *short_run(config, steps),
                    as_override("run.runs_dir", str(self.folder / "runs")),
                    "run.name=measure",
                ],
                world_size=processes,
            )
            self._remove_checkpoints()
            return _measured(attempt.run, attempt.outcome, attempt.message, attempt.summary or {}, config)

        found = self.journal.do(f"measure {name} {config_hash(config)[:8]}", work)
        if found["step_s"] is not None:
            self._say(f"  {found['step_s'] * 1e3:.1f} ms a step in {processes} processes")
        return found

    def _judge(self, name: str, baseline: _Place, candidate: _Place, tier: Tier) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            sizes = (baseline.processes, candidate.processes)
            verdict = self._gate(baseline.file, candidate.file, tier, self._meter, sizes)
            self._remove_checkpoints()
            return verdict.to_document()

        hashes = " ".join(config_hash(one.config)[:8] for one in (baseline, candidate))
        found = self.journal.do(f"gate {name} {tier} {hashes}", work)
        self._say(f"  gate, {tier}: {found['verdict']}: {found['why']}")
        return {key: found[key] for key in ("tier", "verdict", "why")}

    def _run_gate(
        self, baseline: Path, candidate: Path, tier: Tier, trainer: Trainer, sizes: tuple[int, int]
    ) -> Verdict:
        return run_gate(
            baseline,
            candidate,
            tier,
            trainer=trainer,
            folder=self.folder / "runs",
            settings=replace(self.settings.gate, world_size=sizes[0]),
            world_sizes=sizes,
            progress=lambda message: self._say(f"  {message}"),
        )

    def _remove_checkpoints(self) -> None:
        for checkpoints in (self.folder / "runs").glob("*/checkpoints"):
            shutil.rmtree(checkpoints, ignore_errors=True)

    # -- the end ------------------------------------------------------------------------------------------------

    def _finish(
        self,
        start: _Place,
        place: _Place,
        plain: RunConfig,
        target: RunConfig,
        states: Sequence[tuple[RungPlan, State]],
    ) -> None:
        proven = [plan for plan, state in states if state == "proven"]
        if len(proven) > 1:
            self._say("everything that is proven, against the plain start")
            tier = max((plan.tier for plan in proven), key=TIERS.index)
            self.view.final_gate = self._judge("all", start, place, tier)
            if self.view.final_gate["verdict"] != "pass":
                self.view.findings.append(
                    f"there is no final configuration: what is proven one by one does not pass together: "
                    f"{self.view.final_gate['why']}"
                )
                return
        elif proven:
            self.view.final_gate = self.view.rungs[1 + [plan for plan, _ in states].index(proven[0])]["gate"]
        final, dropped = _without(plain, target, states)
        broken = violations(final, LaunchFacts(world_size=least_processes(final)), all_rules())
        if broken:
            self.view.findings.append(
                f"there is no final configuration: without what is left out it breaks a rule: {broken[0]}"
            )
            return
        self.view.findings += dropped
        write_text(self.folder / FINAL_FILE, _final_toml(final, states))
        kinds = ("proven", "no effect", "not proven here", "left out", "not tried")
        self.view.final = {
            "config": FINAL_FILE,
            "processes": least_processes(final),
            "counts": {kind: sum(state == kind for _, state in states) for kind in kinds},
        }


def _measured(
    run: Path | None, outcome: str, message: str, summary: Mapping[str, Any], config: RunConfig
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "outcome": outcome,
        "message": message,
        "run": None if run is None else str(run),
        "steps": 0,
        "step_s": None,
        "tokens_per_second": None,
        "peak_memory_bytes": summary.get("peak_memory_bytes"),
        "first_loss": None,
        "last_loss": None,
        "without_effect": {},
    }
    if outcome != "finished" or run is None:
        return found
    lines = open_run(run).metrics()
    times = [float(line["time/step_s"]) for line in lines if not line["tags"]]
    losses = [line["train/loss"] for line in lines if line.get("train/loss") is not None]
    records = [OptimisationRecord.from_document(one) for one in summary.get("optimisations") or ()]
    found["without_effect"] = {one.name: why_without_effect(one) for one in records if one.without_effect}
    found["steps"] = len(times)
    if times:
        found["step_s"] = statistics.median(times)
        found["tokens_per_second"] = tokens_per_step(config) / found["step_s"]
    if losses:
        found["first_loss"] = losses[0]
        found["last_loss"] = statistics.fmean(losses[-max(1, len(losses) // 4) :])
    return found


def _fill(rung: dict[str, Any], found: Mapping[str, Any]) -> None:
    for key in ("step_s", "tokens_per_second", "peak_memory_bytes", "run"):
        rung[key] = found[key]


def _fields_of(plan: RungPlan) -> set[str]:
    """Names of the catalogue's entries that a rung switches on."""
    from drivetrain.catalogue import entry_of_field

    entries = (entry_of_field(leaf) for leaf in plan.leaves)
    return {entry.name for entry in entries if entry is not None}


def _in_words(leaves: Mapping[str, Any]) -> str:
    return " ".join(as_override(leaf, value) for leaf, value in leaves.items())


def _loss_in_words(found: Mapping[str, Any]) -> str:
    if found["first_loss"] is None:
        return "no loss was logged"
    return f"loss {found['first_loss']:.4f} at the first step, {found['last_loss']:.4f} over the last quarter"


def _without(
    plain: RunConfig, target: RunConfig, states: Sequence[tuple[RungPlan, State]]
) -> tuple[RunConfig, list[str]]:
    """``target`` with the plain values of what is left out; what cannot be without it goes too, and is named."""
    before = {leaf.path: value for leaf, value in leaf_values(plain)}
    config, findings = target, []
    for plan, state in states:
        if state == "left out":
            config = changed(config, Change({leaf: before[leaf] for leaf in plan.leaves}, plan.name))
    for plan, state in states:
        facts = LaunchFacts(world_size=least_processes(config))
        broken = {path for one in violations(config, facts, all_rules()) for path in one.fields}
        if state in ("not proven here", "not tried") and broken & set(plan.leaves):
            config = changed(config, Change({leaf: before[leaf] for leaf in plan.leaves}, plan.name))
            findings.append(f"{plan.name} goes with what is left out: without that it breaks a rule")
    return config, findings


def _final_toml(final: RunConfig, states: Sequence[tuple[RungPlan, State]]) -> str:
    """The final configuration as TOML, with what is known of each difference above its leaf."""
    words = {
        "proven": "proven, gate {tier}",
        "no effect": "no effect",
        "not proven here": "not proven here",
        "left out": "left out: its run failed, or its gate did not pass",
        "not tried": "not tried",
    }
    notes = {leaf: words[state].format(tier=plan.tier) for plan, state in states for leaf in plan.leaves}
    lines, section = [], ""
    for line in to_toml(final).splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        name = line.removeprefix("# ").partition(" = ")[0]
        note = notes.get(f"{section}.{name}")
        lines += [f"# {note}"] if note is not None else []
        lines.append(line)
    return "\n".join(lines) + "\n"
