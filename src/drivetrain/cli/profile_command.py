"""What ``drivetrain profile`` does: a short run around a window, its cost, and its account."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.archive.encoding import SCHEMA
from drivetrain.archive.reader import Run, open_run
from drivetrain.cli.beginning import Beginning
from drivetrain.cli.environment import require_torch
from drivetrain.cli.output import show_document
from drivetrain.cli.train_command import EXIT_OF, refuse_broken_rules, train_as_one_rank, train_new_run
from drivetrain.config import (
    LaunchFacts,
    LoadedConfig,
    RunConfig,
    decay_tokens,
    least_processes,
    load_config,
    violations,
)
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.tune.short_run import prefetched_steps

__all__ = ["run_profile", "with_window"]

# Two steps are warm-up and one is the profiler's trial; see docs/profile.md.
_BEFORE_CALIBRATION = 2
_TRIAL = 1


def run_profile(
    source: str,
    overrides: Sequence[str],
    *,
    steps: int,
    start: int | None,
    num_processes: int | None,
    as_json: bool,
    parent: str | None = None,
) -> int:
    """The verb; returns the exit code."""
    require_torch()
    from drivetrain.engine.parallel.process_group import Ranks

    ranks = Ranks.from_environment()
    under_torchrun = Ranks.started_by_torchrun()
    if under_torchrun and num_processes is not None:
        raise DrivetrainError(
            "--nproc under torchrun: torchrun has started the processes already; drop --nproc, or torchrun"
        )
    former = open_run(Path(source)) if Path(source).is_dir() else None
    if under_torchrun:
        num_processes = ranks.world_size
    elif former is not None and num_processes is None:
        num_processes = int(former.manifest["layout"]["world_size"])
    loaded = with_window(source, former, overrides, steps, start, num_processes)
    world_size = num_processes or least_processes(loaded.config)
    refuse_broken_rules(loaded, world_size)
    profiler, training = loaded.config.profiler, loaded.config.training
    first, last = profiler.profile_step_start, profiler.profile_step_end - 1
    if ranks.rank == 0:
        steps_text = f"step {first} is" if first == last else f"steps {first} to {last} are"
        print(f"a new run of {training.train_iters} steps, of which {steps_text} profiled", file=sys.stderr)
    if under_torchrun:
        path, result = train_as_one_rank(loaded, ranks, Beginning(parent=parent))
        if ranks.rank != 0:
            return EXIT_OF[result.outcome.status]
        summary = result.summary
    else:
        path, summary = train_new_run(loaded, world_size, Beginning(parent=parent))
    if summary is None:
        return 1
    run = open_run(path)
    document = _document(run, summary)
    if document["window"] is not None:
        _account(run, document, as_json=as_json)
    if as_json:
        show_document(document)
    else:
        _say(document)
    if document["window"] is None and summary["status"] == "finished":
        return 1
    return EXIT_OF[str(summary["status"])]


def with_window(
    source: str,
    former: Run | None,
    overrides: Sequence[str],
    steps: int,
    start: int | None,
    num_processes: int | None = None,
) -> LoadedConfig:
    """The configuration of a run that is just long enough.

    Args:
        steps: to profile.
        start: the first of them; None: as early as can be calibrated by steps whose batches were not ready before the
            run began.
        num_processes: of the run; None: as few as its layout needs.
    """
    given = {override.partition("=")[0].strip() for override in overrides}
    for name, option in (("profile_step_start", "--start"), ("profile_step_end", "--steps"), ("profile", "")):
        if f"profiler.{name}" in given:
            remedy = f"use {option}" if option else "the verb profiles in any case"
            raise ConfigurationError(f"profiler.{name} is set by `drivetrain profile` itself; {remedy}")
    file = str(former.path / "config.toml") if former is not None else source
    wanted = load_config(file, overrides)
    fed = _fed_steps(wanted.config, num_processes) if start is None else 0
    first = start if start is not None else _BEFORE_CALIBRATION + fed + steps + _TRIAL + 1
    settings = {
        "training.train_iters": str(first + 2 * steps - 1),
        "training.eval_iters": "0",
        "training.eval_interval": "0",
        "profiler.profile_ranks": "all",
    }
    if wanted.config.lr_schedule.lr_decay_style != "constant":
        # The learning rate follows the schedule of the whole run, of which this is the beginning.
        settings["lr_schedule.lr_decay_tokens"] = str(decay_tokens(wanted.config))
    chosen = [f"{name}={value}" for name, value in settings.items() if name not in given]
    window = ("profile=true", f"profile_step_start={first}", f"profile_step_end={first + steps}")
    loaded = load_config(file, [*overrides, *chosen, *(f"profiler.{setting}" for setting in window)])
    name = former.name if former is not None else loaded.name
    return LoadedConfig(loaded.config, source, name)


def _fed_steps(config: RunConfig, num_processes: int | None) -> int:
    """Steps whose batches may be ready when the run begins; 0 where a rule is broken, which the caller refuses."""
    world_size = num_processes or least_processes(config)
    if violations(config, LaunchFacts(world_size=world_size)):
        return 0
    return prefetched_steps(config, world_size)


def _document(run: Run, summary: Mapping[str, Any]) -> dict[str, Any]:
    events = [event for event in run.events() if event["kind"] == "window"]
    window = _last(events, "profile")
    overhead = _last(events, "profile_overhead")
    return {
        "schema": SCHEMA,
        "run": str(run.path),
        "status": summary["status"],
        "window": window,
        "account": None,
        "files": [str(run.path / window["path"] / name) for name in window["file_bytes"]] if window else [],
        "overhead": overhead,
        "training": dict(summary),
    }


def _account(run: Run, document: dict[str, Any], *, as_json: bool) -> None:
    """Write the window's ``account.json``; the traces are there, whatever becomes of their account."""
    from drivetrain.archive.atomic import write_json
    from drivetrain.cli.account_sources import Figures, make_account

    try:
        account, title = make_account([str(run.path)], step_window="device", figures=Figures(), rules=None)
        window = document["window"]
        entry = {
            "first": window["first"],
            "last": window["last"],
            "name_table": account.name_table,
            "account": account.to_document(),
        }
        path = run.path / "account.json"
        write_json(path, {"schema": SCHEMA, "windows": [entry]})
    except DrivetrainError as error:
        print(f"no account: {error}", file=sys.stderr)
        return
    document["account"] = str(path)
    if not as_json:
        from drivetrain.report.account_text import account_text

        print(account_text(account, title))


def _last(events: Sequence[Mapping[str, Any]], what: str) -> dict[str, Any] | None:
    """The own fields of the newest window event of that kind."""
    found = [event for event in events if event.get("what") == what]
    if not found:
        return None
    return {
        key: value
        for key, value in found[-1].items()
        if key not in ("schema", "time", "segment", "kind", "what")
    }


def _say(document: Mapping[str, Any]) -> None:
    """Where the files are; the rest was said while it happened."""
    for file in [*document["files"], *([document["account"]] if document["account"] else [])]:
        print(f"wrote {file}", file=sys.stderr)
    if document["window"] is None:
        print(f"no step was profiled; the run {document['status']}", file=sys.stderr)
