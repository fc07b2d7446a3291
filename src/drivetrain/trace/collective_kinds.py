"""Which collective a communication record runs: by its name, by the range it was launched in, by its arguments."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drivetrain.trace.classes import COLLECTIVE_KINDS
from drivetrain.trace.host_context import HostPlaces, Ranges, thread_keys, used_names
from drivetrain.trace.lookup import distinct, flags
from drivetrain.trace.name_table import NameTable
from drivetrain.trace.table import Category, EventTable, Trace

__all__ = ["kind_of_word", "kinds_by_context", "kinds_by_name", "kinds_from_arguments"]

_INDEX = {kind: index for index, kind in enumerate(COLLECTIVE_KINDS)}
UNKNOWN = _INDEX["unknown"]
SEND_RECV = _INDEX["send_recv"]

# Names of host ranges that stand for one collective. record_param_comms carries it in its arguments only.
_RANGE_PREFIXES = (
    "nccl:",
    "gloo:",
    "c10d::",
    "_c10d_functional::",
    "c10d_functional::",
    "hccl:",
    "ucc:",
    "mpi:",
)


def kind_of_word(table: NameTable, word: str) -> int:
    """Index into ``COLLECTIVE_KINDS`` of an annotation, operator or argument: ``_allgather_base`` → all_gather."""
    return _INDEX[table.label("collective", word) or "unknown"]


def _range_rows(
    events: EventTable, table: NameTable, categories: Sequence[Category]
) -> dict[int, NDArray[np.int64]]:
    """Rows of the ranges that stand for a collective, by kind."""
    rows = np.flatnonzero(flags(len(Category), categories)[events.category])
    kinds = np.zeros(len(events.names), np.uint8)
    for index in used_names(events, rows):
        if events.names[index].startswith(_RANGE_PREFIXES):
            kinds[index] = kind_of_word(table, events.names[index])
    of_row = kinds[events.name[rows]] if len(kinds) else np.zeros(0, np.uint8)
    return {int(kind): rows[of_row == kind] for kind in distinct(of_row) if kind != UNKNOWN}


def kinds_by_context(
    events: EventTable, table: NameTable, places: HostPlaces, kinds: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Kinds of device records, refined by the host range their launch lies in, then by the device's own ranges.

    Args:
        events: the table.
        table: words for collectives.
        places: places of the communication records.
        kinds: what their names tell, shape of ``places.rows``. ``unknown`` and ``send_recv`` (which is how
            all-to-all runs, too) are refined, the others stand.
    """
    kinds = kinds.copy()
    coarse = (kinds == UNKNOWN) | (kinds == SEND_RECV)
    if not coarse.any():
        return kinds
    host = _range_rows(events, table, (Category.ANNOTATION, Category.CPU_OP))
    device = _range_rows(events, table, (Category.DEVICE_ANNOTATION,))
    own_key, own_start = thread_keys(events, places.rows), events.start_ns[places.rows]
    for ranges, key, time_ns in ((host, places.key, places.time_ns), (device, own_key, own_start)):
        for kind, rows in ranges.items():
            inside = Ranges.of(events, rows).contain(key, time_ns) & coarse
            kinds[inside] = kind
            coarse &= ~inside
    return kinds


def kinds_from_arguments(
    trace: Trace, table: NameTable, places: HostPlaces, kinds: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Kinds still unknown, from the arguments of the record or of its ``record_param_comms`` operator.

    The file is read again, so only records are asked whose arguments are known to name a process group.
    """
    events = trace.events
    asked = places.rows.copy()
    by_operator = (events.group[asked] < 0) & (places.operator >= 0)
    asked[by_operator] = places.operator[by_operator]
    open_rows = np.flatnonzero((kinds == UNKNOWN) & (events.group[asked] >= 0))
    if len(open_rows) == 0:
        return kinds
    kinds = kinds.copy()
    for row, arguments in zip(open_rows, trace.arguments(asked[open_rows]), strict=True):
        word = arguments.get("Collective name")
        if isinstance(word, str):
            kinds[row] = kind_of_word(table, word)
    return kinds


def kinds_by_name(events: EventTable, table: NameTable, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Kinds of host ranges (``gloo:all_reduce``), shape of ``rows``."""
    kinds = np.zeros(len(events.names), np.uint8)
    for index in used_names(events, rows):
        kinds[index] = kind_of_word(table, events.names[index])
    return kinds[events.name[rows]] if len(kinds) else np.zeros(0, np.uint8)
