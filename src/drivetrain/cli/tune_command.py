"""What ``drivetrain tune`` does: check, make or find the tune, climb, show the ladder."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from drivetrain.archive.tunes import Tune, find_tune, open_tune
from drivetrain.cli.duration import seconds_of_duration
from drivetrain.cli.environment import require_torch
from drivetrain.cli.output import show_document
from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.catalogue import LearningRateRule, StepEstimate
    from drivetrain.config import RunConfig
    from drivetrain.tune.ladder_settings import LadderSettings

__all__ = ["Options", "run_replay", "run_tune", "seconds_of"]

_DEFAULT_BUDGET = "20m"
_MOST_UNITS = 100
_LEAST_BUDGET_S = 10.0
"""A profile and the four blocks of a trial are five processes that import torch, at two seconds each."""


@dataclass(frozen=True)
class Options:
    """The options of the verb, as given."""

    budget: str | None
    tunes_dir: str
    only: tuple[str, ...]
    leave_one_out: bool
    gate_steps: int | None
    short_gates: bool
    trial_steps: int | None
    trial_looks: str | None
    knob_trials: int | None
    num_processes: int | None
    grow_batch: str | None = None
    launcher: str | None = None
    migrate: bool = False
    goal: str | None = None
    slower_at_most: str | None = None
    price_per_device_hour: float | None = None
    dry_run: bool = False

    def given(self) -> list[str]:
        """The options that say how a new tune is climbed, and were given; ``--budget`` is not among them."""
        given = {
            "--only": bool(self.only),
            "--no-leave-one-out": not self.leave_one_out,
            "--gate-steps": self.gate_steps is not None,
            "--short-gates": self.short_gates,
            "--trial-steps": self.trial_steps is not None,
            "--trial-looks": self.trial_looks is not None,
            "--knob-trials": self.knob_trials is not None,
            "--grow-batch": self.grow_batch is not None,
            "--nproc": self.num_processes is not None,
            "--launcher": self.launcher is not None,
            "--migrate": self.migrate,
            "--goal": self.goal is not None,
            "--slower-at-most": self.slower_at_most is not None,
            "--price-per-device-hour": self.price_per_device_hour is not None,
        }
        return [name for name, is_given in given.items() if is_given]


def run_tune(source: str, overrides: Sequence[str], options: Options, *, as_json: bool) -> int:
    """The verb; returns the exit code."""
    require_torch()
    from drivetrain.cli.tune_migrate import continue_migration
    from drivetrain.tune.migrate_session import is_migration
    from drivetrain.tune.session import climb_tune, contract

    found = find_tune(source, options.tunes_dir)
    budget_s = None if options.budget is None else seconds_of(options.budget)
    if found is not None:
        _refuse_other_settings(source, overrides, options)
        path = found
    elif options.migrate:
        path = _begin_migration(source, overrides, options)
    else:
        path = _begin(source, overrides, options)
    if is_migration(open_tune(path)):
        return continue_migration(path, budget_s if found is not None else None, as_json=as_json)
    print(f"tune: {path}", file=sys.stderr, flush=True)
    done = climb_tune(
        path,
        budget_s=budget_s if found is not None else None,
        missing=_lacks(path),
        estimate=_needs(path),
        say=_say,
        only_plan=options.dry_run,
    )
    if as_json:
        show_document(contract(done.document))
    elif options.dry_run:
        _show_plan(done)
    else:
        _show(done)
    if options.dry_run:
        return 0
    return 0 if done.document["final"] is not None else 1


def run_replay(reference: str, words: Sequence[str], options: Options, *, as_json: bool) -> int:
    """Show a tune; returns the exit code.

    Args:
        words: configuration and overrides that were given with it: there must be none.
    """
    from drivetrain.cli.tune_migrate import show_migration
    from drivetrain.tune.migrate_session import is_migration
    from drivetrain.tune.session import contract

    needless = [*map(repr, words), *(["--budget"] if options.budget is not None else []), *options.given()]
    needless += ["--dry-run"] if options.dry_run else []
    if needless:
        raise DrivetrainError(
            f"--replay {reference} shows a tune and runs nothing; drop {', '.join(needless)}"
        )
    found = open_tune(reference, options.tunes_dir)
    if is_migration(found):
        show_migration(found, as_json=as_json)
        return 0
    if as_json:
        show_document({**contract(found.document), "status": found.status()})
    else:
        _show(found)
    return 0


def seconds_of(text: str) -> float:
    """``90s``, ``20m``, ``1h30m``, ``90``: seconds.

    Raises:
        DrivetrainError: it is no duration, or too short for any trial.
    """
    seconds = seconds_of_duration("--budget", text)
    if seconds < _LEAST_BUDGET_S:
        raise DrivetrainError(
            f"--budget {text} is too small for one trial of anything: a profile and the four blocks of a trial are "
            f"five processes, which take at least {_LEAST_BUDGET_S:.0f} s to start"
        )
    return seconds


def _begin(source: str, overrides: Sequence[str], options: Options) -> Path:
    """A new tune; every mistake that can be known is found before its folder is made."""
    from drivetrain.cli.train_command import refuse_broken_rules
    from drivetrain.config import least_processes, load_config
    from drivetrain.tune.session import start_tune
    from drivetrain.tune.short_run import require_beginning

    settings = _settings(options)
    try:
        loaded = load_config(source, overrides)
    except DrivetrainError as error:
        known = Path(options.tunes_dir)
        hint = f"\nno tune in {known} is called {source!r} either" if known.is_dir() else ""
        raise DrivetrainError(f"{error}{hint}") from error
    if options.num_processes is None and loaded.config.parallelism.data_parallel_size:
        settings = dataclasses.replace(settings, world_size=least_processes(loaded.config))
    settings = dataclasses.replace(settings, device_type=_device_type(loaded.config, settings))
    refuse_broken_rules(loaded, settings.world_size)
    require_beginning(loaded.config)
    return start_tune(loaded, overrides, settings, options.tunes_dir)


def _begin_migration(source: str, overrides: Sequence[str], options: Options) -> Path:
    from drivetrain.cli.tune_migrate import begin_migration, refuse_ladder_options

    refuse_ladder_options(options.given())
    return begin_migration(
        source,
        overrides,
        _settings(options),
        options.tunes_dir,
        has_budget=options.budget is not None,
        num_processes=options.num_processes,
    )


def _device_type(config: "RunConfig", settings: "LadderSettings") -> str | None:
    """What the runs compute on; None where a launcher starts them on machines that are not this one."""
    from drivetrain.engine.devices import select_device

    if config.run.device != "auto":
        return config.run.device
    return select_device(config.run).type if settings.launcher is None else None


def _settings(options: Options) -> "LadderSettings":
    from drivetrain.catalogue import entry
    from drivetrain.cli.tune_goal import goal_of_options
    from drivetrain.tune.gate_runs import GateSettings
    from drivetrain.tune.ladder import LAYOUTS
    from drivetrain.tune.ladder_settings import LadderSettings
    from drivetrain.tune.launcher import Launcher

    if options.launcher is not None:
        Launcher.parse(options.launcher).require_program()
    if options.short_gates and options.gate_steps is not None:
        raise DrivetrainError("--short-gates and --gate-steps both say how long gates are; give one of them")
    for name in options.only:
        if name != LAYOUTS:
            entry(name)
    goal = goal_of_options(options.goal, options.slower_at_most, options.price_per_device_hour)
    gate = GateSettings()
    if options.short_gates:
        gate = GateSettings(roundoff_steps=40, statistical_steps=60, eval_iters=4)
    elif options.gate_steps is not None:
        gate = GateSettings(roundoff_steps=options.gate_steps, statistical_steps=options.gate_steps)
    settings = LadderSettings(
        budget_s=seconds_of(options.budget or _DEFAULT_BUDGET),
        only=options.only,
        leave_one_out=options.leave_one_out,
        gate=gate,
        trial_steps=options.trial_steps,
        world_size=options.num_processes or 1,
        launcher=options.launcher,
        goal=goal,
    )
    if options.grow_batch is not None:
        settings = dataclasses.replace(settings, batch_rule=_batch_rule(options.grow_batch))
    if options.trial_looks is not None:
        settings = dataclasses.replace(settings, looks=_looks(options.trial_looks))
    if options.knob_trials is not None:
        settings = dataclasses.replace(settings, knob_trials=options.knob_trials)
    return settings


def _batch_rule(text: str) -> "LearningRateRule":
    from drivetrain.catalogue import LearningRateRule
    from drivetrain.config import nearest

    known: tuple[LearningRateRule, ...] = get_args(LearningRateRule)
    for rule in known:
        if text == rule:
            return rule
    close = nearest(text, known)
    raise DrivetrainError(
        f"--grow-batch {text}: how is the learning rate to follow a larger global batch? One of {', '.join(known)}"
        f"{f'; did you mean {close}?' if close else ''}"
    )


def _looks(text: str) -> tuple[int, ...]:
    """``1,2,4``: after how many times four blocks a trial is judged."""
    words = text.split(",")
    looks = tuple(int(word) for word in words if word.isascii() and word.strip().isdigit())
    increasing = len(looks) == len(words) and looks == tuple(sorted(set(looks)))
    if not increasing or not 1 <= looks[0] <= looks[-1] <= _MOST_UNITS:
        raise DrivetrainError(
            f"--trial-looks {text}: expected increasing whole numbers from 1 to {_MOST_UNITS} with commas between, "
            "how many times four blocks are run before each look, as in 1,2,4"
        )
    return looks


def _refuse_other_settings(source: str, overrides: Sequence[str], options: Options) -> None:
    named = options.given() + (["overrides"] if overrides else [])
    if named:
        raise DrivetrainError(
            f"{source} is a tune: it goes on with what it was started with, so {', '.join(named)} cannot be given; "
            "only --budget can be changed"
        )


def _lacks(path: Path) -> Callable[[str], str | None]:
    """Capability → why this machine lacks it for the tune in ``path``; None where it has it."""

    def lacks(name: str) -> str | None:
        from drivetrain.config import load_config
        from drivetrain.engine.capabilities import capability
        from drivetrain.engine.devices import select_device
        from drivetrain.tune.ladder_records import BASELINE_FILE

        device = select_device(load_config(str(path / BASELINE_FILE)).config.run)
        found = capability(name, device)
        return None if found.available else found.reason

    return lacks


def _needs(path: Path) -> "Callable[[RunConfig], StepEstimate | str]":
    """Configuration of the tune in ``path`` → what a step of it needs, or why it cannot be run."""

    def needs(config: "RunConfig") -> "StepEstimate | str":
        from drivetrain.engine.memory.step_estimate import estimate_step
        from drivetrain.tune.layouts import processes_of

        given = int(open_tune(path).document["settings"]["world_size"])
        try:
            return estimate_step(config, processes_of(config, given))
        except DrivetrainError as error:
            return str(error)

    return needs


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _show(tune: Tune) -> None:
    from rich.table import Table

    from drivetrain.cli.runs import print_table
    from drivetrain.report.ladder_rows import LADDER_HEADINGS, ladder_rows, removal_rows, totals

    document = tune.document
    print(f"{tune.path}: {tune.status()}" + (f", {document['reason']}" if document["reason"] else ""))
    _show_baseline(document)
    _show_goal(document)
    tables = {"ladder": ladder_rows(document["steps"]), "without": removal_rows(document["leave_one_out"])}
    for title, rows in tables.items():
        if not rows:
            continue
        table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
        for heading in LADDER_HEADINGS:
            table.add_column(heading, no_wrap=True)
        for row in rows:
            table.add_row(*row.cells)
        print()
        print_table(table)
        for row in rows:
            print(f"{row.index:>2}  {row.why}" if row.why else f"{row.index:>2}")
            if row.predicted_why:
                said = "" if row.predicted_why.startswith("not predicted") else "predicted: "
                print(f"    {said}{row.predicted_why}")
    print()
    for label, text in totals(document):
        print(f"{label:<42} {text}")
    for finding in document["findings"]:
        print(f"- {finding}")
    final = document["final"]
    if final is not None:
        print(f"\nthe final configuration: {tune.path / final['config']}")
    elif document["status"] == "finished":
        print("\nnothing was kept: the baseline is as fast as what was tried")


def _show_plan(tune: Tune) -> None:
    from drivetrain.tune.budget_plan import plan_lines

    _show_baseline(tune.document)
    _show_goal(tune.document)
    print("\n".join(plan_lines(tune.document["plan"])))
    print(f"\nto climb it: drivetrain tune {tune.path}")


def _show_goal(document: Mapping[str, Any]) -> None:
    goal = document.get("goal")
    if goal is None:
        return  # A tune from before there were goals.
    print(f"goal: {goal['name']} ({goal['unit']}): {goal['rule']}")
    if goal.get("final") is not None:
        interval = f"{goal['ratio']:.3f}x [{goal['low']:.3f}, {goal['high']:.3f}]"
        print(f"  {goal['baseline']:,.6g} to {goal['final']:,.6g} {goal['unit']}, {interval}")


def _show_baseline(document: Mapping[str, Any]) -> None:
    baseline = document["baseline"]
    if baseline is None:
        return
    whole = sum(baseline["classes"].values())
    print(f"baseline {baseline['tokens_per_second']:,.0f} token/s, {baseline['step_s'] * 1e3:.1f} ms a step")
    largest = sorted(baseline["classes"].items(), key=lambda item: -item[1])[:5]
    print("  " + ", ".join(f"{name} {ns / whole:.1%}" for name, ns in largest))
