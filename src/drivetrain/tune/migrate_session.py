"""A migration from its first document to its last: made, climbed, interrupted, resumed. It is a tune on the disk."""

import contextlib
import dataclasses
import datetime
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.archive.atomic import write_text
from drivetrain.archive.tunes import Tune, create_tune, hold_tune, open_tune, save_tune
from drivetrain.config import LoadedConfig, to_toml
from drivetrain.tune.ladder_records import View
from drivetrain.tune.ladder_settings import LadderSettings
from drivetrain.tune.migrate import TARGET_FILE, LayoutGate, Migration, MigrationView
from drivetrain.tune.session import machine_of_tune, marked, require_resumable, trainer_of_tune
from drivetrain.tune.trainer import Runner

__all__ = ["climb_migration", "is_migration", "migration_contract", "start_migration"]


def is_migration(tune: Tune) -> bool:
    """Whether a tune is a migration, and no ladder."""
    return "rungs" in tune.document


def start_migration(
    loaded: LoadedConfig,
    overrides: Sequence[str],
    settings: LadderSettings,
    tunes_dir: Path | str,
    *,
    num_threads: int,
) -> Path:
    """Make the folder of a migration to ``loaded``; nothing is run yet.

    Args:
        num_threads: of each process of all its runs.

    Raises:
        EnvironmentFault: it cannot be made.
    """

    def make(name: str, folder: Path) -> dict[str, Any]:
        write_text(folder / TARGET_FILE, to_toml(loaded.config))
        ladder = {one.name: getattr(View(), one.name) for one in dataclasses.fields(View)}
        return {
            "tune": name,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "source": loaded.source,
            "overrides": list(overrides),
            "machine": machine_of_tune(),
            "directory": str(Path.cwd()),
            "settings": settings.to_document(),
            "num_threads": num_threads,
            # What a ladder shows, so that whoever lists tunes finds it empty.
            **ladder,
            **_shown(MigrationView(), "running", None, settings, 0.0, 0.0),
            "pieces": [],
        }

    return create_tune(tunes_dir, loaded.config.run.name or loaded.name, make)


def climb_migration(
    path: Path,
    *,
    budget_s: float | None = None,
    runner: Runner | None = None,
    gate: LayoutGate | None = None,
    say: Callable[[str], None] = lambda _message: None,
) -> Tune:
    """Climb the migration in ``path`` to its end, from where it is.

    Args:
        budget_s: another budget than the one it was started with.
        runner: makes the runs; None: the command line, in the directory it was started in.
        gate, say: see :class:`drivetrain.tune.migrate.Migration`.

    Raises:
        RunError: it is finished, another process works on it, or it was begun on another machine.
        DrivetrainError: the plain start cannot be trained; the tune is marked failed.
        KeyboardInterrupt: it is marked interrupted, and can be resumed.
    """
    with hold_tune(path), contextlib.ExitStack() as owned:
        tune = open_tune(path)
        document = tune.document
        require_resumable(tune)
        settings = LadderSettings.from_document(document["settings"])
        if budget_s is not None:
            settings = dataclasses.replace(settings, budget_s=budget_s)
        if runner is None:
            runner = owned.enter_context(trainer_of_tune(tune, settings))

        def save(migration: Migration, status: str = "running", reason: str | None = None) -> None:
            journal = migration.journal
            shown = _shown(
                migration.view, status, reason, settings, journal.elapsed_s, journal.device_seconds
            )
            new = {"settings": settings.to_document(), **shown, "pieces": journal.entries}
            save_tune(path, {**document, **new})

        migration = Migration(
            path.resolve(),
            settings,
            runner,
            num_threads=int(document["num_threads"]),
            entries=document["pieces"],
            save=save,
            gate=gate,
            say=say,
        )
        if document["status"] != "running":
            save_tune(path, {**document, "status": "running", "reason": None})
        with marked(path, functools.partial(save, migration)):
            migration.climb()
        save(migration, "finished")
        return open_tune(path)


def _shown(
    view: MigrationView,
    status: str,
    reason: str | None,
    settings: LadderSettings,
    spent_s: float,
    device_seconds: float,
) -> dict[str, Any]:
    return {
        "status": status,
        "reason": reason,
        "budget_s": settings.budget_s,
        "spent_s": spent_s,
        "device_seconds": device_seconds,
        "rungs": view.rungs,
        "findings": view.findings,
        "final": None,
        "migrated": view.final,
        "final_gate": view.final_gate,
    }


def migration_contract(document: Mapping[str, Any]) -> dict[str, Any]:
    """What ``drivetrain tune --migrate --json`` prints of a tune's document."""
    keys = ("tune", "status", "reason", "source", "overrides", "rungs", "final_gate", "findings")
    more = ("budget_s", "spent_s", "device_seconds")
    return {**{key: document.get(key) for key in (*keys, *more)}, "final": document.get("migrated")}
