"""What ``drivetrain train`` does: check, prepare, start one process or several, report."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.archive.reader import Run, open_run
from drivetrain.cli.data import show_progress
from drivetrain.cli.environment import require_torch
from drivetrain.cli.output import show_document
from drivetrain.config import LaunchFacts, LoadedConfig, load_config, violations
from drivetrain.errors import ConfigurationError, DrivetrainError, RunError

__all__ = ["EXIT_OF", "new_run", "refuse_broken_rules", "run_train", "train_to_end"]

EXIT_OF = {"finished": 0, "diverged": 1, "interrupted": 130}


def run_train(
    source: str,
    overrides: Sequence[str],
    *,
    num_processes: int | None,
    dry: bool,
    overfit: bool,
    as_json: bool,
) -> int:
    """The verb; returns the exit code."""
    require_torch()
    from drivetrain.engine.parallel.process_group import Ranks

    if Ranks.started_by_torchrun():
        if num_processes is not None:
            raise DrivetrainError(
                "--nproc under torchrun: torchrun has started the processes already; drop --nproc"
            )
        return _as_one_rank(source, overrides, as_json)
    run = _run_to_continue(source, overrides)
    loaded = (
        LoadedConfig(run.config(), source, run.name) if run is not None else load_config(source, overrides)
    )
    world_size = num_processes or loaded.config.parallelism.data_parallel_size or 1
    refuse_broken_rules(loaded, world_size)
    if dry:
        from drivetrain.cli.check import show_dry_run

        return show_dry_run(loaded, world_size, as_json=as_json)
    if overfit:
        from drivetrain.cli.overfit import run_overfit

        return run_overfit(loaded, as_json=as_json)
    path = run.path if run is not None else new_run(loaded, world_size)
    summary = train_to_end(path, world_size)
    return _report(summary, as_json) if summary is not None else 1


def train_to_end(path: Path, world_size: int) -> dict[str, Any] | None:
    """Train the run in ``path`` with processes on this machine; its summary.

    None: it ended without one, and stderr says how.
    """
    from drivetrain.engine.parallel.process_group import Ranks
    from drivetrain.engine.worker import work

    print(f"run: {path}", file=sys.stderr, flush=True)
    return work(path, Ranks()).summary if world_size == 1 else _several(path, world_size)


def refuse_broken_rules(loaded: LoadedConfig, world_size: int) -> None:
    """Raise ConfigurationError with every broken rule."""
    broken = violations(loaded.config, LaunchFacts(world_size=world_size))
    if broken:
        raise ConfigurationError(*(str(violation) for violation in broken))


def _run_to_continue(source: str, overrides: Sequence[str]) -> Run | None:
    """The run that ``source`` names, if it is a run directory."""
    path = Path(source)
    if not path.is_dir():
        return None
    run = open_run(path)
    if overrides:
        raise RunError(
            f"{source} is a run: it continues with its own configuration, so {overrides[0]!r} cannot be changed; "
            f"for a new run give {path / 'config.toml'} with the overrides"
        )
    if run.status() == "finished":
        raise RunError(f"{source} is finished; for a new run give {path / 'config.toml'}")
    return run


def new_run(loaded: LoadedConfig, world_size: int) -> Path:
    """Make the directory of a new run, its corpus prepared with progress on stderr."""
    from drivetrain.engine.creation import create_run
    from drivetrain.engine.data.corpus import ensure_corpus

    with show_progress() as progress:
        corpus = ensure_corpus(loaded.config.data, loaded.config.model, progress)
    return create_run(loaded, corpus, world_size=world_size, argv=sys.argv)


def _as_one_rank(source: str, overrides: Sequence[str], as_json: bool) -> int:
    """Under torchrun every process comes here; rank 0 makes the run unless the launcher has."""
    from drivetrain.engine.parallel.process_group import Ranks
    from drivetrain.engine.rendezvous import agree_on_run
    from drivetrain.engine.worker import work

    ranks = Ranks.from_environment()
    run = _run_to_continue(source, overrides)
    if run is not None:
        path = run.path
    else:
        loaded = load_config(source, overrides)
        refuse_broken_rules(loaded, ranks.world_size)
        path = agree_on_run(ranks, lambda: new_run(loaded, ranks.world_size))
    result = work(path, ranks)
    if result.summary is not None and as_json:
        show_document(result.summary)
    return EXIT_OF[result.outcome.status]


def _several(path: Path, num_processes: int) -> dict[str, Any] | None:
    from drivetrain.engine.launch import launch_ranks

    before = open_run(path).last_segment()
    code = launch_ranks(path, num_processes)
    run = open_run(path)
    end, summary = run.end(), run.summary()
    if end is None or run.last_segment() == before:
        raise DrivetrainError(
            f"the processes of {path} ended (exit code {code}) before the run did; their messages are above. "
            f"Continue it with: drivetrain train {path} --nproc {num_processes}"
        )
    if end["status"] == "failed" and end.get("bad_input"):
        raise DrivetrainError(str(end["reason"]))
    if summary is None or summary.get("segment") != run.last_segment():
        print(f"the run {end['status']}: {end['reason']}", file=sys.stderr)
        return None
    return summary


def _report(summary: dict[str, Any], as_json: bool) -> int:
    if as_json:
        show_document(summary)
    else:
        from drivetrain.cli.dimensions import five_dimensions

        print(five_dimensions(summary), file=sys.stderr)
    if summary["status"] == "interrupted":
        print(f"interrupted; continue with: drivetrain train {summary['run']}", file=sys.stderr)
    return EXIT_OF[str(summary["status"])]
