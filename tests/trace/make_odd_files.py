"""A small trace of a made-up job, in every layout, and the odd forms traces are found in.

``python tests/trace/make_odd_files.py`` writes them to ``tests/trace/data``; a test compares the files with what
this module makes. The numbers are made up; the layouts are those of PyTorch 1.8, 2.1 and 2.13.
"""

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data"
BASE_NS = 1_790_857_026_000_000_000
STEPS = 3
LAYERS = 4
HOST, COMPUTE_STREAM, COMMUNICATION_STREAM = 4242, 7, 20
STEP_US = 2_000

Event = dict[str, Any]

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def _event(
    cat: str, name: str, pid: object, tid: object, ts_ns: int, dur_ns: int, **arguments: object
) -> Event:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": ts_ns,
        "dur": dur_ns,
        "args": arguments,
    }


def _launch(
    events: list[Event], number: int, ts_ns: int, name: str, start_ns: int, dur_ns: int, **extra: Any
) -> None:
    """An operator, its launch, and the device record."""
    stream = extra.pop("stream", COMPUTE_STREAM)
    cat = extra.pop("cat", "kernel")
    launch = "cudaMemcpyAsync" if cat == "gpu_memcpy" else "cudaLaunchKernel"
    shapes = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    operator = extra.pop("operator", "aten::mm")
    events.append(_event("cpu_op", operator, HOST, HOST, ts_ns, 9_250, **{"External id": number, **shapes}))
    events.append(_event("cuda_runtime", launch, HOST, HOST, ts_ns + 3_001, 4_002,
                         **{"External id": number, "cbid": 211, "correlation": 1000 + number}))  # fmt: skip
    device = {
        "External id": number,
        "device": 0,
        "context": 1,
        "stream": stream,
        "correlation": 1000 + number,
    }
    events.append(_event(cat, name, 0, stream, start_ns, dur_ns, **device, **extra))


def small_trace() -> dict[str, Any]:
    """A document whose times are integer nanoseconds; :func:`write` turns them into the exporter's text."""
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": HOST, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 0, "args": {"labels": "GPU 0"}},
    ]
    number = 0
    start = 5_100_741_700_491_781
    for step in range(STEPS):
        begin = start + step * STEP_US * 1000
        events.append(
            _event("user_annotation", f"ProfilerStep#{step + 2}", HOST, HOST, begin, STEP_US * 1000 - 17)
        )
        for layer in range(LAYERS):
            number += 1
            at = begin + 11_003 + layer * 100_000
            _launch(
                events,
                number,
                at,
                "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
                at + 50_000,
                80_123,
            )
            number += 1
            _launch(events, number, at + 20_000, "void at::native::vectorized_elementwise_kernel<4, at::native::"
                    'CUDAFunctor_add<float>, std::array<char*, 3ul> >(int, char const*, {lambda()#1})', at + 131_000,
                    7_777, operator="aten::add")  # fmt: skip
        number += 1
        at = begin + 500_000
        _launch(events, number, at, "Memcpy HtoD (Pinned -> Device)", at + 20_000, 31_415, cat="gpu_memcpy",
                operator="aten::copy_", bytes=1_048_576)  # fmt: skip
        number += 1
        _launch(events, number, at + 30_000, ALL_REDUCE,
                at + 60_000, 412_001, stream=COMMUNICATION_STREAM, operator="record_param_comms",
                **{"Collective name": "allreduce", "In msg nelems": 262_144, "dtype": "Float", "Group size": 2,
                   "Process Group Name": "0", "Process Group Description": "default_pg"})  # fmt: skip
        events.append(
            {"ph": "s", "id": number, "pid": HOST, "tid": HOST, "ts": at, "cat": "ac2g", "name": "ac2g"}
        )
        events.append(
            {"ph": "f", "id": number, "pid": 0, "tid": 7, "ts": at, "cat": "ac2g", "name": "ac2g", "bp": "e"}
        )
    events.append(
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": start + 10**10}
    )
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}],
        "distributedInfo": {
            "backend": "nccl", "rank": 1, "world_size": 2,
            "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}],
        },
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": events,
        "traceName": "trace.json",
    }  # fmt: skip


def time_text(ns: int) -> str:
    """Nanoseconds as microseconds with three decimals, from the digits."""
    sign = "-" if ns < 0 else ""
    return f"{sign}{abs(ns) // 1000}.{abs(ns) % 1000:03d}"


def _members(event: Event, time: Callable[[int], str]) -> list[str]:
    return [
        f'"{key}": {time(value) if key in ("ts", "dur") else json.dumps(value)}'
        for key, value in event.items()
        if key != "args"
    ]


def one_line(event: Event, time: Callable[[int], str] = time_text) -> str:
    """A record as the Python exporter writes it."""
    members = _members(event, time)
    if "args" in event:
        members.append(f'"args": {json.dumps(event["args"])}')
    return "{" + ", ".join(members) + "}"


def several_lines(event: Event, time: Callable[[int], str] = time_text) -> str:
    """A record as the C++ exporter writes it up to 2.12."""
    members = _members(event, time)
    text = "  {\n    " + ", ".join(members[:5])
    if members[5:]:
        text += ",\n    " + ", ".join(members[5:])
    if "args" in event:
        arguments = ", ".join(f'"{key}": {json.dumps(value)}' for key, value in event["args"].items())
        text += ',\n    "args": {\n      ' + arguments + "\n    }"
    return text + "\n  }"


def line_a_member(event: Event, time: Callable[[int], str] = time_text) -> str:
    """A record as the C++ exporter writes it since 2.13."""
    text = "\n  {\n    " + ",\n    ".join(_members(event, time))
    if "args" in event:
        arguments = ",".join(f'"{key}": {json.dumps(value)}' for key, value in event["args"].items())
        text += '\n    ,\n    "args": {\n      ' + arguments + "\n    }"
    return text + "\n  }"


def write(
    document: dict[str, Any],
    layout: Callable[..., str] = several_lines,
    time: Callable[[int], str] = time_text,
    *,
    base_last: bool = False,
) -> bytes:
    """The text of a document. ``base_last`` puts what follows the events in older files behind them."""
    around = {key: value for key, value in document.items() if key not in ("traceEvents", "traceName")}
    last = {"traceName": document.get("traceName", "")}
    if base_last:
        last["baseTimeNanoseconds"] = around.pop("baseTimeNanoseconds")
    head = "".join(f'  "{key}": {json.dumps(value)},\n' for key, value in around.items())
    tail = ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in last.items())
    events = ",\n".join(layout(event, time) for event in document["traceEvents"])
    return f'{{\n{head}  "traceEvents": [\n{events}\n  ],\n{tail}\n}}\n'.encode()


def kernels(document: dict[str, Any]) -> list[Event]:
    return [event for event in document["traceEvents"] if event.get("cat") == "kernel"]


def _changed(change: Callable[[dict[str, Any]], None]) -> bytes:
    document = copy.deepcopy(small_trace())
    change(document)
    return write(document)


def _replaced(old: str, new: str | bytes, count: int = 1) -> bytes:
    text = write(small_trace())
    assert old.encode() in text, old
    return text.replace(old.encode(), new if isinstance(new, bytes) else new.encode(), count)


def _for_kernels(change: Callable[[Event], object], count: int = 1) -> bytes:
    def apply(document: dict[str, Any]) -> None:
        for event in kernels(document)[:count]:
            change(event)

    return _changed(apply)


def _as_2021(document: dict[str, Any]) -> None:
    words = {"cpu_op": "Operator", "user_annotation": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel",
             "gpu_memcpy": "Memcpy"}  # fmt: skip
    for event in document["traceEvents"]:
        event["cat"] = words.get(event.get("cat", ""), event.get("cat", ""))
        event["ts"] += BASE_NS
        arguments = event.get("args", {})
        if event["cat"] in ("Kernel", "Memcpy"):
            event["tid"] = f"stream {event['tid']}"
            arguments["external id"] = arguments.pop("External id")
        elif event["cat"] == "Operator":
            event["tid"] = str(event["tid"])
    for key in ("distributedInfo", "baseTimeNanoseconds", "displayTimeUnit"):
        del document[key]


def _as_pairs(document: dict[str, Any]) -> None:
    events = []
    for event in document["traceEvents"]:
        if event.get("cat") != "user_annotation":
            events.append(event)
            continue
        begin = {key: value for key, value in event.items() if key != "dur"} | {"ph": "B"}
        end = {"ph": "E", "pid": event["pid"], "tid": event["tid"], "ts": event["ts"] + event["dur"]}
        events += [begin, end]
    document["traceEvents"] = events


def _as_graph(document: dict[str, Any]) -> None:
    for event in kernels(document)[1:LAYERS]:
        event["args"]["correlation"] = kernels(document)[0]["args"]["correlation"]


def _unsorted(document: dict[str, Any]) -> None:
    events = document["traceEvents"]
    document["traceEvents"] = [*events[1::2], *events[0::2]][::-1]


def _without_kernels(document: dict[str, Any]) -> None:
    document["traceEvents"] = [
        e for e in document["traceEvents"] if e.get("cat") not in ("kernel", "gpu_memcpy")
    ]


def _metadata_only(document: dict[str, Any]) -> None:
    document["traceEvents"] = document["traceEvents"][:2]


def _without_steps(document: dict[str, Any]) -> None:
    document["traceEvents"] = [e for e in document["traceEvents"] if e.get("cat") != "user_annotation"]


def _microseconds(ns: int) -> str:
    return str(ns // 1000)


def odd_files() -> dict[str, bytes]:
    """Name → content of each file in ``data``."""
    whole = write(small_trace())
    second = copy.deepcopy(small_trace())
    for event in second["traceEvents"]:
        event["ts"] += 10 * STEP_US * 1000
    packed = gzip.compress(whole, 9, mtime=0)
    listed = _list_with_text_times()
    at_middle = whole.index(b"cudaMemcpyAsync")
    return {
        "cpp_2_1.json": whole,
        "cpp_2_13.json": write(small_trace(), line_a_member),
        "python_exporter.json": write(small_trace(), one_line),
        "base_time_last.json": write(small_trace(), base_last=True),
        "compressed.json.gz": packed,
        "of_2021.json": _microsecond_file(),
        "list_with_text_times.json": listed,
        "begin_end_pairs.json": _changed(_as_pairs),
        "stream_0.json": write(small_trace()).replace(b'"stream": 7,', b'"stream": 0,'),
        "stream_as_text.json": write(small_trace()).replace(b'"stream": 7,', b'"stream": "default",'),
        "truncated.json": whole[: at_middle],
        "truncated.json.gz": packed[: len(packed) * 2 // 3],
        "missing_bracket.json": whole[: whole.rindex(b"]")],
        "concatenated.json": whole + write(second),
        "byte_order_mark.json": b"\xef\xbb\xbf" + whole,
        "bad_escape.json": _replaced("aten::mm", r"C:\Users\qt\aten::mm"),
        "control_character.json": _replaced("aten::mm", "aten\x01::\x1bmm"),
        "invalid_utf8.json": _replaced("aten::mm", b"\xff\xfeaten::mm"),
        "nan_inf.json": _replaced('"bytes": 1048576', '"bytes": 1048576, "memory bandwidth": inf, "load": nan'),
        "not_available.json": _replaced('"cbid": 211', '"cbid": N/A'),
        "integer_overflow.json": _replaced('"correlation": 1001', '"correlation": 123456789012345678901234567890', 2),
        "zero_timestamp.json": _for_kernels(lambda event: event.update(ts=0), 2),
        "outlying_timestamp.json": _for_kernels(lambda event: event.update(ts=event["ts"] * 1000), 1),
        "negative_duration.json": _for_kernels(lambda event: event.update(dur=-1_000), 2),
        "overflowing_duration.json": _for_kernels(lambda event: event.update(dur=(1 << 64) - 5), 1),
        "clipped_duration.json": _for_kernels(lambda event: event.update(dur=1_600_000_000), 1),
        "overlapping_kernels.json": _for_kernels(lambda event: event.update(dur=event["dur"] + 2_000), 3),
        "unsorted.json": _changed(_unsorted),
        "graph_replay.json": _changed(_as_graph),
        "missing_steps.json": _changed(_without_steps),
        "missing_distributed_info.json": _changed(lambda document: document.pop("distributedInfo")),
        "no_device_events.json": _changed(_without_kernels),
        "metadata_only.json": _changed(_metadata_only),
        "not_a_trace.json": b'{"a": 1}',
        "empty.json": b"",
    }  # fmt: skip


def _microsecond_file() -> bytes:
    document = copy.deepcopy(small_trace())
    _as_2021(document)
    return write(document, several_lines, _microseconds)


def _list_with_text_times() -> bytes:
    events = copy.deepcopy(small_trace()["traceEvents"])
    for event in events:
        event["ts"] += BASE_NS
    return (
        "[" + ", ".join(one_line(event, lambda ns: f'"{time_text(ns)}"') for event in events) + "]"
    ).encode()


def main() -> None:
    DATA.mkdir(exist_ok=True)
    for name, content in odd_files().items():
        (DATA / name).write_bytes(content)
    print(f"{sum(map(len, odd_files().values())):,} bytes in {DATA}")


if __name__ == "__main__":
    main()
