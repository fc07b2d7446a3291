"""Records → columns: texts interned, categories of every generation mapped, begin and end paired."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from drivetrain.trace.kineto.numbers import INVALID, integers, nanoseconds
from drivetrain.trace.kineto.records import NO_ARGUMENTS, Arguments, Record, Text
from drivetrain.trace.table import COLUMN_DTYPES, TEXT_TABLES, Category

__all__ = ["CATEGORIES", "Columns", "ColumnBuilder"]

CATEGORIES: Final = {
    "kernel": Category.KERNEL,
    "concurrent_kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "memset": Category.MEMSET,
    "cpu_op": Category.CPU_OP,
    "operator": Category.CPU_OP,
    "cuda_runtime": Category.RUNTIME,
    "cuda_driver": Category.RUNTIME,
    "runtime": Category.RUNTIME,
    "hip_runtime": Category.RUNTIME,
    "privateuse1_runtime": Category.RUNTIME,
    "privateuse1_driver": Category.RUNTIME,
    "mtia_runtime": Category.RUNTIME,
    "xpu_runtime": Category.RUNTIME,
    "xpu_driver": Category.RUNTIME,
    "user_annotation": Category.ANNOTATION,
    "gpu_user_annotation": Category.DEVICE_ANNOTATION,
    "privateuse1_user_annotation": Category.DEVICE_ANNOTATION,
    "python_function": Category.PYTHON,
    "cuda_sync": Category.SYNC,
    "overhead": Category.OVERHEAD,
    "cuda_profiler_range": Category.OVERHEAD,
    "privateuse1_concurrent_kernel": Category.KERNEL,
    "privateuse1_kernel": Category.KERNEL,
    "privateuse1_memcpy": Category.MEMCPY,
    "privateuse1_memset": Category.MEMSET,
    "xpu_kernel": Category.KERNEL,
    "xpu_memcpy": Category.MEMCPY,
    "xpu_memset": Category.MEMSET,
    "mtia_ccp_events": Category.KERNEL,
}
"""``cat`` of a record in lower case → category, 2021 to today. Everything else is ``OTHER``."""

_RANGES_OF_2021: Final = (
    "ProfilerStep#",
    "Optimizer.step#",
    "Optimizer.zero_grad#",
    "enumerate(DataLoader)#",
)
"""Names of users' ranges, which the exporters of 2021 wrote with the category of operators."""
_ON_DEVICE: Final = np.array(
    [
        category
        in (Category.KERNEL, Category.MEMCPY, Category.MEMSET, Category.DEVICE_ANNOTATION, Category.SYNC)
        for category in Category
    ]
)
_COLLECTIVE_RANGES: Final = ("gloo:", "nccl:", "xccl:", "mpi:", "ucc:")
_ELEMENT_BYTES: Final = {
    "double": 8, "float64": 8, "long": 8, "int64": 8, "long int": 8, "unsigned long": 8, "uint64": 8,
    "float": 4, "float32": 4, "int": 4, "int32": 4, "uint32": 4,
    "half": 2, "float16": 2, "bfloat16": 2, "short": 2, "int16": 2, "uint16": 2,
    "char": 1, "signed char": 1, "unsigned char": 1, "byte": 1, "int8": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip

Columns = dict[str, NDArray[Any]]


class _Ids(dict[Text | tuple[Text, Text], int]):
    """Value → its number, given out in the order of first use."""

    def __missing__(self, key: Text | tuple[Text, Text]) -> int:
        number = self[key] = len(self)
        return number

    def texts(self) -> list[str]:
        return ["" if key is None else str(key) for key in self]


class _Categories(dict[Text, int]):
    def __missing__(self, key: Text) -> int:
        category = self[key] = int(CATEGORIES.get(str(key).lower(), Category.OTHER))
        return category


def _element_bytes(dtype: object) -> int | None:
    return _ELEMENT_BYTES.get(str(dtype).lower().removeprefix("c10::").removeprefix("torch."))


def _shape_bytes(arguments: Arguments) -> int:
    """Bytes of a collective's input from its recorded shapes; -1 if they do not tell."""
    try:
        shapes = msgspec.json.decode(arguments.input_dims)
        dtypes = msgspec.json.decode(arguments.input_type)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return -1
    if (
        not isinstance(shapes, list)
        or not isinstance(dtypes, list)
        or len(shapes) != len(dtypes)
        or not shapes
    ):
        return -1
    total = 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        element = _element_bytes(dtype)
        if element is None or not isinstance(shape, list) or not all(type(size) is int for size in shape):
            return -1
        total += element * prod(shape)
    return total if 0 <= total < 1 << 62 else -1


@dataclass
class _Open:
    """A begin record that waits for its end."""

    record: Record
    index: int


class ColumnBuilder:
    """Collects the columns of piece after piece of records."""

    def __init__(self, found: Counter[str]) -> None:
        self.found = found
        self.process_names: set[str] = set()
        """Names the file gives its processes."""
        self._parts: dict[str, list[NDArray[Any]]] = {column: [] for column in COLUMN_DTYPES}
        self._documents: list[tuple[int, int]] = []
        self._names, self._processes, self._threads = _Ids(), _Ids(), _Ids()
        self._streams, self._groups = _Ids(), _Ids()
        self._categories = _Categories()
        self._open: dict[tuple[int, Text, Text], list[_Open]] = {}

    @property
    def length(self) -> int:
        """Records kept so far."""
        return sum(count for _, count in self._documents)

    def add(self, records: Sequence[Record], first: int, document: int) -> None:
        """Add records that follow each other in the file.

        Args:
            first: ordinal of the first one in the file.
            document: number of the document they are from; each has its own base time.
        """
        phases = [record.ph for record in records]
        rows = [row for row, phase in enumerate(phases) if phase == "X"]
        kept = [records[row] for row in rows]
        times = nanoseconds([record.ts for record in kept])
        durations = nanoseconds([record.dur for record in kept])
        self._append(kept, np.array(rows, dtype=np.int64) + first, times, durations, document)
        if "M" in phases:
            self.process_names.update(
                str(record.args.name)
                for record in records
                if record.ph == "M" and record.name == "process_name" and record.args is not None
            )
        if not {"B", "E"}.isdisjoint(phases):
            self._add_pairs(records, first, document)

    def _add_pairs(self, records: Sequence[Record], first: int, document: int) -> None:
        begins: list[_Open] = []
        ends: list[Record] = []
        for row, record in enumerate(records):
            if record.ph not in ("B", "E"):
                continue
            stack = self._open.setdefault((document, record.pid, record.tid), [])
            if record.ph == "B":
                stack.append(_Open(record, first + row))
            elif stack:
                begins.append(stack.pop())
                ends.append(record)
            else:
                self.found["unpaired"] += 1
        starts = nanoseconds([begin.record.ts for begin in begins])
        stops = nanoseconds([end.ts for end in ends])
        known = (starts != INVALID) & (stops != INVALID)
        durations = np.where(known, stops - np.where(known, starts, 0), INVALID)
        indices = np.array([begin.index for begin in begins], dtype=np.int64)
        self._append([begin.record for begin in begins], indices, starts, durations, document)

    def _append(
        self,
        records: Sequence[Record],
        indices: NDArray[np.int64],
        starts: NDArray[np.int64],
        durations: NDArray[np.int64],
        document: int,
    ) -> None:
        if not len(records):
            return
        missing = starts == INVALID
        if missing.any():
            self.found["missing_timestamp"] += int(missing.sum())
            kept = np.flatnonzero(~missing).tolist()
            records = [records[row] for row in kept]
            indices, starts, durations = indices[kept], starts[kept], durations[kept]
        unknown = durations == INVALID
        if unknown.any():
            self.found["missing_duration"] += int(unknown.sum())
            durations = np.where(unknown, 0, durations)
        self._documents.append((document, len(records)))
        self._store(start_ns=starts, duration_ns=durations, file_index=indices)
        self._store_texts(records)
        self._store_arguments(records, [record.args or NO_ARGUMENTS for record in records])

    def _store(self, **columns: NDArray[Any] | Sequence[int]) -> None:
        for column, values in columns.items():
            self._parts[column].append(np.asarray(values, dtype=COLUMN_DTYPES[column]))

    def _store_texts(self, records: Sequence[Record]) -> None:
        names, processes, threads, categories = self._names, self._processes, self._threads, self._categories
        self._store(
            category=[categories[record.cat] for record in records],
            name=[names[record.name] for record in records],
            process=[processes[record.pid] for record in records],
            thread=[threads[record.tid] for record in records],
        )

    def _store_arguments(self, records: Sequence[Record], arguments: Sequence[Arguments]) -> None:
        external = self._integers([one.external_id for one in arguments])
        external_2021 = self._integers([one.external_id_2021 for one in arguments])
        streams = self._streams
        self._store(
            external_id=np.where(external == -1, external_2021, external),
            correlation=self._integers([one.correlation for one in arguments]),
            sequence=self._integers([one.sequence for one in arguments]),
            device=self._device(records, arguments),
            stream=[-1 if one.stream is None else streams[one.stream] for one in arguments],
            bytes=self._payload(records, arguments),
            group=self._group(arguments),
        )

    def _integers(self, values: Sequence[object]) -> NDArray[np.int64]:
        numbers = integers(values)
        beyond = numbers == INVALID
        if beyond.any():
            self.found["integer_overflow"] += int(beyond.sum())
            numbers = np.where(beyond, -1, numbers)
        return numbers

    def _device(self, records: Sequence[Record], arguments: Sequence[Arguments]) -> NDArray[np.int64]:
        device = self._integers([one.device for one in arguments])
        on_device = _ON_DEVICE[self._parts["category"][-1]]
        unknown = np.flatnonzero(on_device & (device == -1)).tolist()
        if unknown:
            # The projections of ranges have no such argument; device records' process is the device.
            device[unknown] = self._integers([records[row].pid for row in unknown])
        fits = on_device & (device >= 0) & (device < 1 << 20)
        return np.where(fits, device, -1)

    def _payload(self, records: Sequence[Record], arguments: Sequence[Arguments]) -> NDArray[np.int64]:
        payload = self._integers([one.bytes for one in arguments])
        for row in [row for row, one in enumerate(arguments) if one.elements != -1]:
            elements, size = arguments[row].elements, _element_bytes(arguments[row].dtype)
            if payload[row] == -1 and size is not None and type(elements) is int and 0 <= elements < 1 << 58:
                payload[row] = elements * size
        for row in self._collective_ranges(records):
            if payload[row] == -1:
                payload[row] = _shape_bytes(arguments[row])
        return payload

    def _collective_ranges(self, records: Sequence[Record]) -> Iterable[int]:
        annotations = np.flatnonzero(self._parts["category"][-1] == Category.ANNOTATION).tolist()
        return [row for row in annotations if str(records[row].name).startswith(_COLLECTIVE_RANGES)]

    def _group(self, arguments: Sequence[Arguments]) -> NDArray[np.int64]:
        group = np.full(len(arguments), -1, dtype=np.int64)
        for row, one in enumerate(arguments):
            if one.group_name is not None or one.group_description is not None:
                group[row] = self._groups[one.group_name, one.group_description]
        return group

    def finish(self, bases: Sequence[int]) -> tuple[Columns, dict[str, tuple[str, ...]], NDArray[np.bool_]]:
        """Columns, text tables, and which records are at time 0. The builder is empty afterwards.

        Args:
            bases: of each document, nanoseconds to add to its times.

        Returns:
            Columns of shape (n,), in the order of the file but for pairs; text tables; mask of shape (n,).
        """
        self.found["unpaired"] += sum(len(stack) for stack in self._open.values())
        if not self.found["unpaired"]:
            del self.found["unpaired"]
        columns: Columns = {}
        for column, dtype in COLUMN_DTYPES.items():
            parts = self._parts.pop(column)
            columns[column] = np.concatenate(parts) if parts else np.empty(0, dtype)
        at_zero = columns["start_ns"] == 0
        if any(bases):
            counts = [count for _, count in self._documents]
            columns["start_ns"] = _added(
                columns["start_ns"], np.repeat([bases[one] for one, _ in self._documents], counts)
            )
        ids = (self._names, self._processes, self._threads, self._streams)
        listed = [one.texts() for one in ids]
        listed.append(["|".join("" if part is None else str(part) for part in key) for key in self._groups])  # type: ignore[union-attr]
        texts: dict[str, tuple[str, ...]] = {}
        for table, column, values in zip(
            TEXT_TABLES, ("name", "process", "thread", "stream", "group"), listed, strict=True
        ):
            texts[table] = _unique(values, columns, column)
        _mark_ranges(columns, texts["names"])
        return columns, texts, at_zero


def _added(times: NDArray[np.int64], bases: NDArray[np.int64]) -> NDArray[np.int64]:
    """Times plus bases; a damaged time that would overflow stays as it is, and is an outlier."""
    limit = np.iinfo(np.int64).max
    return np.where(times > limit - bases, times, times + bases)


def _unique(values: list[str], columns: Columns, column: str) -> tuple[str, ...]:
    """Texts once each: the number 7 and the text ``7`` are one thread."""
    if len(set(values)) == len(values):
        return tuple(values)
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    renumbered = np.array([*(numbers[value] for value in values), -1], dtype=np.int32)
    columns[column] = renumbered[columns[column]]
    return tuple(numbers)


def _mark_ranges(columns: Columns, names: tuple[str, ...]) -> None:
    is_range = np.array([name.startswith(_RANGES_OF_2021) for name in names], dtype=bool)
    if is_range.any():
        marked = (columns["category"] == Category.CPU_OP) & is_range[columns["name"]]
        columns["category"][marked] = Category.ANNOTATION
