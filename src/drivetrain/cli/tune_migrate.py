"""``drivetrain tune CONFIG --migrate``: from one plain process to a configuration, each difference proven."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.archive.tunes import Tune
from drivetrain.cli.output import show_document
from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.tune.ladder_settings import LadderSettings

__all__ = ["begin_migration", "continue_migration", "refuse_ladder_options", "show_migration"]

_DEFAULT_BUDGET_S = 7200.0
_HEADINGS = ("#", "rung", "processes", "ms a step", "peak MB", "gate", "state")


def begin_migration(
    source: str,
    overrides: Sequence[str],
    settings: "LadderSettings",
    tunes_dir: str,
    *,
    has_budget: bool,
    num_processes: int | None,
) -> Path:
    """The folder of a new migration; every mistake that can be known is found before it is made.

    Args:
        has_budget: ``settings`` has the user's budget; else it gets one of two hours.
        num_processes: the most that a run may have here; None: as many as there are usable cores.
    """
    from drivetrain.cli.train_command import refuse_broken_rules
    from drivetrain.config import least_processes, load_config
    from drivetrain.tune.migrate_session import start_migration
    from drivetrain.tune.short_run import require_beginning

    loaded = load_config(source, overrides)
    world_size = least_processes(loaded.config)
    refuse_broken_rules(loaded, world_size)
    require_beginning(loaded.config)
    cores = len(os.sched_getaffinity(0))
    most = cores if num_processes is None else num_processes
    settings = replace(settings, world_size=most)
    if not has_budget:
        settings = replace(settings, budget_s=_DEFAULT_BUDGET_S)
    threads = loaded.config.run.num_threads or max(1, cores // min(most, world_size))
    return start_migration(loaded, overrides, settings, tunes_dir, num_threads=threads)


def continue_migration(path: Path, budget_s: float | None, *, as_json: bool) -> int:
    """Climb it; returns the exit code: 0 where nothing was left out and the end is proven, else 1."""
    from drivetrain.tune.migrate_session import climb_migration

    print(f"tune: {path}", file=sys.stderr, flush=True)
    done = climb_migration(path, budget_s=budget_s, say=_say)
    show_migration(done, as_json=as_json)
    return _exit_code(done.document)


def show_migration(tune: Tune, *, as_json: bool) -> None:
    """The table of rungs and the final configuration, or the document."""
    from drivetrain.tune.migrate_session import migration_contract

    if as_json:
        show_document({**migration_contract(tune.document), "status": tune.status()})
        return
    from rich.table import Table

    from drivetrain.cli.runs import print_table

    document = tune.document
    print(f"{tune.path}: {tune.status()}" + (f", {document['reason']}" if document["reason"] else ""))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in _HEADINGS:
        table.add_column(heading, no_wrap=True)
    for rung in document["rungs"]:
        table.add_row(*_cells(rung))
    print()
    print_table(table)
    for rung in document["rungs"]:
        print(f"{rung['index']:>2}  {_words(rung)}")
    gate = document["final_gate"]
    print()
    if gate is not None:
        print(f"all that is proven against the plain start: {gate['tier']}: {gate['verdict']}: {gate['why']}")
    for finding in document["findings"]:
        print(f"- {finding}")
    final = document["migrated"]
    if final is not None:
        counts = ", ".join(f"{number} {state}" for state, number in final["counts"].items() if number)
        print(f"\nthe final configuration ({counts}): {tune.path / final['config']}")


def _cells(rung: Mapping[str, Any]) -> list[str]:
    step_s, memory, gate = rung["step_s"], rung["peak_memory_bytes"], rung["gate"]
    return [
        str(rung["index"]),
        rung["name"],
        str(rung["processes"]),
        "-" if step_s is None else f"{step_s * 1e3:.1f}",
        "-" if memory is None else f"{memory / 1e6:,.0f}",
        f"{rung['tier']}: {'-' if gate is None else gate['verdict']}",
        rung["state"] or "running",
    ]


def _words(rung: Mapping[str, Any]) -> str:
    from drivetrain.tune.short_run import as_override

    change = " ".join(as_override(leaf, value) for leaf, value in rung["change"].items())
    return ": ".join(part for part in (change, rung["why"]) if part)


def _exit_code(document: Mapping[str, Any]) -> int:
    bad = any(rung["state"] in ("left out", "not tried", None) for rung in document["rungs"])
    return 1 if bad or document["migrated"] is None else 0


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def refuse_ladder_options(given: Sequence[str]) -> None:
    """Raise DrivetrainError where options were given that a migration has no use for."""
    needless = [name for name in given if name not in _OPTIONS]
    if needless:
        raise DrivetrainError(
            f"--migrate brings in what the configuration has, and searches nothing; drop {', '.join(needless)}"
        )


_OPTIONS = ("--gate-steps", "--short-gates", "--trial-steps", "--nproc", "--launcher", "--migrate")
