"""One record of the file as a typed structure: only the members the columns need are built."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

__all__ = ["NO_ARGUMENTS", "Arguments", "Record", "Text", "is_record", "record_of"]

Text = int | float | str | None
"""A scalar, as different exporters write it as text or as a number."""

_ABSENT: Final = msgspec.Raw(b"")


class Arguments(msgspec.Struct, gc=False):
    """Members of ``args``, over all generations of the exporter."""

    external_id: Text = msgspec.field(default=-1, name="External id")
    external_id_2021: Text = msgspec.field(default=-1, name="external id")
    sequence: Text = msgspec.field(default=-1, name="Sequence number")
    correlation: Text = -1
    device: Text = -1
    stream: Text = None
    bytes: Text = -1
    group_name: Text = msgspec.field(default=None, name="Process Group Name")
    group_description: Text = msgspec.field(default=None, name="Process Group Description")
    elements: Text = msgspec.field(default=-1, name="In msg nelems")
    dtype: Text = None
    address: Text = msgspec.field(default=-1, name="Addr")
    """Of a block of memory that was allocated or freed; so are the next two."""
    allocated_bytes: Text = msgspec.field(default=0, name="Bytes")
    device_type: Text = msgspec.field(default=-1, name="Device Type")
    name: Text = None
    """Of ``process_name`` metadata records."""
    input_dims: msgspec.Raw = msgspec.field(default=_ABSENT, name="Input Dims")
    input_type: msgspec.Raw = msgspec.field(default=_ABSENT, name="Input type")


class Record(msgspec.Struct, gc=False):
    """One element of ``traceEvents``. Times stay text, so that no digit passes through a float."""

    ph: Text = None
    cat: Text = None
    name: Text = None
    pid: Text = None
    tid: Text = None
    ts: msgspec.Raw = _ABSENT
    dur: msgspec.Raw = _ABSENT
    args: Arguments | None = None


NO_ARGUMENTS: Final = Arguments()

_PHASES: Final = frozenset("XBEiIMsftCbneNODPRcv(),")


def is_record(record: Record) -> bool:
    """Whether an object is a record, and not, say, the arguments of one."""
    return isinstance(record.ph, str) and record.ph in _PHASES


def _scalar(value: Any) -> Text:
    return value if isinstance(value, int | float | str) else None


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def record_of(document: Mapping[str, Any]) -> Record:
    """A record from a decoded object whose members are not of the types expected; the odd ones are left out."""
    arguments = document.get("args")
    known: dict[str, Any] = {}
    if isinstance(arguments, dict):
        for field in msgspec.structs.fields(Arguments):
            if field.encode_name in arguments:
                value = arguments[field.encode_name]
                if field.type is msgspec.Raw:
                    known[field.name] = _raw(value)
                elif (scalar := _scalar(value)) is not None:
                    known[field.name] = scalar
    members: dict[str, Any] = {key: _scalar(document.get(key)) for key in ("ph", "cat", "name", "pid", "tid")}
    members |= {key: _raw(document[key]) for key in ("ts", "dur") if key in document}
    return Record(**members, args=Arguments(**known) if known else None)
