"""Operators and a training step on one CUDA device, in a few minutes: one table, and JSON under ``--output``.

Parts, each in a process of its own, so that what breaks or hangs one costs no other: ``numerics`` (every backend over
the grid against float64), ``bandwidth`` (memory-bound operators beside a copy of the same bytes), ``loss``,
``attention`` (also over packed documents) and ``step`` (a Llama of 1.1 billion parameters, with MFU). A part that
runs out of its time says what it left out; what it has found is in its file by then.

    python benchmarks/gpu.py --seconds 300
    python benchmarks/gpu.py --part bandwidth --part step --output results/h200
    python benchmarks/gpu.py --dry

``--dry`` runs all of it on a CPU with tiny shapes, and gives no figures. The exit code is 0; 1 where a part failed or a
backend was wrong; 2 for bad input.
"""

import argparse
import contextlib
import datetime
import json
import math
import multiprocessing
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.archive.atomic import write_json, write_text
from drivetrain.errors import DrivetrainError, EnvironmentFault
from drivetrain.measure.peaks import supplied_peak
from gpu_parts.report import document_of, is_wrong, table

PARTS = {"numerics": 3.0, "bandwidth": 3.0, "loss": 1.0, "attention": 1.5, "step": 4.5}
"""In this order, with their shares of the time. What one leaves goes to those behind it."""

SECONDS, DRY_SECONDS = 300.0, 600.0
GRACE_S = 60.0
"""A part looks at its time between two calls; one that compiles then may take this much longer."""
LEAST_S = 1.0
"""With less left a part is not started."""
DEFAULT_OUTPUT = Path("runs") / "gpu"


_NOTHING: Mapping[str, Any] = {"rows": [], "left_out": [], "facts": {}, "status": "running", "error": None}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options, sys.argv[1:] if arguments is None else arguments)
    except DrivetrainError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was found so far is in the folder of the results", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="on a CPU, with tiny shapes and without figures")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="this part; may be repeated")
    parser.add_argument("--seconds", type=float, help=f"time for all parts; {SECONDS:g} by default")
    parser.add_argument(
        "--peak", type=float, help="FLOP/s that MFU is counted against, beside what is measured"
    )
    parser.add_argument(
        "--output", type=Path, help=f"folder of the results; by default $OUT if set, else {DEFAULT_OUTPUT}"
    )
    parser.add_argument(
        "--json", action="store_true", help="the JSON document on stdout, the table on stderr"
    )
    return parser


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    seconds = (DRY_SECONDS if options.dry else SECONDS) if options.seconds is None else options.seconds
    if not (math.isfinite(seconds) and seconds > 0):
        raise DrivetrainError(
            f"--seconds {seconds:g}: it is to be a positive number, for example {SECONDS:g}"
        )
    if options.peak is not None:
        supplied_peak(options.peak)
    names = [name for name in PARTS if not options.part or name in options.part]
    folder = options.output or (Path(os.environ["OUT"]) if os.environ.get("OUT") else DEFAULT_OUTPUT)
    _make(folder)
    started = time.monotonic()
    device = _device(folder, dry=options.dry)
    preload()
    parts: dict[str, Any] = {}
    head = {
        "schema": 1,
        "kind": "gpu",
        "dry": options.dry,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/gpu.py", *arguments]),
        "seconds_allowed": seconds,
        "device": device,
    }
    for number, name in enumerate(names):
        left = max(0.0, seconds - (time.monotonic() - started))
        share = left * PARTS[name] / sum(PARTS[other] for other in names[number:])
        print(f"{name}: {share:.0f} s", file=sys.stderr, flush=True)
        before = time.monotonic()
        if share < LEAST_S:
            parts[name] = {
                **_NOTHING,
                "part": name,
                "status": "left out",
                "left_out": ["all of it: time was up"],
            }
        else:
            parts[name] = _part(folder, name, share, options)
        parts[name]["seconds"] = round(time.monotonic() - before, 1)
        document = document_of(head, parts, names)
        write_json(folder / "gpu.json", document)
        write_text(folder / "gpu.txt", table(document) + "\n")
    print(table(document), file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    print(f"written to {folder / 'gpu.json'} and {folder / 'gpu.txt'}", file=sys.stderr)
    return 1 if is_wrong(document) else 0


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise EnvironmentFault(
            f"--output {folder}: {error.strerror}; give a folder that can be written"
        ) from error


def _device(folder: Path, *, dry: bool) -> dict[str, Any]:
    """What is measured. Asked in a process of its own: this one must not open the device, or its children cannot."""
    path = folder / "device.json"
    path.unlink(missing_ok=True)
    _wait(_child(_write_facts, path, dry), None)
    if not path.exists():
        raise EnvironmentFault("the process that looks at the device has failed; its last words stand above")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if found["missing"] is not None:
        raise EnvironmentFault(
            f"gpu.py needs a CUDA device: {found['missing']}; --dry runs everything on a CPU, without figures"
        )
    facts: dict[str, Any] = found["facts"]
    return facts


def _write_facts(path: Path, dry: bool) -> None:
    from gpu_parts.facts import facts, why_no_cuda

    missing = None if dry else why_no_cuda()
    write_json(path, {"missing": missing, "facts": None if missing else facts(dry)})


def _part(folder: Path, name: str, seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    """Run a part; what its file says in the end, whatever became of it."""
    path = folder / f"{name}.json"
    path.unlink(missing_ok=True)
    limit = seconds + GRACE_S
    process = _child(work, name, path, seconds, options.dry, options.peak)
    ended = _wait(process, limit)
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found = {**_NOTHING, "part": name}
    if not ended:
        found |= {
            "status": "killed",
            "error": f"it did not end within {limit:.0f} s, {seconds:.0f} of them its own",
        }
    elif found["status"] == "running":
        found |= {"status": "failed", "error": f"its process ended with {process.exitcode}"}
    return found


def preload() -> None:
    """Import what the parts need, once for all of them. Nothing may ask for the device here: no child could use it."""
    import importlib

    from drivetrain.engine.ops.discovery import operators

    for name in PARTS:
        importlib.import_module(f"gpu_parts.{name}_part")
    operators()


def _child(target: Any, *arguments: Any) -> Any:
    """Forked from a process that has imported everything and run nothing: imports would take longer than a part."""
    import torch

    assert not torch.cuda.is_initialized(), "the device was opened before the parts' processes were there"
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    sys.stdout.flush()
    process.start()
    return process


def _wait(process: Any, seconds: float | None) -> bool:
    """Whether it ended by itself; it has ended in any case."""
    try:
        process.join(seconds)
        return not process.is_alive()
    finally:
        if process.is_alive():
            _kill(process.pid)
        process.join()


def _kill(pid: int) -> None:
    """With the compilers that it has started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        # It has no group of its own yet, or has just ended.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def work(name: str, path: Path, seconds: float, dry: bool, peak: float | None) -> None:
    """In a part's process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    if dry:
        # No interpreter of kernels: it takes seconds a call.
        os.environ.pop("TRITON_INTERPRET", None)
    import importlib

    import torch

    from gpu_parts.clock import Budget, CudaClock, DryClock
    from gpu_parts.context import Context
    from gpu_parts.record import Record

    record = Record(path, name)
    record.write()
    try:
        device = torch.device("cpu") if dry else torch.device("cuda", 0)
        if dry:
            torch.set_num_threads(1)
        clock = DryClock() if dry else CudaClock(device)
        context = Context(dry, device, clock, Budget.of(seconds), record, peak)
        importlib.import_module(f"gpu_parts.{name}_part").run(context)
    except Exception:
        record.end("failed", traceback.format_exc())
        raise
    record.end("done")


if __name__ == "__main__":
    # As an exception, so that a part's process is ended with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
