"""``drivetrain bench gemm | memory | comm``: measure the ceilings of this machine, and its links."""

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from drivetrain.cli.bench_comm import COMM_HELP, comm
from drivetrain.cli.environment import require_packages
from drivetrain.cli.output import show_document
from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.engine.ceilings import Progress, Report, StoredCeiling
    from drivetrain.engine.devices import Device
    from drivetrain.measure.ceilings import CeilingEntry

__all__ = ["parse_duration", "register"]

_HELP = "Measure what this machine sustains; MFU on a CPU is counted against it."

_GEMM_HELP = """Sustained dense matrix product, in FLOP/s, for each dtype.

The ceiling is the median rate of the seconds it is sustained for. Run it on an idle machine, with as many
threads as a process of the run will have.

\b
Example:
  drivetrain bench gemm --sustain 300s --dtype bf16 --threads 2
"""

_MEMORY_HELP = """Sustained memory traffic on arrays far larger than the caches, in bytes per second.

Counted are the bytes a program reads and writes, as STREAM does.

\b
Example:
  drivetrain bench memory --sustain 20s
"""

_Sustain = Annotated[str, typer.Option(help="How long to sustain: 20, 20s, 5m.")]
_Threads = Annotated[
    int | None,
    typer.Option(
        min=1, max=4096, help="Compute threads on a CPU. Default: the usable cores.", show_default=False
    ),
]
_OnDevice = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
_Force = Annotated[
    bool, typer.Option("--force", help="Let a disturbed measurement replace an undisturbed one.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]

Measure = Callable[["Device", int, "Report"], "CeilingEntry"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    bench.command("gemm", help=_GEMM_HELP)(gemm)
    bench.command("memory", help=_MEMORY_HELP)(memory)
    bench.command("comm", help=COMM_HELP)(comm)
    app.add_typer(bench, name="bench", help=_HELP)


def gemm(
    sustain: _Sustain = "20s",
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="bf16, fp16 or fp32; may be repeated. Default: bf16 and fp32.", show_default=False),
    ] = None,
    threads: _Threads = None,
    device: _OnDevice = "auto",
    force: _Force = False,
    as_json: _AsJson = False,
) -> None:
    """Sustained dense matrix product."""
    seconds = parse_duration(sustain)
    require_packages("torch")
    from drivetrain.engine.ceilings import MATMUL_DTYPES, measure_matmul

    dtypes = dtype or ["bf16", "fp32"]
    for name in dtypes:
        if name not in MATMUL_DTYPES:
            raise DrivetrainError(f"--dtype {name!r}: one of {', '.join(MATMUL_DTYPES)}")

    def of(name: str) -> Measure:
        return lambda where, count, report: measure_matmul(
            name, seconds, count, where, command=_command_line(), report=report
        )

    _run([of(name) for name in dict.fromkeys(dtypes)], device, threads, force, as_json)


def memory(
    sustain: _Sustain = "20s",
    threads: _Threads = None,
    device: _OnDevice = "auto",
    force: _Force = False,
    as_json: _AsJson = False,
) -> None:
    """Sustained memory traffic."""
    seconds = parse_duration(sustain)
    require_packages("torch")
    from drivetrain.engine.ceilings import measure_memory

    def measure(where: "Device", count: int, report: "Report") -> "CeilingEntry":
        return measure_memory(seconds, count, where, command=_command_line(), report=report)

    _run([measure], device, threads, force, as_json)


def parse_duration(text: str) -> float:
    """Seconds in ``20``, ``20s``, ``1.5m``, ``1h``.

    Raises:
        DrivetrainError: something else, not above zero, or more than a day.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([smh]?)\s*", text)
    seconds = float(found.group(1)) * {"": 1, "s": 1, "m": 60, "h": 3600}[found.group(2)] if found else 0.0
    if not 0 < seconds <= 86400:
        raise DrivetrainError(
            f"--sustain {text!r}: a time above zero and up to a day, for example 20, 20s or 5m"
        )
    return seconds


def _command_line() -> str:
    return shlex.join(["drivetrain", *sys.argv[1:]])


def _run(
    measures: Sequence[Measure], device_type: str, threads: int | None, force: bool, as_json: bool
) -> None:
    """Measure and store one after another; then print them all."""
    from drivetrain.config.operation import RunSectionConfig
    from drivetrain.engine.ceilings import store_ceiling
    from drivetrain.engine.devices import select_device, thread_count

    if device_type not in ("auto", "cpu", "cuda"):
        raise DrivetrainError(f"--device {device_type!r}: one of auto, cpu, cuda")
    run = RunSectionConfig(device=cast(Literal["auto", "cpu", "cuda"], device_type), num_threads=threads)
    device = select_device(run)
    count = thread_count(run, local_world_size=1)
    stored = []
    progress = _ProgressLine()
    try:
        for measure in measures:
            entry = measure(device, count, progress)
            progress.end()
            stored.append((entry, store_ceiling(entry, force=force)))
    except KeyboardInterrupt:
        progress.end()
        typer.echo(f"interrupted: {len(stored)} of {len(measures)} ceilings were finished", err=True)
        raise typer.Exit(130) from None
    for entry, where in stored:
        for line in _warnings(entry, where):
            typer.echo(f"warning: {entry.kind} {entry.dtype}: {line}", err=True)
    _print(stored, as_json)


def _warnings(entry: "CeilingEntry", where: "StoredCeiling") -> Iterator[str]:
    for doubt in entry.doubts:
        yield f"{doubt}; measure again on an idle machine"
    if not where.stored and where.former is not None:
        yield f"not stored: the undisturbed one is kept ({where.former.source}); --force replaces it"


class _ProgressLine:
    """Progress on stderr: one line that is rewritten on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._reports = 0

    def __call__(self, progress: "Progress") -> None:
        scale, unit = (1e12, "TFLOP/s") if "@" in progress.what else (1e9, "GB/s")
        done = f"{progress.done:.0f}/{progress.total:.0f}{' s' if progress.phase == 'sustain' else ''}"
        rate = f"{progress.rate / scale:.3f} {unit}"
        line = f"{progress.phase:<8} {done:<9} {rate}  {progress.what}"
        self._reports += 1
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
        elif self._reports % 10 == 1 or progress.done >= progress.total:
            sys.stderr.write(line + "\n")

    def end(self) -> None:
        """Leave the line."""
        if self._terminal and self._reports:
            sys.stderr.write("\n")
        self._reports = 0


def _print(stored: "Sequence[tuple[CeilingEntry, StoredCeiling]]", as_json: bool) -> None:
    if as_json:
        show_document({"schema": 1, "ceilings": [_document(*one) for one in stored]})
        return
    typer.echo("ceiling dtype threads        median           p10           p90  how")
    for entry, where in stored:
        rates = " ".join(
            f"{_amount(entry, rate):>13}" for rate in (entry.value, entry.rate_p10, entry.rate_p90)
        )
        how = f"{entry.method}, {'x'.join(map(str, entry.shape))}, {entry.seconds:.3g} s"
        typer.echo(f"{entry.kind:<7} {entry.dtype:<5} {entry.num_threads or '':<7} {rates}  {how}")
        if where.former is not None:
            relation = "in place of" if where.stored else "not stored; kept is"
            typer.echo(f"        {relation} {_amount(entry, where.former.value)}, {where.former.source}")
    entry, where = stored[0]
    typer.echo(f"{entry.device}; kept in {where.path}")


def _amount(entry: "CeilingEntry", value: float) -> str:
    return f"{value / 1e12:.3f} TFLOP/s" if entry.kind == "matmul" else f"{value / 1e9:.1f} GB/s"


def _document(entry: "CeilingEntry", where: "StoredCeiling") -> dict[str, Any]:
    return {
        **entry.model_dump(mode="json"),
        "unit": entry.unit,
        "source": entry.source,
        "doubts": list(entry.doubts),
        "path": str(where.path),
        "stored": where.stored,
        "former_value": None if where.former is None else where.former.value,
    }
