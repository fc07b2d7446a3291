"""A tune from its first document to its last: made, climbed, interrupted, resumed."""

import contextlib
import dataclasses
import datetime
import functools
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain import __version__
from drivetrain.archive.atomic import write_text
from drivetrain.archive.tunes import Tune, create_tune, hold_tune, open_tune, save_tune
from drivetrain.config import LoadedConfig, to_toml
from drivetrain.errors import RunError
from drivetrain.measure.machine import cpu_model
from drivetrain.tune.ladder import Ladder
from drivetrain.tune.ladder_bench import Gate
from drivetrain.tune.ladder_moves import Estimate
from drivetrain.tune.ladder_records import BASELINE_FILE, View
from drivetrain.tune.ladder_settings import LadderSettings
from drivetrain.tune.launcher import Launcher
from drivetrain.tune.prediction_score import goal_of, score_of_steps
from drivetrain.tune.trainer import CommandLineTrainer, Runner

__all__ = [
    "climb_tune",
    "contract",
    "machine_of_tune",
    "marked",
    "require_resumable",
    "start_tune",
    "trainer_of_tune",
]


def start_tune(
    loaded: LoadedConfig,
    overrides: Sequence[str],
    settings: LadderSettings,
    tunes_dir: Path | str,
) -> Path:
    """Make the folder of a tune of ``loaded``; nothing is run yet.

    Raises:
        EnvironmentFault: it cannot be made.
    """

    def make(name: str, folder: Path) -> dict[str, Any]:
        write_text(folder / BASELINE_FILE, to_toml(loaded.config))
        return {
            "tune": name,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "source": loaded.source,
            "overrides": list(overrides),
            "machine": machine_of_tune(),
            "directory": str(Path.cwd()),
            "settings": settings.to_document(),
            **_shown(View(), "running", None, settings, 0.0, 0.0),
            "pieces": [],
        }

    return create_tune(tunes_dir, loaded.config.run.name or loaded.name, make)


def climb_tune(
    path: Path,
    *,
    budget_s: float | None = None,
    runner: Runner | None = None,
    gate: Gate | None = None,
    missing: Callable[[str], str | None] = lambda _capability: None,
    estimate: Estimate | None = None,
    say: Callable[[str], None] = lambda _message: None,
    only_plan: bool = False,
) -> Tune:
    """Climb the ladder in ``path`` to its end, from where it is.

    Args:
        budget_s: another budget than the one it was started with.
        runner: makes the runs; None: the command line, in the directory the tune was started in.
        gate, missing, estimate, say: see :class:`drivetrain.tune.ladder.Ladder`.
        only_plan: profile the baseline, say what is expected to be tried, and end there: the tune can go on.

    Raises:
        RunError: it is finished, another process works on it, or it was begun on another machine.
        DrivetrainError: see :meth:`drivetrain.tune.ladder.Ladder.climb`; the tune is marked failed.
        KeyboardInterrupt: the tune is marked interrupted, and can be resumed.
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

        def save(ladder: Ladder, status: str = "running", reason: str | None = None) -> None:
            journal = ladder.bench.journal
            shown = _shown(ladder.view, status, reason, settings, journal.elapsed_s, journal.device_seconds)
            new = {"settings": settings.to_document(), **shown, "pieces": journal.entries}
            save_tune(path, {**document, **new})

        ladder = Ladder(
            path.resolve(),
            settings,
            runner,
            entries=document["pieces"],
            save=save,
            gate=gate,
            missing=missing,
            estimate=estimate,
            say=say,
        )
        if document["status"] != "running":
            save_tune(path, {**document, "status": "running", "reason": None})
        with marked(path, functools.partial(save, ladder)):
            if only_plan:
                ladder.plan()
                save(ladder, "interrupted", f"only planned; it goes on with: drivetrain tune {path}")
                return open_tune(path)
            ladder.climb()
        save(ladder, "finished")
        return open_tune(path)


def _shown(
    view: View,
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
        "prediction_score": score_of_steps(
            view.steps, goal_of({"settings": settings.to_document()})
        ).to_document(),
        **{one.name: getattr(view, one.name) for one in dataclasses.fields(view)},
    }


@contextlib.contextmanager
def marked(path: Path, save: Callable[[str, str], None]) -> Iterator[None]:
    """Around the work on the tune in ``path``: where it ends by an exception, ``save`` is told the status and why."""
    try:
        yield
    except KeyboardInterrupt:
        save("interrupted", f"it goes on with: drivetrain tune {path}")
        raise
    except Exception as error:
        save("failed", str(error) or type(error).__name__)
        raise


def trainer_of_tune(tune: Tune, settings: LadderSettings) -> CommandLineTrainer:
    """What makes the runs of a tune: the command line, in the directory it was started in, by its launcher if any.

    Raises:
        DrivetrainError: the launcher's program is not there.
    """
    launcher = None if settings.launcher is None else Launcher.parse(settings.launcher)
    if launcher is not None:
        launcher.require_program()
    return CommandLineTrainer(
        tune.path.resolve() / "logs", directory=Path(tune.document["directory"]), launcher=launcher
    )


def machine_of_tune() -> dict[str, Any]:
    """What must be the same where a tune is continued: its figures are compared with those it has."""
    return {
        "host": platform.node(),
        "cpu": cpu_model(),
        "python": platform.python_version(),
        "drivetrain": __version__,
    }


def require_resumable(tune: Tune) -> None:
    """Raise RunError where a tune is finished, was begun on another machine, or its directory is gone."""
    if tune.document["status"] == "finished":
        raise RunError(
            f"{tune.path} is finished; `drivetrain tune --replay {tune.id}` shows it, and its configuration is "
            f"{tune.path / 'configs'}"
        )
    then, now = tune.document["machine"], machine_of_tune()
    differing = [f"{key} {then.get(key)} is {now[key]} now" for key in now if then.get(key) != now[key]]
    if differing:
        raise RunError(
            f"{tune.path} was begun on another machine ({'; '.join(differing)}); its times cannot be compared with new "
            f"ones: start a new tune from {tune.path / BASELINE_FILE}"
        )
    folder = Path(str(tune.document["directory"]))
    if not folder.is_dir():
        raise RunError(f"{tune.path} was begun in {folder}, which is not there any more")


def contract(document: Mapping[str, Any]) -> dict[str, Any]:
    """What ``drivetrain tune --json`` prints of a tune's document."""
    steps = ("index", "entry", "change", "treats", "predicted", "measured", "memory_bytes", "gate", "kept")
    more = (
        "outcome",
        "why",
        "device_seconds",
        "move",
        "memory",
        "speed",
        "no_prediction",
        "prediction_score",
    )
    whole = (
        "tune",
        "status",
        "reason",
        "source",
        "overrides",
        "baseline",
        "final",
        "speed_up",
        "goal",
        "plan",
        "final_gate",
        "saved",
        "prediction_score",
        "budget_s",
        "spent_s",
        "device_seconds",
        "findings",
    )
    return {
        **{key: document.get(key) for key in whole},
        "steps": [_printed(step, steps + more) for step in document["steps"]],
        "leave_one_out": [_printed(step, steps + more) for step in document.get("leave_one_out") or ()],
    }


def _printed(step: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    measured = step.get("measured")
    return {
        **{key: step.get(key) for key in keys},
        "measured": None if measured is None else {key: measured[key] for key in ("ratio", "low", "high")},
    }
