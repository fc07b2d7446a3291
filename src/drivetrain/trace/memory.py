"""What a profiled window recorded of its memory: allocations, the run's marks among them, spans and collectives.

Read apart from the event table, of which allocations would be the larger part and nothing else would use them.
"""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from drivetrain.errors import DataError
from drivetrain.measure.memory import MemoryByCategory
from drivetrain.measure.memory_events import (
    Allocation,
    HeldBlock,
    Mark,
    Message,
    Recorded,
    Span,
    memory_of_step,
)
from drivetrain.trace.kineto.metadata import metadata_of
from drivetrain.trace.kineto.numbers import INVALID, integers, nanoseconds
from drivetrain.trace.kineto.records import Record
from drivetrain.trace.kineto.source import Source
from drivetrain.trace.kineto.stream import EventStream

__all__ = ["read_memory"]

_ALLOCATION: Final = "[memory]"
_MARK: Final = "drivetrain/memory/"
_PART: Final = "drivetrain/"
_NODE: Final = "autograd::engine::evaluate_function"
_STEP: Final = "ProfilerStep#"
_COLLECTIVE: Final = "c10d::"
_PARTS: Final = ("fetch", "h2d", "forward", "backward", "pipeline", "optimizer", "sync", "checkpoint", "log")
"""Of a step, as the loop names them."""
_DEVICES: Final = {"cpu": 0, "cuda": 1}
"""Kinds of devices as the profiler numbers them."""
_ITEM_BYTES: Final = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "int": 4, "long int": 8}
_SUM: Final = "c10d::allreduce_"
_IN_A_LIST: Final = 4
"""Bytes of an element of a list of tensors, whose dtype is not recorded: gradients and parameters are fp32."""


def read_memory(path: Path) -> MemoryByCategory:
    """Live bytes by category in the newest step of a profiled window of one of our runs.

    Raises:
        DataError: the file cannot be read, records no allocations, or is not of one of our runs.
    """
    records: list[Record] = []
    stream = EventStream(Source(path).blocks())
    for piece in stream:
        records += [record for record in piece.records if _is_wanted(record)]
    metadata: dict[str, Any] = {}
    for document in stream.documents:
        metadata |= metadata_of(document, Counter())
    about = metadata.get("drivetrain")
    if not isinstance(about, Mapping):
        raise DataError(
            f"{path} is no trace of a run of drivetrain: nothing tells its blocks of memory apart"
        )
    memory = about.get("memory")
    if not isinstance(memory, Mapping):
        raise DataError(
            f"{path} records no allocations: profiler.profile_memory was off when the run was profiled; have one "
            "measured: drivetrain memory CONFIG --measure"
        )
    recorded = _recorded(path, records, about, memory)
    not_counted = ["batches of tokens, where other processes or numpy have allocated them"]
    if not memory.get("layers"):
        not_counted.append("activations by layer: compiled blocks are left without hooks")
    if recorded.world_size > 1:
        not_counted.append("that a block was freed by another thread, until its place is taken")
    return memory_of_step(
        recorded,
        resident_bytes=_optional(memory, "resident_bytes"),
        peak_resident_bytes=_optional(memory, "peak_resident_bytes"),
        reserved_bytes=_optional(memory, "reserved_bytes"),
        fragmentation_bytes=_optional(memory, "fragmentation_bytes"),
        not_counted=not_counted,
    )


def _optional(document: Mapping[str, Any], key: str) -> int | None:
    value = document.get(key)
    return value if isinstance(value, int) else None


def _is_wanted(record: Record) -> bool:
    name = record.name
    return isinstance(name, str) and (
        name == _ALLOCATION or name.startswith((_COLLECTIVE, _PART, _NODE, _STEP))
    )


def _recorded(
    path: Path, records: list[Record], about: Mapping[str, Any], memory: Mapping[str, Any]
) -> Recorded:
    begins = nanoseconds([record.ts or msgspec.Raw(b"null") for record in records]).tolist()
    durations = nanoseconds([record.dur or msgspec.Raw(b"0") for record in records]).tolist()
    device = _DEVICES.get(str(memory.get("device")), 0)
    allocations: list[Allocation] = []
    marks: list[Mark] = []
    phases: list[Span] = []
    nodes: list[Span] = []
    messages: list[Message] = []
    steps: dict[int, Span] = {}
    for record, begin, duration in zip(records, begins, durations, strict=True):
        name = str(record.name)
        if begin == INVALID:
            continue
        # Ranges are recorded twice where a device is: as the program and as the device sees them.
        if record.ph == "X" and str(record.cat).startswith("gpu"):
            continue
        span = Span(begin, begin + max(duration, 0), name)
        if name == _ALLOCATION:
            if record.args is not None:
                address, nbytes, kind = integers(
                    [record.args.address, record.args.allocated_bytes, record.args.device_type]
                ).tolist()
                if kind == device and address > 0:
                    allocations.append(Allocation(begin, address, nbytes))
        elif name.startswith(_COLLECTIVE):
            messages += _messages(begin, record)
        elif record.ph != "X":
            continue
        elif name.startswith(_MARK):
            if (mark := _mark(begin, name.removeprefix(_MARK))) is not None:
                marks.append(mark)
        elif name.startswith(_NODE):
            nodes.append(span)
        elif name.startswith(_STEP):
            number = name.removeprefix(_STEP)
            if number.isdigit():
                steps[int(number)] = span
        elif (part := name.removeprefix(_PART)) in _PARTS:
            phases.append(Span(span.begin_ns, span.end_ns, part))
    if not allocations or not steps:
        raise DataError(f"{path} records no allocations of a whole step")
    return Recorded(
        rank=int(about["rank"]),
        world_size=int(about["world_size"]),
        allocations=allocations,
        marks=marks,
        phases=phases,
        nodes=nodes,
        messages=messages,
        held=[
            HeldBlock(str(category), int(address), int(nbytes))
            for category, address, nbytes in memory["held"]
        ],
        steps=sorted(steps.items()),
    )


def _mark(time_ns: int, text: str) -> Mark | None:
    what, _, rest = text.partition("/")
    if what == "layer":
        return Mark(time_ns, what, name=rest)
    address, _, nbytes = rest.partition("/")
    if what != "gradient" or not address.isdigit() or not nbytes.isdigit():
        return None
    return Mark(time_ns, what, address=int(address), nbytes=int(nbytes))


def _messages(time_ns: int, record: Record) -> list[Message]:
    """The tensors that a collective was handed, by the shapes that were recorded of it."""
    if record.args is None:
        return []
    try:
        dims, types = (msgspec.json.decode(one) for one in (record.args.input_dims, record.args.input_type))
    except msgspec.DecodeError:
        return []
    if not isinstance(dims, list) or not isinstance(types, list):
        return []
    found = []
    for shape, dtype in zip(dims, types, strict=False):
        listed = dtype == "TensorList"
        item = _IN_A_LIST if listed else _ITEM_BYTES.get(str(dtype))
        for one in shape if listed and isinstance(shape, list) else [shape]:
            if item and isinstance(one, list) and one and all(isinstance(size, int) for size in one):
                found.append(Message(time_ns, math.prod(one) * item, record.name == _SUM))
    return found
