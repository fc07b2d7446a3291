"""What ``drivetrain memory`` does: predict, measure where that was asked for, show both."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.archive.atomic import write_json, write_text
from drivetrain.archive.encoding import SCHEMA
from drivetrain.archive.profile_windows import newest_window
from drivetrain.archive.reader import Run, open_run
from drivetrain.cli.check_ranks import parse_ranks
from drivetrain.cli.environment import require_torch
from drivetrain.cli.output import show_document
from drivetrain.config import LaunchFacts, LoadedConfig, RunConfig, least_processes, load_config
from drivetrain.diagnose.memory_advice import Suggestion, suggestions
from drivetrain.errors import DrivetrainError, RunError
from drivetrain.measure.memory import MemoryByCategory, deviations
from drivetrain.report.memory_figure import memory_svg
from drivetrain.report.memory_text import memory_text

if TYPE_CHECKING:
    from drivetrain.engine.dry_run_processes import Failure

__all__ = ["run_memory"]

_STEPS = 2
"""That ``--measure`` profiles: what the first of them leaves behind is part of the second."""
_FILE, _FIGURE = "memory.json", "memory.svg"


def run_memory(
    source: str,
    overrides: Sequence[str],
    *,
    num_processes: int | None,
    ranks: str | None,
    measure: bool,
    figure: Path | None,
    as_json: bool,
) -> int:
    """The verb; returns the exit code."""
    require_torch()
    _refuse_no_place(figure)
    run = _former_run(source, overrides, num_processes, measure)
    if run is None:
        loaded = load_config(source, overrides)
        world_size = num_processes or least_processes(loaded.config)
        _refuse_broken_rules(loaded, world_size)
        if measure:
            run = _measured_run(source, overrides, world_size)
            if run is None:
                return 1
    if run is not None:
        config, world_size = run.config(), int(run.manifest["layout"]["world_size"])
        measured, step = _measured(run)
        shown = sorted(measured)
    else:
        config, measured, step = loaded.config, {}, None
        from drivetrain.engine.memory.predict_ranks import representative_ranks

        shown = representative_ranks(config, world_size)
    if ranks is not None:
        shown = _chosen(parse_ranks(ranks, world_size), shown, of_run=run is not None)
    predicted, failures = _predicted(config, world_size, shown, step or 1)
    for rank, failure in sorted(failures.items()):
        print(f"rank {rank} has no prediction: {failure.error}", file=sys.stderr)
        if failure.traceback:
            print(failure.traceback, file=sys.stderr)
    known = [rank for rank in shown if rank in predicted or rank in measured]
    if not known:
        raise DrivetrainError(
            "; ".join(f"rank {rank}: {one.error}" for rank, one in sorted(failures.items()))
        )
    launch = LaunchFacts(world_size=world_size)
    document = _document(shown, predicted, measured, failures, config, launch, step)
    _write(run, figure, document, known[0], predicted, measured)
    # What was asked for is not all there, as in `check --dry-run`.
    code = 1 if failures else 0
    if as_json:
        show_document(document)
        return code
    for rank in known:
        print(memory_text(predicted.get(rank), measured.get(rank)))
    for line in _advice(_of_first(shown, predicted, measured), config, launch):
        print(line)
    return code


def _refuse_no_place(figure: Path | None) -> None:
    """Before anything is run: there is a folder for the figure, and it overwrites nothing but a figure.

    Raises:
        DrivetrainError: it cannot be written there, or should not be.
    """
    if figure is None:
        return
    if figure.suffix.lower() != ".svg":
        raise DrivetrainError(f"--figure {figure}: the figure is an SVG; name it {figure}.svg, say")
    if not figure.parent.is_dir():
        raise DrivetrainError(f"--figure {figure}: there is no folder {figure.parent}; make it first")


def _former_run(
    source: str, overrides: Sequence[str], num_processes: int | None, measure: bool
) -> Run | None:
    """The run that ``source`` is; None: it is a configuration.

    Raises:
        DrivetrainError: what was given does not go with a run.
    """
    if not Path(source).is_dir():
        return None
    run = open_run(Path(source))
    if overrides or num_processes is not None or measure:
        given = overrides[0] if overrides else "--devices" if num_processes is not None else "--measure"
        raise DrivetrainError(
            f"{given} has no effect on a run that is there; of its configuration: drivetrain memory "
            f"{run.path / 'config.toml'}"
        )
    return run


def _refuse_broken_rules(loaded: LoadedConfig, world_size: int) -> None:
    from drivetrain.cli.train_command import refuse_broken_rules

    refuse_broken_rules(loaded, world_size)


def _measured_run(source: str, overrides: Sequence[str], world_size: int) -> Run | None:
    """A new run of a few steps, with a window whose allocations are recorded; None: it did not come that far."""
    from drivetrain.cli.profile_command import with_window
    from drivetrain.cli.train_command import refuse_broken_rules, train_new_run

    given = {one.partition("=")[0].strip() for one in overrides}
    if "profiler.profile_memory" in given:
        raise DrivetrainError(
            "profiler.profile_memory is set by `drivetrain memory --measure` itself; leave it out"
        )
    loaded = with_window(source, None, [*overrides, "profiler.profile_memory=true"], _STEPS, None)
    refuse_broken_rules(loaded, world_size)
    print(f"a new run of {loaded.config.training.train_iters} steps", file=sys.stderr)
    path, summary = train_new_run(loaded, world_size)
    if summary is None or summary["status"] != "finished":
        return None
    return open_run(path)


def _measured(run: Run) -> tuple[dict[int, MemoryByCategory], int]:
    """What each profiled rank held, and in which step.

    Raises:
        DrivetrainError: nothing was profiled, or not its memory.
    """
    from drivetrain.trace.memory import read_memory

    window = newest_window(run)
    if window is None:
        raise RunError(
            f"{run.path} was not profiled, so that nothing of its memory was recorded; have some steps of its "
            f"configuration measured: drivetrain memory {run.path / 'config.toml'} --measure"
        )
    folder = run.path / str(window["path"])
    found = [read_memory(folder / name) for name in sorted(window["file_bytes"])]
    return {one.rank: one for one in found}, int(window["last"])


def _chosen(ranks: Sequence[int], known: Sequence[int], *, of_run: bool) -> list[int]:
    for rank in ranks:
        if of_run and rank not in known:
            there = ", ".join(map(str, known))
            raise DrivetrainError(f"--ranks {rank}: that rank was not profiled; those that were: {there}")
    return list(dict.fromkeys(ranks))


def _predicted(
    config: RunConfig, world_size: int, ranks: Sequence[int], step: int
) -> tuple[dict[int, MemoryByCategory], dict[int, "Failure"]]:
    """The predictions, and why there is none of some ranks."""
    from drivetrain.engine.memory.predict_ranks import predict_ranks

    documents = _documents(config, world_size, ranks, step)

    def progress(done: int) -> None:
        if done < len(ranks):
            print(f"predicted: {done} of {len(ranks)} ranks", file=sys.stderr, flush=True)

    answers = predict_ranks(config, world_size, ranks, documents, progress=progress)
    predicted = {rank: one for rank, one in answers.items() if isinstance(one, MemoryByCategory)}
    failures = {rank: one for rank, one in answers.items() if not isinstance(one, MemoryByCategory)}
    return predicted, failures


def _documents(
    config: RunConfig, world_size: int, ranks: Sequence[int], step: int
) -> Mapping[int, Sequence[Sequence[int]]]:
    """The documents of that step, where the corpus is there: attention keeps more of several in a row than of one."""
    from drivetrain.engine.data.corpus import ensure_corpus
    from drivetrain.engine.memory.predict_ranks import documents_of_step

    if config.data.data_path is None:
        return {}
    try:
        return documents_of_step(config, world_size, ranks, ensure_corpus(config.data, config.model), step)
    except DrivetrainError as error:
        print(f"each row is taken for one document: {error}", file=sys.stderr)
        return {}


def _of_first(
    shown: Sequence[int],
    predicted: Mapping[int, MemoryByCategory],
    measured: Mapping[int, MemoryByCategory],
) -> MemoryByCategory:
    """What was measured, or else predicted, of the first rank of which anything is known."""
    return next(one for rank in shown for one in (measured.get(rank), predicted.get(rank)) if one is not None)


def _document(
    shown: Sequence[int],
    predicted: Mapping[int, MemoryByCategory],
    measured: Mapping[int, MemoryByCategory],
    failures: Mapping[int, "Failure"],
    config: RunConfig,
    launch: LaunchFacts,
    step: int | None,
) -> dict[str, Any]:
    ranks = []
    for rank in shown:
        guess, found = predicted.get(rank), measured.get(rank)
        ranks.append(
            {
                "rank": rank,
                "predicted": None if guess is None else guess.to_document(),
                "measured": None if found is None else found.to_document(),
                "deviations": {
                    one.category: {
                        "predicted": one.predicted,
                        "measured": one.measured,
                        "relative": one.relative,
                    }
                    for one in (deviations(guess, found) if guess is not None and found is not None else ())
                },
            }
        )
    advice = suggestions(_of_first(shown, predicted, measured), config, launch)
    return {
        "schema": SCHEMA,
        "step": step,
        "ranks": ranks,
        "failed": [
            {"rank": rank, "error": failure.error, "traceback": failure.traceback}
            for rank, failure in sorted(failures.items())
        ],
        "suggestions": [one.to_document() for one in advice],
    }


def _write(
    run: Run | None,
    figure: Path | None,
    document: Mapping[str, Any],
    first: int,
    predicted: Mapping[int, MemoryByCategory],
    measured: Mapping[int, MemoryByCategory],
) -> None:
    known = [one for one in (predicted.get(first), measured.get(first)) if one is not None]
    places = [figure] if figure is not None else []
    if run is not None:
        write_json(run.path / _FILE, document)
        print(f"wrote {run.path / _FILE}", file=sys.stderr)
        places.append(run.path / _FIGURE)
    for place in places:
        title = f"Memory of {run.name}" if run is not None else "Memory"
        write_text(place, memory_svg(known, title))
        print(f"wrote {place}", file=sys.stderr)


def _advice(memory: MemoryByCategory, config: RunConfig, launch: LaunchFacts) -> list[str]:
    return ["what the largest categories suggest", *map(_advice_line, suggestions(memory, config, launch))]


def _advice_line(one: Suggestion) -> str:
    change = "".join(f" {name}={value}" for name, value in (one.change or {}).items())
    return f"  {one.category} ({one.share:.0%}): {one.by}:{change or ' no change'}; {one.note}"
