"""Measure what this machine sustains: dense matrix products, and memory traffic.

The ceiling is the median of the rates of successive seconds, not the best one. The best second is one in
which the clock was at its highest and nobody else ran; a training job never gets a whole hour of those, so
a ceiling made of it would charge the job for the machine. On a shared machine the median falls with the
share of the cores one gets: such an entry keeps the share and the load, and says that it is doubtful.
"""

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from drivetrain.archive.atomic import write_json
from drivetrain.engine.devices import Device
from drivetrain.errors import DrivetrainError, EnvironmentFault
from drivetrain.measure.ceilings import CEILINGS_SCHEMA, CeilingEntry, load_ceilings
from drivetrain.measure.machine import available_memory, load_average, total_l3_bytes

__all__ = [
    "CPU_SHAPES",
    "CUDA_SHAPES",
    "MATMUL_DTYPES",
    "MatmulShape",
    "Progress",
    "StoredCeiling",
    "measure_matmul",
    "measure_memory",
    "store_ceiling",
]

MATMUL_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Dtypes that can be measured. fp32 is true fp32: torch rounds to tf32 only where it was asked to."""


class MatmulShape(NamedTuple):
    """(m, k) times (k, n): tokens, features in, features out."""

    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        """FLOPs of one product."""
        return 2 * self.m * self.k * self.n


CPU_SHAPES = (
    MatmulShape(1024, 1024, 1024),
    MatmulShape(2048, 2048, 2048),
    MatmulShape(4096, 4096, 4096),
    MatmulShape(4096, 768, 3072),
    MatmulShape(4096, 4096, 1024),
    MatmulShape(2048, 1024, 4096),
)
"""Candidates on a CPU: squares, and layers of small language models."""
CUDA_SHAPES = (
    MatmulShape(4096, 4096, 4096),
    MatmulShape(8192, 8192, 8192),
    MatmulShape(16384, 8192, 8192),
    MatmulShape(8192, 4096, 14336),
    MatmulShape(16384, 4096, 4096),
    MatmulShape(16384, 16384, 16384),
)
"""Candidates on a GPU: squares, and layers of language models from 7B."""

_SEARCH_SECONDS = 0.3
_BATCH_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    """What a measurement is doing; reported for each candidate and each second."""

    phase: Literal["search", "sustain"]
    done: float
    """Candidates tried, or seconds sustained."""
    total: float
    rate: float
    """FLOP/s or bytes per second of the last candidate or interval."""
    what: str
    """The operation and its shape."""


Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class _Work:
    """Something to repeat. ``amount``: FLOPs or bytes of one call."""

    run: Callable[[], object]
    amount: int
    method: str
    shape: tuple[int, ...]

    @property
    def what(self) -> str:
        return f"{self.method}, {'x'.join(map(str, self.shape))}"


@dataclass(frozen=True, slots=True)
class _Sustained:
    rates: tuple[float, ...]
    seconds: float
    interval: float
    cpu_share: float | None


def measure_matmul(
    dtype: str,
    sustain_s: float,
    num_threads: int,
    device: Device,
    *,
    shapes: Sequence[MatmulShape] | None = None,
    command: str = "",
    report: Report | None = None,
) -> CeilingEntry:
    """Sustained dense matrix product of `device`.

    A short search over `shapes`, each with both layouts of the second operand, finds the fastest; that one
    then runs for `sustain_s` seconds. The result goes into memory that is already there, so no allocation is
    timed. Operands are random: a GPU draws less power, and clocks higher, on zeros.

    Args:
        dtype: a key of ``MATMUL_DTYPES``.
        sustain_s: seconds; 20 is enough for a CPU's clock to settle, a GPU's may take minutes.
        num_threads: compute threads on a CPU.
        device: see ``engine/devices.py``.
        shapes: candidates; ``CPU_SHAPES`` or ``CUDA_SHAPES`` when absent.
        command: recorded in the entry.
        report: called for each candidate and each second.

    Raises:
        DrivetrainError: unknown dtype.
        EnvironmentFault: no candidate fits into the device's memory.
        KeyboardInterrupt: passed on; nothing was stored.
    """
    if dtype not in MATMUL_DTYPES:
        raise DrivetrainError(f"cannot measure dtype {dtype!r}; one of: {', '.join(MATMUL_DTYPES)}")
    candidates = shapes or (CPU_SHAPES if device.type == "cpu" else CUDA_SHAPES)
    makers = [
        lambda shape=shape, transposed=transposed: _product(shape, MATMUL_DTYPES[dtype], device, transposed)
        for shape in candidates
        for transposed in (False, True)
    ]
    return _measure("matmul", dtype, makers, sustain_s, num_threads, device, command, report)


def measure_memory(
    sustain_s: float,
    num_threads: int,
    device: Device,
    *,
    array_bytes: int | None = None,
    command: str = "",
    report: Report | None = None,
) -> CeilingEntry:
    """Sustained memory traffic of `device`, counted as STREAM does.

    Two kernels are tried, copy (``a = b``) and triad (``a = b + 3 c``), and the faster is sustained. Counted
    are the bytes the program reads and writes: 2 arrays for copy, 3 for triad. A cache that fetches a line
    before it is overwritten (write-allocate) moves up to 1.5 times as much; that traffic is not counted, so
    the figure is what a program can use, not what the bus carries.

    Args:
        sustain_s: seconds.
        num_threads: compute threads on a CPU.
        device: see ``engine/devices.py``.
        array_bytes: size of one array; when absent 4 x the last-level cache and at least 256 MiB, on a
            GPU 1 GiB.
        command: recorded in the entry.
        report: called for each candidate and each second.

    Raises:
        EnvironmentFault: three arrays do not fit into memory.
    """
    size = array_bytes or _array_bytes(device)
    free = available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device.torch_device)[0]
    if free is not None and 3 * size > 0.8 * free:
        raise EnvironmentFault(
            f"bench memory needs 3 arrays of {size:,} bytes, larger than the caches; "
            f"only {free:,} bytes are free"
        )
    arrays = [torch.full((size // 4,), float(value), device=device.torch_device) for value in (1, 2, 3)]
    a, b, c = arrays
    works = [
        _Work(lambda: a.copy_(b), 2 * size, "copy, bytes read + written", (size // 4,)),
        _Work(
            lambda: torch.add(b, c, alpha=3.0, out=a), 3 * size, "triad, bytes read + written", (size // 4,)
        ),
    ]
    makers = [lambda work=work: work for work in works]
    return _measure("memory", "fp32", makers, sustain_s, num_threads, device, command, report)


def _array_bytes(device: Device) -> int:
    if device.type == "cuda":
        return 2**30
    return max(256 * 2**20, 4 * (total_l3_bytes() or 0))


def _product(shape: MatmulShape, dtype: torch.dtype, device: Device, transposed: bool) -> _Work:
    # A generator of its own: measuring must not move the random state of whoever called.
    generator = torch.Generator(device=device.torch_device).manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device.torch_device)
        return values.to(dtype)

    m, k, n = shape
    a = matrix(m, k)
    b = matrix(n, k).t() if transposed else matrix(k, n)
    out = torch.empty(m, n, dtype=dtype, device=device.torch_device)
    method = "a(m,k) @ w(n,k).T" if transposed else "a(m,k) @ b(k,n)"
    return _Work(lambda: torch.mm(a, b, out=out), shape.flops, method, tuple(shape))


def _measure(
    kind: Literal["matmul", "memory"],
    dtype: str,
    makers: Sequence[Callable[[], _Work]],
    sustain_s: float,
    num_threads: int,
    device: Device,
    command: str,
    report: Report | None,
) -> CeilingEntry:
    load = load_average()
    started = datetime.datetime.now(datetime.UTC)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            work = _fastest(makers, device, report)
            sustained = _sustain(work, device, sustain_s, num_threads, report)
    finally:
        torch.set_num_threads(threads_before)
    low, median, high = (float(value) for value in np.percentile(sustained.rates, [10, 50, 90]))
    return CeilingEntry(
        kind=kind,
        device=device.name,
        dtype=dtype,
        num_threads=num_threads if device.type == "cpu" else None,
        value=median,
        method=work.method,
        shape=work.shape,
        seconds=sustained.seconds,
        rate_p10=low,
        rate_p90=high,
        intervals=len(sustained.rates),
        interval_seconds=sustained.interval,
        cpu_share=sustained.cpu_share,
        load_average=load,
        torch_version=str(torch.__version__),
        date=started.isoformat(timespec="seconds"),
        command=command,
    )


def _fastest(makers: Sequence[Callable[[], _Work]], device: Device, report: Report | None) -> _Work:
    """The candidate with the highest rate. Each is made, timed and dropped, so only two are ever alive."""
    best: _Work | None = None
    best_rate = 0.0
    for index, make in enumerate(makers):
        try:
            work = make()
            work.run()  # first use: kernels are chosen, pages are touched
        except torch.cuda.OutOfMemoryError:
            continue
        seconds, calls = 0.0, 0
        while seconds < _SEARCH_SECONDS:
            batch = 1 if calls == 0 else max(1, int((_SEARCH_SECONDS - seconds) / (seconds / calls) / 2))
            seconds += _timed(work.run, batch, device)
            calls += batch
        rate = work.amount * calls / seconds
        if report is not None:
            report(Progress("search", index + 1, len(makers), rate, work.what))
        if rate > best_rate:
            best, best_rate = work, rate
    if best is None:
        raise EnvironmentFault(f"no candidate fits into the memory of {device.name}; free some of it")
    return best


def _sustain(
    work: _Work, device: Device, sustain_s: float, num_threads: int, report: Report | None
) -> _Sustained:
    """Repeat `work` for `sustain_s` seconds; the rate of each successive second (or fifth, if shorter)."""
    interval = min(1.0, sustain_s / 5)
    call = max(_timed(work.run, 1, device), 1e-7)
    batch = max(1, int(min(_BATCH_SECONDS, interval / 4) / call))
    rates: list[float] = []
    total = 0.0
    cpu_start, wall_start = time.process_time(), time.perf_counter()
    while total < sustain_s:
        seconds, calls = 0.0, 0
        while seconds < interval:
            seconds += _timed(work.run, batch, device)
            calls += batch
        total += seconds
        rates.append(work.amount * calls / seconds)
        if report is not None:
            report(Progress("sustain", min(total, sustain_s), sustain_s, rates[-1], work.what))
    share = None
    if device.type == "cpu":
        share = (time.process_time() - cpu_start) / ((time.perf_counter() - wall_start) * num_threads)
    return _Sustained(tuple(rates), total, interval, share)


def _timed(run: Callable[[], object], calls: int, device: Device) -> float:
    """Seconds that `calls` calls take on the device itself."""
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - start
    # Events are stamped by the device, so the time to launch is not counted while its queue is full.
    with torch.cuda.device(device.torch_device):
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(calls):
            run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


class StoredCeiling(NamedTuple):
    """Where a ceiling was written, and what was there before."""

    path: Path
    former: CeilingEntry | None
    """The older measurement of the same."""
    stored: bool
    """False where the older one was kept: it was undisturbed and the new one is doubtful."""


def store_ceiling(
    entry: CeilingEntry, cache_dir: Path | str | None = None, *, force: bool = False
) -> StoredCeiling:
    """Write `entry` among this machine's ceilings, in place of an older measurement of the same.

    A doubtful measurement does not replace an undisturbed one unless `force`: a ceiling that is too low
    makes every MFU counted against it too high.

    Raises:
        EnvironmentFault: the file is damaged or of a newer version (it stays as it is), or cannot be written.
    """
    ceilings = load_ceilings(cache_dir)
    former = next((old for old in ceilings.entries if old.key == entry.key), None)
    if former is not None and entry.doubts and not former.doubts and not force:
        return StoredCeiling(ceilings.path, former, stored=False)
    kept = [old for old in ceilings.entries if old.key != entry.key]
    document = {
        "schema": CEILINGS_SCHEMA,
        "entries": [one.model_dump(mode="json") for one in [*kept, entry]],
    }
    try:
        ceilings.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot make the folder {ceilings.path.parent}: {error.strerror}; "
            "set DRIVETRAIN_CACHE to a folder that can be written"
        ) from error
    write_json(ceilings.path, document)
    return StoredCeiling(ceilings.path, former, stored=True)
