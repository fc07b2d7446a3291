"""What ``drivetrain train`` does: check, prepare, start one process or several, report."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.archive.reader import Run, open_run
from drivetrain.archive.writer import append_event
from drivetrain.cli.beginning import PLAIN_BEGINNING, Beginning
from drivetrain.cli.check import device_type_of
from drivetrain.cli.check_recompute import require_fitting_budget
from drivetrain.cli.data import show_progress
from drivetrain.cli.environment import require_torch
from drivetrain.cli.evidence import with_evidence
from drivetrain.cli.output import show_document
from drivetrain.cli.resume import finished_summary, refuse_beside_resume, run_of_this_name
from drivetrain.config import (
    LaunchFacts,
    LoadedConfig,
    RunConfig,
    idle_fields,
    least_processes,
    load_config,
    violations,
)
from drivetrain.errors import ConfigurationError, DrivetrainError, RunError

if TYPE_CHECKING:
    from drivetrain.engine.parallel.process_group import Ranks
    from drivetrain.engine.stop import StopRequest
    from drivetrain.engine.worker import WorkerResult

__all__ = [
    "EXIT_OF",
    "new_run",
    "refuse_broken_rules",
    "run_train",
    "train_as_one_rank",
    "train_new_run",
    "train_to_end",
]

_RECORDED_WITHIN_S = 3.0


EXIT_OF = {"finished": 0, "diverged": 1, "interrupted": 130}


def run_train(
    source: str,
    overrides: Sequence[str],
    *,
    num_processes: int | None,
    dry: bool,
    overfit: bool,
    as_json: bool,
    beginning: Beginning = PLAIN_BEGINNING,
    resume: bool = False,
    max_restarts: int = 0,
) -> int:
    """The verb; returns the exit code."""
    require_torch()
    from drivetrain.engine.parallel.process_group import Ranks

    _refuse_what_would_have_no_effect(
        {"--nproc": num_processes is not None, "--dry-run": dry, "--overfit-batch": overfit},
        under_torchrun=Ranks.started_by_torchrun(),
    )
    without_run = "--dry-run" if dry else "--overfit-batch" if overfit else None
    beginning.refuse_without_a_new_run(without_run)
    if resume:
        refuse_beside_resume(source, {without_run or "": without_run is not None, **beginning.given})
    if max_restarts and without_run is not None:
        raise DrivetrainError(
            f"--max-restarts watches over a run, and {without_run} makes none; give one of them"
        )
    if Ranks.started_by_torchrun():
        if max_restarts:
            raise DrivetrainError(
                "--max-restarts under torchrun: torchrun restarts the processes by itself; give it to torchrun"
            )
        return _as_one_rank(source, overrides, as_json, beginning, resume)
    run = _run_to_continue(source, overrides)
    if run is not None:
        beginning.refuse_without_a_new_run(source)
    loaded = (
        LoadedConfig(run.config(), source, run.name) if run is not None else load_config(source, overrides)
    )
    if resume:
        run = run_of_this_name(loaded)
        if run is not None and (code := _nothing_left(run.path, as_json)) is not None:
            return code
    world_size = num_processes or _former_size(run) or least_processes(loaded.config)
    if overfit:
        return _overfit(loaded, world_size, as_json)
    refuse_broken_rules(loaded, world_size)
    if run is not None or (dry and loaded.config.run.device != "cuda"):
        # What is run dry for a GPU need not have one here.
        _require_servable_backends(loaded.config)
    if dry or run is not None:
        _note_idle_fields(loaded, world_size)
    if dry:
        from drivetrain.cli.check import show_dry_run
        from drivetrain.engine.initial_state import require_usable_start

        if run is None:
            # A run that is there goes on from a checkpoint of its own.
            require_usable_start(loaded.config)
        return show_dry_run(loaded, world_size, as_json=as_json)
    if max_restarts and world_size == 1:
        raise DrivetrainError(
            "--max-restarts watches over several processes, and this run has one; add --nproc, or drop it"
        )
    if run is None:
        _, summary = train_new_run(loaded, world_size, beginning, max_restarts)
    else:
        summary = train_to_end(run.path, world_size, max_restarts)
    return _report(summary, as_json) if summary is not None else 1


def _refuse_what_would_have_no_effect(given: dict[str, bool], *, under_torchrun: bool) -> None:
    """Raise DrivetrainError for options that contradict each other, or that torchrun leaves nothing to do."""
    options = [name for name, is_given in given.items() if is_given]
    if options and under_torchrun:
        reason = (
            "torchrun has started the processes already"
            if options[0] == "--nproc"
            else "it needs one process, and no torchrun"
        )
        raise DrivetrainError(f"{options[0]} under torchrun: {reason}; drop {options[0]}, or torchrun")
    if {"--dry-run", "--overfit-batch"} <= set(options):
        raise DrivetrainError("--dry-run starts nothing and --overfit-batch trains; give one of them")
    if {"--nproc", "--overfit-batch"} <= set(options):
        raise DrivetrainError("--overfit-batch trains in one process; drop --nproc")


def _overfit(loaded: LoadedConfig, world_size: int, as_json: bool) -> int:
    from drivetrain.cli.overfit import run_overfit

    # It holds no memory limit, and says so.
    refuse_broken_rules(loaded, world_size, limits_memory=False)
    sizes = {
        name: getattr(loaded.config.parallelism, name)
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
    }
    several = [name for name, size in sizes.items() if size is not None and size > 1]
    if several:
        ones = " ".join(f"parallelism.{name}=1" for name in several)
        raise DrivetrainError(f"--overfit-batch trains in one process; use {ones}")
    _note_idle_fields(loaded, 1)
    return run_overfit(loaded, as_json=as_json)


def _former_size(run: Run | None) -> int:
    """Processes that the run was started with: what it is continued with unless told otherwise. 0: no run."""
    return int(run.manifest["layout"].get("world_size") or 1) if run is not None else 0


def train_new_run(
    loaded: LoadedConfig, world_size: int, beginning: Beginning = PLAIN_BEGINNING, max_restarts: int = 0
) -> tuple[Path, dict[str, Any] | None]:
    """:func:`new_run` and :func:`train_to_end`, without an instant in between in which a signal leaves a run that has
    no end."""
    from drivetrain.engine.stop import StopRequest

    stop = StopRequest()
    try:
        path = new_run(loaded, world_size, beginning, stop)
        return path, train_to_end(path, world_size, max_restarts, stop)
    finally:
        stop.release()


def train_to_end(
    path: Path, world_size: int, max_restarts: int = 0, stop: "StopRequest | None" = None
) -> dict[str, Any] | None:
    """Train the run in ``path`` with processes on this machine; its summary.

    None: it ended without one, and stderr says how.

    Args:
        stop: holds signals already; it no longer does at the end.
    """
    try:
        summary = _train_to_end(path, world_size, max_restarts, stop)
    except KeyboardInterrupt:
        # It came before anything was there to take it in order.
        run = open_run(path)
        if run.end() is None and run.last_segment() is None:
            append_event(path, "end", status="interrupted", reason="a signal before the first step")
        raise
    return with_evidence(path, summary) if summary is not None else None


def _train_to_end(
    path: Path, world_size: int, max_restarts: int, stop: "StopRequest | None"
) -> dict[str, Any] | None:
    from drivetrain.engine.stop import StopRequest

    print(f"run: {path}", file=sys.stderr, flush=True)
    if world_size > 1 and stop is not None:
        # From here on a signal raises, until the launcher passes it on to the ranks.
        stop.release()
    if stop is not None and stop.requested:
        from drivetrain.engine.creation import end_before_the_first_step

        end_before_the_first_step(path, stop)
    if world_size > 1:
        return _several(path, world_size, max_restarts)
    # Before the imports, which take a second: the run exists by now, and a signal must end it in order.
    with stop or StopRequest() as stopping:
        from drivetrain.engine.parallel.process_group import Ranks
        from drivetrain.engine.worker import work

        return work(path, Ranks(), stopping).summary


def refuse_broken_rules(loaded: LoadedConfig, world_size: int, *, limits_memory: bool = True) -> None:
    """Raise ConfigurationError with every broken rule.

    Args:
        limits_memory: whether what is started holds memory.device_memory_limit_bytes.
    """
    from drivetrain.catalogue.rules import all_rules

    device_type = device_type_of(loaded.config) if limits_memory else None
    facts = LaunchFacts(world_size=world_size, device_type=device_type)
    broken = violations(loaded.config, facts, all_rules())
    if broken:
        raise ConfigurationError(*(str(violation) for violation in broken))


def _require_servable_backends(config: RunConfig) -> None:
    """Raise ConfigurationError where a backend is named that cannot serve here: the first step would end the run."""
    from drivetrain.engine.preflight import require_servable_backends

    require_servable_backends(config)


def _note_idle_fields(loaded: LoadedConfig, world_size: int) -> None:
    """Name on stderr what was set to no effect."""
    for idle in idle_fields(loaded.config, LaunchFacts(world_size=world_size)):
        print(f"note: {idle}", file=sys.stderr)


def _run_to_continue(source: str, overrides: Sequence[str]) -> Run | None:
    """The run that ``source`` names, if it is a run directory."""
    path = Path(source)
    try:
        is_directory = bool(source) and path.is_dir()
    except (OSError, ValueError):  # too long a name, a null character: load_config says so
        is_directory = False
    if not is_directory:
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


def new_run(
    loaded: LoadedConfig,
    world_size: int,
    beginning: Beginning = PLAIN_BEGINNING,
    stop: "StopRequest | None" = None,
) -> Path:
    """Make the directory of a new run, its corpus prepared with progress on stderr.

    Bad input is found before, so that it leaves no directory behind.

    Args:
        stop: see :func:`~drivetrain.engine.creation.create_run`; it holds signals once the directory is being made.
    """
    from drivetrain.engine.creation import create_run
    from drivetrain.engine.data.corpus import ensure_corpus
    from drivetrain.engine.devices import select_device
    from drivetrain.engine.preflight import require_countable_step, require_usable_inputs

    origin = beginning.origin(loaded.config)
    require_countable_step(loaded.config, world_size, select_device(loaded.config.run).type)
    _require_servable_backends(loaded.config)
    require_fitting_budget(loaded.config, world_size)
    _note_idle_fields(loaded, world_size)
    with show_progress() as progress:
        corpus = ensure_corpus(loaded.config.data, loaded.config.model, progress)
    require_usable_inputs(loaded.config, corpus)
    return create_run(loaded, corpus, world_size=world_size, argv=sys.argv, origin=origin, stop=stop)


def _nothing_left(path: Path, as_json: bool) -> int | None:
    """The exit code, and what its end said, where the run has finished already; else None."""
    summary = finished_summary(path)
    if summary is None:
        return None
    print(f"nothing is left to do: {path} is finished", file=sys.stderr)
    return _report(summary, as_json) if summary else 0


def _as_one_rank(
    source: str, overrides: Sequence[str], as_json: bool, beginning: Beginning, resume: bool
) -> int:
    """Under torchrun every process comes here; rank 0 makes the run unless the launcher has."""
    from drivetrain.engine.launch import started_by_launcher
    from drivetrain.engine.parallel.process_group import Ranks
    from drivetrain.engine.rendezvous import agree_on_run, run_store

    ranks = Ranks.from_environment()
    run = _run_to_continue(source, overrides)
    if run is not None:
        beginning.refuse_without_a_new_run(source)
        path = run.path
        if not started_by_launcher():
            loaded = LoadedConfig(run.config(), source, run.name)
            refuse_broken_rules(loaded, ranks.world_size)
            _require_servable_backends(loaded.config)
            if ranks.rank == 0:
                _note_idle_fields(loaded, ranks.world_size)
    else:
        loaded = load_config(source, overrides)
        refuse_broken_rules(loaded, ranks.world_size)

        def found_or_made() -> Path:
            found = run_of_this_name(loaded) if resume else None
            if found is None:
                return new_run(loaded, ranks.world_size, beginning)
            _require_servable_backends(loaded.config)
            _note_idle_fields(loaded, ranks.world_size)
            return found.path

        # Kept to the end of this function: the ranks form their group through it.
        store = run_store(ranks)
        path = agree_on_run(ranks, found_or_made, store)
        if resume and finished_summary(path) is not None:
            return (_nothing_left(path, as_json) or 0) if ranks.rank == 0 else 0
    result = _work_as_one_rank(path, ranks)
    if result.summary is not None and as_json:
        show_document(result.summary)
    return EXIT_OF[result.outcome.status]


def train_as_one_rank(
    loaded: LoadedConfig, ranks: "Ranks", beginning: Beginning = PLAIN_BEGINNING
) -> tuple[Path, "WorkerResult"]:
    """:func:`train_new_run` under torchrun, where every rank comes here: rank 0 makes the run."""
    from drivetrain.engine.rendezvous import agree_on_run, run_store

    refuse_broken_rules(loaded, ranks.world_size)
    store = run_store(ranks)  # Kept until the ranks have formed their group.
    path = agree_on_run(ranks, lambda: new_run(loaded, ranks.world_size, beginning), store)
    return path, _work_as_one_rank(path, ranks)


def _work_as_one_rank(path: Path, ranks: "Ranks") -> "WorkerResult":
    """Train the run in ``path`` as one of its ranks, whoever has started them; the summary with its evidence."""
    from drivetrain.engine.launch import started_by_launcher
    from drivetrain.engine.stop import StopRequest

    began = time.time()
    if ranks.rank == 0 and not started_by_launcher():
        print(f"run: {path}", file=sys.stderr, flush=True)
    with StopRequest() as stop:
        if started_by_launcher():
            from drivetrain.engine.parent import end_with_parent

            end_with_parent(os.getppid(), signal.SIGKILL)
        from drivetrain.engine.worker import work

        try:
            result = work(path, ranks, stop)
        except DrivetrainError as error:
            if started_by_launcher() and _is_recorded(path, str(error), began):
                sys.exit(2)  # The launcher says it, once for all.
            raise DrivetrainError(f"rank {ranks.rank}: {error}") from error
    if result.summary is None or started_by_launcher():
        return result
    return replace(result, summary=with_evidence(path, result.summary))


def _is_recorded(path: Path, message: str, since: float) -> bool:
    """Whether the run's end says so already: then the launcher will, once for all ranks."""
    give_up = time.monotonic() + _RECORDED_WITHIN_S
    while True:
        end = open_run(path).end()
        if end is not None and end["time"] >= since:
            return bool(end["reason"] == message)
        if time.monotonic() > give_up:
            return False
        time.sleep(0.05)


def _several(path: Path, num_processes: int, max_restarts: int) -> dict[str, Any] | None:
    from drivetrain.engine.hang import report_hang
    from drivetrain.engine.launch import launch_ranks

    # Each attempt has an agent, and so a port and a store, of its own: nothing is found of the one before.
    for attempt in range(1, max_restarts + 2):
        began = time.time()
        launch = launch_ranks(path, num_processes)
        stood_still = report_hang(path, began)
        for line in stood_still:
            print(line, file=sys.stderr, flush=True)
        again = launch.is_worth_another_try or (bool(stood_still) and launch.signal_name is None)
        if attempt > max_restarts or not again or _has_diverged(path, began):
            break
        ended = launch.failure or f"the processes ended with exit code {launch.exit_code}"
        reason = stood_still[0] if stood_still else ended
        append_event(
            path, "restart", attempt=attempt, of=max_restarts, rank=launch.failed_rank, reason=reason
        )
        print(f"restart {attempt} of {max_restarts}: {reason}", file=sys.stderr, flush=True)
    run = open_run(path)
    end, summary = run.end(), run.summary()
    if end is None or end["time"] < began:
        if launch.signal_name is not None:
            reason = f"{launch.signal_name}; nothing was saved since the last checkpoint"
            append_event(path, "end", status="interrupted", reason=reason)
            print(f"interrupted: {reason}; continue with: drivetrain train {path}", file=sys.stderr)
            raise KeyboardInterrupt
        raise DrivetrainError(
            f"the processes of {path} ended (exit code {launch.exit_code}) before the run did; their messages "
            f"are above. Continue it with: drivetrain train {path}"
        )
    if end["status"] == "failed" and end.get("bad_input"):
        # The rank that failed first is the cause; what rank 0 met may be that the other has gone.
        first = f"{launch.failure}; " if launch.failure is not None and launch.failed_rank != 0 else ""
        raise DrivetrainError(f"{first}{end['reason']}")
    if summary is None or summary.get("segment") != run.last_segment():
        print(f"the run {end['status']}: {end['reason']}", file=sys.stderr)
        return None
    # What a single process prints: these two belong to the file.
    return {key: value for key, value in summary.items() if key not in ("schema", "segment")}


def _has_diverged(path: Path, began: float) -> bool:
    """Whether the run has come to its own end since ``began``: with a summary, which a crash does not write."""
    run = open_run(path)
    end, summary = run.end(), run.summary()
    return (
        end is not None
        and end["time"] >= began
        and summary is not None
        and summary.get("segment") == run.last_segment()
    )


def _report(summary: dict[str, Any], as_json: bool) -> int:
    if as_json:
        show_document(summary)
    else:
        from drivetrain.cli.dimensions import five_dimensions

        print(five_dimensions(summary), file=sys.stderr)
    if summary["status"] == "interrupted":
        print(f"interrupted; continue with: drivetrain train {summary['run']}", file=sys.stderr)
    return EXIT_OF[str(summary["status"])]
