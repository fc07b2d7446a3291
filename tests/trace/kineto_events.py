"""Small Kineto files made from a few events, for tests of what comes after the reader."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.trace.read import read_trace
from drivetrain.trace.table import Trace

SHARED_TRACES = Path(__file__).resolve().parents[2] / ".." / "shared" / "traces"
MAIN_THREAD, AUTOGRAD_THREAD = 100, 200


def kernel(
    name: str, start: float, duration: float, *, correlation: int = 0, stream: int = 7, **arguments: Any
) -> dict[str, Any]:
    """A kernel on device 0; times in microseconds."""
    args = {"device": 0, "stream": stream, "correlation": correlation, **arguments}
    return _event("kernel", name, start, duration, 0, stream, args)


def device_copy(
    name: str, start: float, duration: float, *, category: str = "gpu_memcpy", stream: int = 7
) -> dict[str, Any]:
    """A copy or a memset on device 0."""
    args = {"device": 0, "stream": stream, "correlation": 0, "bytes": 64}
    return _event(category, name, start, duration, 0, stream, args)


def operator(
    name: str,
    start: float,
    duration: float,
    *,
    external_id: int = 0,
    thread: int = MAIN_THREAD,
    **arguments: Any,
) -> dict[str, Any]:
    """An operator on the host."""
    return _event("cpu_op", name, start, duration, 1, thread, {"External id": external_id, **arguments})


def launch(
    start: float, *, correlation: int, external_id: int = 0, thread: int = MAIN_THREAD
) -> dict[str, Any]:
    """A launch of a kernel, one microsecond long."""
    args = {"External id": external_id, "correlation": correlation}
    return _event("cuda_runtime", "cudaLaunchKernel", start, 1.0, 1, thread, args)


def annotation(name: str, start: float, duration: float, *, thread: int = MAIN_THREAD) -> dict[str, Any]:
    """A user's range on the host."""
    return _event("user_annotation", name, start, duration, 1, thread, {})


def python_function(name: str, start: float, duration: float, *, thread: int = MAIN_THREAD) -> dict[str, Any]:
    """A Python frame."""
    return _event("python_function", name, start, duration, 1, thread, {})


def _event(
    category: str, name: str, start: float, duration: float, pid: int, tid: int, args: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": duration,
        "args": dict(args),
    }


def trace_of(folder: Path, events: Sequence[Mapping[str, Any]], **metadata: Any) -> Trace:
    """The trace of these events, by way of a file."""
    path = folder / "trace.json"
    document = {"schemaVersion": 1, "baseTimeNanoseconds": 0, **metadata, "traceEvents": list(events)}
    path.write_text(json.dumps(document))
    return read_trace(path, cache=False)


def shared_trace(name: str) -> Trace:
    """A trace of the shared material, read without leaving anything beside it."""
    return read_trace(SHARED_TRACES / name, cache=False)
