"""``drivetrain ops tune | tuned``: choose backends for a configuration offline, and show what was chosen."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drivetrain.cli.duration import seconds_of_duration
from drivetrain.cli.environment import require_packages, require_torch
from drivetrain.cli.output import show_document
from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.engine.ops.tuned_file import Entry, TunedFile
    from drivetrain.engine.ops_tuning.session import Report

__all__ = ["TUNED_HELP", "TUNE_HELP", "tune", "tuned"]

TUNE_HELP = """Choose the backend of each operator that a configuration calls, and write the choices to a file.

Records the calls of a step, grades each backend against float64 in a process of its own, times those that are right
side by side, and keeps the simplest that no other beats for certain. Runs read the file and never tune. Stopped and
started again, it goes on where it was. Exits with 1 where no backend of a call is right.

Of a configuration with tensor parallelism it tunes, on all ranks at once, into how many chunks the collectives of a
layer are cut (overlap.tp_chunks = tuned): on --nproc processes of this machine, or as one of the ranks that torchrun or
a lab has started.

\b
Example:
  drivetrain ops tune llama-50m --budget 10m
"""

TUNED_HELP = """Show a tuned file, and whether a run on this machine would use it. Exits with 1 where it would not.

\b
Example:
  drivetrain ops tuned
"""

_NO = 1
_CHUNKS = "tp_chunks"
_LEAST_BUDGET_S = 1.0
_AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def tune(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A preset or a TOML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Fields to change.")
    ] = None,
    budget: Annotated[str, typer.Option("--budget", help="Wall time: 90s, 10m, 1h30m.")] = "10m",
    output: Annotated[
        str | None,
        typer.Option("--output", metavar="FILE", help="Instead of the file that runs here read by default."),
    ] = None,
    operator: Annotated[
        list[str] | None, typer.Option("--operator", metavar="NAME", help="Only this one (repeatable).")
    ] = None,
    nproc: Annotated[
        int, typer.Option("--nproc", min=1, help="Processes of a run on this machine, which share its cores.")
    ] = 1,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Begin anew, whatever the file holds; with --operator, these alone."),
    ] = False,
    json: _AsJson = False,
) -> None:
    require_torch()
    from drivetrain.cli.data import show_progress
    from drivetrain.cli.ops_tune_chunks import chunks_tuned
    from drivetrain.cli.train_command import refuse_broken_rules
    from drivetrain.config import least_processes, load_config
    from drivetrain.engine.ops.tuned_file import tuned_path
    from drivetrain.engine.ops_tuning.session import Settings, tune_configuration

    budget_s = seconds_of_duration("--budget", budget)
    if budget_s < _LEAST_BUDGET_S:
        raise DrivetrainError(
            f"--budget {budget} is too small to try anything; the least is {_LEAST_BUDGET_S:g}s"
        )
    loaded = load_config(config, overrides or [])
    path = tuned_path() if output is None else Path(output)
    if loaded.config.parallelism.tensor_model_parallel_size > 1 and set(operator or ()) <= {_CHUNKS}:
        of_chunks = chunks_tuned(loaded, path, nproc, budget_s, _say, fresh=fresh, as_json=json)
        if of_chunks is not None:
            _show(of_chunks, as_json=json)
        return
    refuse_broken_rules(loaded, max(nproc, least_processes(loaded.config)))
    settings = Settings(budget_s=budget_s, local_processes=nproc, fresh=fresh)
    _say(f"ops tune: {path}")
    with show_progress() as preparing:
        report = tune_configuration(
            loaded.config, settings, path, only=operator or (), progress=_say, preparing=preparing
        )
    _show(report, as_json=json)
    if any(one.status == "failed" for one in report.outcomes):
        raise typer.Exit(_NO)


def tuned(
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="Instead of the file that runs here read.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Compute threads of the run.  [default: all cores]")
    ] = None,
    json: _AsJson = False,
) -> None:
    require_packages("torch")
    from drivetrain.config import RunSectionConfig
    from drivetrain.engine.devices import select_device, thread_count
    from drivetrain.engine.ops.tuned_file import TunedFile, environment_here, tuned_path

    run = RunSectionConfig(num_threads=threads)
    here = environment_here(select_device(run), thread_count(run, 1))
    found = TunedFile.read(tuned_path() if file is None else file, environment=here)
    if json:
        show_document(_file_document(found))
    else:
        _show_file(found)
    if found.problems:
        raise typer.Exit(_NO)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(report: "Report", *, as_json: bool) -> None:
    if as_json:
        show_document(_report_document(report))
    else:
        _show_report(report)


def _times(entry: "Entry") -> dict[str, float]:
    return {one.backend: one.seconds for one in entry.candidate if one.seconds is not None}


def _ratio(entry: "Entry") -> float | None:
    """Eager's time over that of the choice; None where they were not timed."""
    times = _times(entry)
    if entry.backend not in times or "eager" not in times:
        return None
    return times["eager"] / times[entry.backend]


def _totals(entries: Sequence["Entry"]) -> dict[str, float]:
    """Seconds a step of all calls that were timed: as chosen, and by one backend wherever it was timed, else eager."""
    timed = [(one, _times(one)) for one in entries if _ratio(one) is not None]
    names = dict.fromkeys(name for _, times in timed for name in times)
    totals = {"as chosen": sum(one.calls_per_step * times[one.backend] for one, times in timed)}
    for name in names:
        totals[name] = sum(one.calls_per_step * times.get(name, times["eager"]) for one, times in timed)
    return totals


def _report_document(report: "Report") -> dict[str, Any]:
    entries = [one.entry for one in report.outcomes if one.entry is not None]
    return {
        "path": str(report.path),
        "environment": report.environment,
        "dropped": report.dropped,
        "complete": all(one.status in ("tuned", "kept") for one in report.outcomes),
        "seconds_per_step": _totals(entries),
        "calls": [
            {
                "operator": one.operator,
                "call": one.call,
                "tokens": one.tokens,
                "calls_per_step": one.calls_per_step,
                "status": one.status,
                "reason": one.reason or (None if one.entry is None else one.entry.reason),
                "backend": None if one.entry is None else one.entry.backend,
                "ratio_to_eager": None if one.entry is None else _ratio(one.entry),
                "candidates": []
                if one.entry is None
                else [candidate.model_dump(mode="json") for candidate in one.entry.candidate],
            }
            for one in report.outcomes
        ],
    }


def _file_document(found: "TunedFile") -> dict[str, Any]:
    return {
        "path": str(found.path),
        "hash": found.hash,
        "valid": not found.problems,
        "problems": list(found.problems),
        "environment": dict(found.environment),
        "entries": [
            {
                **one.model_dump(mode="json"),
                "ratio_to_eager": _ratio(one),
                "stale": one in found.stale,
            }
            for one in found.entries
        ],
    }


def _show_report(report: "Report") -> None:
    entries = [one.entry for one in report.outcomes if one.entry is not None]
    _show_entries(entries)
    _show_totals(entries)
    for status, said in (
        ("not reached", "not reached within the budget, and not written; run it again to go on"),
        ("failed", "FAILED: no choice was made"),
        ("left out", "left out"),
    ):
        for one in report.outcomes:
            if one.status == status:
                print(f"{said}: {one.call}; {one.tokens} tokens{f': {one.reason}' if one.reason else ''}")
    if report.dropped:
        print(f"{report.dropped} entries of the file were of code that has changed, and are dropped")
    if entries:
        print(f"written: {report.path}")


def _show_file(found: "TunedFile") -> None:
    print(f"{found.path}, SHA-256 {found.hash}")
    print("  " + ", ".join(f"{name} {value}" for name, value in found.environment.items() if value != "none"))
    _show_entries(found.entries)
    _show_totals(found.entries, " of each configuration in the file, together")
    for problem in found.problems:
        print(f"- {problem}")
    if not found.problems:
        print("valid here")


def _show_entries(entries: Sequence["Entry"]) -> None:
    from rich.table import Table

    from drivetrain.cli.runs import print_table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("operator", "choice", "to eager", "times in ms", "tokens", "calls/step", "arguments"):
        table.add_column(heading, no_wrap=True)
    for one in entries:
        ratio = _ratio(one)
        times = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in _times(one).items())
        table.add_row(
            one.operator,
            one.backend,
            "" if ratio is None else f"{ratio:.2f}x",
            times or one.reason,
            str(one.tokens),
            f"{one.calls_per_step:g}",
            one.call.partition(": ")[2],
        )
    print_table(table)


def _show_totals(entries: Sequence["Entry"], whose: str = "") -> None:
    totals = _totals(entries)
    if totals["as chosen"]:
        print(f"what was timed, in ms for a step{whose} (a backend wherever it can serve, else eager):")
        print("  " + ", ".join(f"{name} {seconds * 1e3:,.1f}" for name, seconds in totals.items()))
