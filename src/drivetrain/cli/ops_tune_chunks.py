"""``drivetrain ops tune`` of a configuration with tensor parallelism: into how many chunks its collectives are cut."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from drivetrain.config import LoadedConfig
    from drivetrain.engine.ops_tuning.session import Report

__all__ = ["chunks_tuned"]


def chunks_tuned(
    loaded: "LoadedConfig",
    path: Path,
    nproc: int,
    budget_s: float,
    say: Callable[[str], None],
    *,
    fresh: bool,
    as_json: bool,
) -> "Report | None":
    """Tune as the rank that this process is, or start the ranks and wait for them.

    Args:
        path: the tuned file.
        nproc: processes to start; 1: as many as the configuration needs.
        say: told of progress.

    Returns:
        The report where this process is rank 0 of those that another one has started; None where it is another rank.

    Raises:
        typer.Exit: with the exit code of rank 0, where it was started here; that rank has shown the report.
        DrivetrainError: rules are broken, the file cannot be written, a rank failed.
    """
    from drivetrain.cli.train_command import refuse_broken_rules
    from drivetrain.config import least_processes
    from drivetrain.config.serialise import to_toml
    from drivetrain.engine.ops_tuning.chunk_ranks import tune_as_rank, tune_on_ranks
    from drivetrain.engine.ops_tuning.writing import make_folder
    from drivetrain.engine.parallel.process_group import Ranks

    if Ranks.started_by_torchrun():
        ranks = Ranks.from_environment()
        refuse_broken_rules(loaded, ranks.world_size)
        if ranks.rank == 0:
            make_folder(path)
            say(f"ops tune: {path}")
        return tune_as_rank(loaded.config, path, budget_s=budget_s, fresh=fresh, progress=say)
    processes = least_processes(loaded.config) if nproc == 1 else nproc
    refuse_broken_rules(loaded, processes)
    make_folder(path)
    with tempfile.TemporaryDirectory(prefix="drivetrain-ops-tune-") as folder:
        # What this process has read, whatever becomes of the file it came from.
        file = Path(folder) / f"{loaded.name}.toml"
        file.write_text(to_toml(loaded.config), encoding="utf-8")
        arguments = ["ops", "tune", str(file), "--output", str(path), "--budget", f"{budget_s:.3f}s"]
        arguments += ["--fresh"] * fresh + ["--json"] * as_json
        raise typer.Exit(tune_on_ranks(arguments, processes))
