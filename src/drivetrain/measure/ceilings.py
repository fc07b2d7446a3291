"""What this machine was measured to sustain: matrix products in FLOP/s, memory in bytes per second.

The figures lie in ``<cache>/<machine>/ceilings.json``; the folder's name identifies host, processor and GPUs
(:func:`drivetrain.measure.machine.machine_name`), so a run on another machine never reads them. Here they
are read; ``engine/ceilings.py`` measures and writes them. ``docs/ceilings.md`` says how, and what they mean.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drivetrain.errors import EnvironmentFault
from drivetrain.measure.machine import cache_folder, machine_name
from drivetrain.measure.peaks import Peak

__all__ = ["CEILINGS_SCHEMA", "CeilingEntry", "Ceilings", "ceilings_path", "load_ceilings"]

CEILINGS_SCHEMA = 1
"""Version of the file's layout. An older reader refuses a newer file."""

_AGAIN = "delete it and measure again: drivetrain bench gemm"


LEAST_SHARE = 0.8
"""Share of its cores' time a measurement must have got to count as a ceiling: MFU against less would flatter."""


class CeilingEntry(BaseModel):
    """One measured ceiling, with everything that decides whether it may be compared."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["matmul", "memory"]
    """What was sustained: dense matrix products, or reading and writing memory."""
    device: str = Field(min_length=1)
    """The device's model name."""
    dtype: str = Field(min_length=1)
    """Operands' dtype: ``bf16``, ``fp16``, ``fp32``."""
    num_threads: int | None = Field(ge=1)
    """Compute threads on a CPU; None on other devices."""
    value: float = Field(gt=0)
    """Median of the rates below: FLOP/s (matmul) or bytes per second (memory)."""
    method: str
    """The operation that was repeated."""
    shape: tuple[int, ...]
    """matmul: (m, k, n). memory: (elements of one array,)."""
    seconds: float = Field(gt=0)
    """How long it was sustained."""
    rate_p10: float = Field(gt=0)
    """10th percentile of the rates of successive intervals."""
    rate_p90: float = Field(gt=0)
    """90th percentile of the rates of successive intervals."""
    intervals: int = Field(ge=1)
    """How many intervals there are."""
    interval_seconds: float = Field(gt=0)
    """Length of an interval: a second, less where little was sustained."""
    cpu_share: float | None = Field(ge=0)
    """Processor time received over time x threads. Well below 1: others used the cores. None on a GPU."""
    load_average: float | None = Field(ge=0)
    """Runnable processes of the machine in the minute before the start."""
    torch_version: str
    date: str = Field(pattern=r"^\d{4}-\d\d-\d\dT")
    """Start, ISO 8601 in UTC."""
    command: str
    """The command line that measured it."""

    @property
    def key(self) -> tuple[str, str, str, int | None]:
        """What a newer measurement of the same replaces."""
        return (self.kind, self.device, self.dtype, self.num_threads)

    @property
    def unit(self) -> str:
        """Unit of the rates."""
        return "FLOP/s" if self.kind == "matmul" else "B/s"

    @property
    def source(self) -> str:
        """How the value came about, in one line."""
        what = "matrix product" if self.kind == "matmul" else "memory traffic"
        parts = [
            f"measured sustained {what}",
            f"{self.seconds:.3g} s",
            f"{self.dtype} {'x'.join(map(str, self.shape))}",
        ]
        if self.num_threads is not None:
            parts.append(f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}")
        doubts = f" (doubtful: {'; '.join(self.doubts)})" if self.doubts else ""
        return ", ".join([*parts, self.date[:10]]) + doubts

    @property
    def is_ceiling(self) -> bool:
        """False where so little of the machine was free that the rate says nothing about what it can do."""
        return self.cpu_share is None or self.cpu_share >= LEAST_SHARE

    @property
    def doubts(self) -> tuple[str, ...]:
        """Signs that the machine was busy with something else while this was measured."""
        doubts = []
        if self.cpu_share is not None and self.cpu_share < 0.95:
            doubts.append(f"got only {self.cpu_share:.0%} of its cores: other processes were running")
        if self.rate_p10 < 0.9 * self.rate_p90:
            doubts.append(
                f"a tenth of the time it ran at {self.rate_p10 / self.rate_p90:.0%} of its best tenth"
            )
        return tuple(doubts)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The measured ceilings of this machine."""

    path: Path
    """The file they were read from; it need not exist."""
    entries: tuple[CeilingEntry, ...]

    def find(
        self, kind: Literal["matmul", "memory"], device: str, dtype: str, num_threads: int | None
    ) -> CeilingEntry | None:
        """The measurement of exactly this, or None. A figure for other threads or dtypes never stands in."""
        wanted = (kind, device, dtype, num_threads)
        return next((entry for entry in self.entries if entry.key == wanted), None)

    def matmul_flops(self, device_name: str, dtype: str, num_threads: int | None) -> Peak | None:
        """Sustained matrix product in FLOP/s of one device (a CPU: with so many threads), or None.

        A rate that was measured with less than ``LEAST_SHARE`` of the cores is no ceiling: None.
        """
        return _peak(self.find("matmul", device_name, dtype, num_threads))

    def memory_bandwidth(self, device_name: str, num_threads: int | None) -> Peak | None:
        """Sustained memory traffic in bytes per second, read + written, or None."""
        return _peak(self.find("memory", device_name, "fp32", num_threads))


def _peak(entry: CeilingEntry | None) -> Peak | None:
    return None if entry is None or not entry.is_ceiling else Peak(entry.value, entry.source)


def ceilings_path(cache_dir: Path | str | None = None) -> Path:
    """Where this machine's ceilings are kept: in `cache_dir`, which is the cache folder when absent."""
    base = cache_folder() if cache_dir is None else Path(cache_dir)
    return base / machine_name() / "ceilings.json"


def load_ceilings(cache_dir: Path | str | None = None) -> Ceilings:
    """The ceilings of this machine; none where nothing was measured yet.

    Raises:
        EnvironmentFault: the file is there and cannot be read, is damaged, or is of a newer version.
    """
    path = ceilings_path(cache_dir)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Ceilings(path, ())
    except OSError as error:
        raise EnvironmentFault(
            f"cannot read the measured ceilings {path}: {error.strerror}; "
            "mend that, or set DRIVETRAIN_CACHE to another folder"
        ) from error
    return Ceilings(path, _entries(path, content))


def _entries(path: Path, content: bytes) -> tuple[CeilingEntry, ...]:
    try:
        document = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise EnvironmentFault(f"the measured ceilings {path} are damaged ({error}); {_AGAIN}") from error
    if not isinstance(document, dict) or not isinstance(document.get("schema"), int):
        raise EnvironmentFault(f"the measured ceilings {path} are damaged (no schema version); {_AGAIN}")
    if document["schema"] > CEILINGS_SCHEMA:
        raise EnvironmentFault(
            f"the measured ceilings {path} were written by a newer Drivetrain (schema {document['schema']}; "
            f"this one reads {CEILINGS_SCHEMA}); update Drivetrain, or {_AGAIN}"
        )
    listed = document.get("entries")
    if not isinstance(listed, list):
        raise EnvironmentFault(f"the measured ceilings {path} are damaged (no list of entries); {_AGAIN}")
    entries = []
    for index, entry in enumerate(listed):
        try:
            entries.append(CeilingEntry.model_validate_json(orjson.dumps(entry)))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "entry"
            raise EnvironmentFault(
                f"the measured ceilings {path} are damaged (entry {index}, {field}: {first['msg']}); {_AGAIN}"
            ) from error
    return tuple(entries)
