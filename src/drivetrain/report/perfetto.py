"""The account as a timeline for Perfetto (ui.perfetto.dev) and Chrome's tracing page: Chrome JSON, a process a rank.

Each rank has the tracks *steps* (their windows), *account* (the class of every instant, without a gap: the slices of a
step add up to its account to the nanosecond), *exposed communication*, and *collectives*, each split into the wait for
its last rank and the transfer; and counters of the time each class has taken so far. All ranks are on one clock.

Times are decimal microseconds with three digits, so whole nanoseconds, counted from ``baseTimeNanoseconds``: a viewer
that reads numbers as floats would lose some of an absolute time.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import orjson
from isal import isal_zlib
from numpy.typing import NDArray

from drivetrain.measure.account import CLASSES
from drivetrain.trace.read import TIMELINE_KEY
from drivetrain.trace.slices import RankSplit, Slices, class_slices, last_ranks
from drivetrain.trace.steps import UNKNOWN_TIME

__all__ = ["SCHEMA", "perfetto_json"]

SCHEMA = 1
_LEVEL = 2
"""Of compression: of a timeline a higher one saves little and takes long."""
_GZIP = 31
"""Window bits that stand for a gzip header around the deflated bytes."""

_Interval = tuple[int, int]


def perfetto_json(splits: Sequence[RankSplit], *, title: str, name_table: str, compress: bool) -> bytes:
    """The timeline of some ranks of one job.

    Args:
        splits: one a rank.
        title: what it is of.
        name_table: identity of the name tables that classed the records.
        compress: gzip it.
    """
    base = min((_first_ns(split) for split in splits), default=0)
    head = {
        "schema": SCHEMA,
        TIMELINE_KEY: {
            "title": title,
            "name_table": name_table,
            "ranks": [
                {
                    "rank": one.rank,
                    "view": one.view,
                    "source": one.source.name,
                    "clock_offset_ns": one.offset_ns,
                }
                for one in splits
            ],
        },
        "displayTimeUnit": "ns",
        "baseTimeNanoseconds": base,
    }
    last = last_ranks(splits)
    events = chain.from_iterable(_rank_events(split, base, last[split.rank]) for split in splits)
    parts = _document(head, events)
    if not compress:
        return b"".join(parts)
    packer = isal_zlib.compressobj(_LEVEL, wbits=_GZIP)
    return b"".join([*map(packer.compress, parts), packer.flush()])


def _document(head: dict[str, Any], events: Iterable[str]) -> Iterator[bytes]:
    yield orjson.dumps(head)[:-1] + b',"traceEvents":['
    separator = "\n"
    block: list[str] = []
    for event in events:
        block += (separator, event)
        separator = ",\n"
        if len(block) >= 8192:
            yield "".join(block).encode()
            block.clear()
    yield ("".join(block) + "\n]}\n").encode()


def _first_ns(split: RankSplit) -> int:
    """The earliest time that is drawn, on the common clock."""
    starts = [split.windows[:, 0], split.communication.start_ns]
    return min(int(start.min()) for start in starts if len(start)) + (split.offset_ns or 0)


def _rank_events(split: RankSplit, base: int, last: NDArray[np.int64]) -> Iterator[str]:
    """All records of one rank, in the order of its tracks; ``last`` as :func:`last_ranks`."""
    tracks = _Tracks(split.rank, base - (split.offset_ns or 0))
    slices = class_slices(split)
    clock = "" if split.offset_ns is not None else ", its own clock: it could not be aligned"
    yield tracks.metadata("process_name", name=f"rank {split.rank} ({split.source.name}{clock})")
    yield tracks.metadata("process_sort_index", sort_index=split.rank)
    yield from _steps(split, tracks)
    yield from _account(slices, tracks)
    yield from _exposed(slices, tracks)
    yield from _collectives(split, last.tolist(), tracks)
    yield from _counters(slices, tracks)


class _Tracks:
    """Writes the records of one rank; its tracks are numbered from 1."""

    def __init__(self, rank: int, origin: int) -> None:
        """``origin`` is the time of the rank's own clock that the timeline counts from."""
        self._rank = rank
        self._origin = origin
        self._last = 0

    def metadata(self, what: str, track: int = 0, **arguments: object) -> str:
        """Name or place of the process or of a track."""
        text = orjson.dumps(arguments).decode()
        return f'{{"ph":"M","name":"{what}","pid":{self._rank},"tid":{track},"args":{text}}}'

    def new(self, name: str) -> tuple[int, list[str]]:
        """Number of the next track, and the records that name and place it."""
        self._last += 1
        number = self._last
        return number, [
            self.metadata("thread_name", number, name=name),
            self.metadata("thread_sort_index", number, sort_index=number),
        ]

    def slice(self, track: int, category: str, name: str, start: int, end: int, arguments: str = "") -> str:
        """One slice. ``name`` is JSON text, quotes included; ``arguments`` too, or empty."""
        more = f',"args":{arguments}' if arguments else ""
        return (
            f'{{"ph":"X","cat":"{category}","name":{name},"pid":{self._rank},"tid":{track},'
            f'"ts":{_microseconds(start - self._origin)},"dur":{_microseconds(end - start)}{more}}}'
        )

    def counter(self, name: str, time: int, values: str) -> str:
        """The value of some counters from a time on. ``values`` is a JSON object."""
        return (
            f'{{"ph":"C","name":"{name}","pid":{self._rank},"ts":{_microseconds(time - self._origin)},'
            f'"args":{values}}}'
        )


def _microseconds(ns: int) -> str:
    assert ns >= 0
    return f"{ns // 1000}.{ns % 1000:03d}"


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


def _lanes(intervals: Iterable[_Interval]) -> list[int]:
    """A lane for each interval, given by start, so that none overlaps another on its lane: slices of a track nest."""
    free_from: list[int] = []
    lanes = []
    for start, end in intervals:
        lane = next((i for i, free in enumerate(free_from) if free <= start), len(free_from))
        if lane == len(free_from):
            free_from.append(end)
        free_from[lane] = end
        lanes.append(lane)
    return lanes


def _steps(split: RankSplit, tracks: _Tracks) -> Iterator[str]:
    windows = sorted(zip(split.windows[1:].tolist(), split.numbers, strict=True))
    lanes = _lanes((start, end) for (start, end), _ in windows)
    numbers = []
    for lane in range(max(lanes, default=-1) + 1):
        number, names = tracks.new("steps" if lane == 0 else f"steps ({lane + 1})")
        numbers.append(number)
        yield from names
    for lane, ((start, end), step) in zip(lanes, windows, strict=True):
        yield tracks.slice(numbers[lane], "step", _json(f"step {step}"), start, end)


def _account(slices: Slices, tracks: _Tracks) -> Iterator[str]:
    track, names = tracks.new("account")
    yield from names
    texts = [_json(name) for name in slices.names]
    columns = zip(slices.start_ns.tolist(), slices.end_ns.tolist(), slices.name.tolist(), strict=True)
    for start, end, name in columns:
        yield tracks.slice(track, "class", texts[name], start, end)


def _exposed(slices: Slices, tracks: _Tracks) -> Iterator[str]:
    """Communication that nothing hides. It is on the account's track, too; alone it is found at a glance."""
    texts = {i: _json(name) for i, name in enumerate(slices.names) if name.startswith("communication.")}
    rows = np.flatnonzero(np.isin(slices.name, list(texts)))
    if len(rows) == 0:
        return
    track, names = tracks.new("exposed communication")
    yield from names
    for row in rows.tolist():
        start, end = int(slices.start_ns[row]), int(slices.end_ns[row])
        yield tracks.slice(track, "exposed", texts[int(slices.name[row])], start, end)


def _collectives(split: RankSplit, last: Sequence[int], tracks: _Tracks) -> Iterator[str]:
    records = split.communication
    starts, ends, arrivals = records.start_ns.tolist(), records.end_ns.tolist(), split.arrived_ns.tolist()
    order = sorted(range(len(records)), key=lambda row: (starts[row], -ends[row]))
    lanes = _lanes((starts[row], ends[row]) for row in order)
    numbers = []
    for lane in range(max(lanes, default=-1) + 1):
        number, names = tracks.new("collectives" if lane == 0 else f"collectives ({lane + 1})")
        numbers.append(number)
        yield from names
    for lane, row in zip(lanes, order, strict=True):
        start, end, size = starts[row], ends[row], int(records.bytes[row])
        label, kind = records.label[row], records.kind[row]
        about: dict[str, object] = {"group": label, "kind": kind, "bytes": size if size >= 0 else None}
        if arrivals[row] == UNKNOWN_TIME:
            about["split"] = "other ranks' records of it are not there, or not on one clock"
            yield tracks.slice(
                numbers[lane], "collective", _json(f"{label} {kind}"), start, end, _json(about)
            )
            continue
        border = min(max(arrivals[row], start), end)
        waited_for = last[row] if last[row] >= 0 else None
        about |= {"last_rank": waited_for, "wait_ns": border - start, "transfer_ns": end - border}
        yield tracks.slice(numbers[lane], "collective", _json(f"{label} {kind}"), start, end, _json(about))
        if border > start:
            whom = "wait" if waited_for is None else f"wait for rank {waited_for}"
            yield tracks.slice(numbers[lane], "wait", _json(whom), start, border)
        if end > border:
            yield tracks.slice(numbers[lane], "transfer", '"transfer"', border, end)


def _counters(slices: Slices, tracks: _Tracks) -> Iterator[str]:
    """Time that each class has taken until each border of a window, in ms."""
    borders = slices.borders_ns
    taken = np.zeros((len(borders), len(slices.names)), np.int64)
    # No slice reaches over a border: it counts at the next one.
    np.add.at(
        taken,
        (np.searchsorted(borders, slices.start_ns, side="right"), slices.name),
        slices.end_ns - slices.start_ns,
    )
    sums = np.cumsum(taken, axis=0)
    used = [slices.names.index(name) for name in (*CLASSES, "unexplained") if name in slices.names]
    used = [i for i in used if sums[-1, i]]
    texts = [_json(slices.names[i]) for i in used]
    for time, values in zip(borders.tolist(), sums[:, used].tolist(), strict=True):
        counts = ",".join(f"{text}:{_milliseconds(ns)}" for text, ns in zip(texts, values, strict=True))
        yield tracks.counter("class time (ms)", time, f"{{{counts}}}")


def _milliseconds(ns: int) -> str:
    return f"{ns // 1_000_000}.{ns % 1_000_000:06d}"
