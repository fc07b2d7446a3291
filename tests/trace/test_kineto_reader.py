"""What the reader makes of whole traces: every layout and generation gives the same table, times are exact."""

import copy
import gzip
import json
from decimal import Decimal
from pathlib import Path

import make_odd_files as odd
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.errors import DataError
from drivetrain.trace.kineto.numbers import INVALID, integers, nanoseconds
from drivetrain.trace.kineto.stream import EventStream
from drivetrain.trace.read import read_trace
from drivetrain.trace.table import COLUMN_DTYPES, Category, EventTable, Trace

SHARED = Path(__file__).resolve().parents[2] / ".." / "shared" / "traces"


def read(name: str) -> Trace:
    return read_trace(odd.DATA / name, cache=False)


def texts(table: EventTable) -> list[tuple[object, ...]]:
    """Rows without the numbering of texts, which depends on the order in the file."""
    look = {"name": table.names, "process": table.processes, "thread": table.threads, "stream": table.streams,
            "group": table.groups}  # fmt: skip
    rows = []
    for row in range(len(table)):
        values = []
        for column in COLUMN_DTYPES:
            value = int(getattr(table, column)[row])
            if column != "file_index":
                values.append(look[column][value] if column in look and value >= 0 else value)
        rows.append(tuple(values))
    return rows


def test_the_committed_files_are_what_the_generator_makes() -> None:
    for name, content in odd.odd_files().items():
        stored = (odd.DATA / name).read_bytes()
        if name.endswith(".gz"):
            assert stored[:2] == content[:2]  # the bits of deflate depend on the library's version
        else:
            assert stored == content, name


@pytest.mark.parametrize(
    "name",
    [
        "cpp_2_13.json",
        "python_exporter.json",
        "compressed.json.gz",
        "base_time_last.json",
        "begin_end_pairs.json",
    ],
)
def test_every_layout_gives_the_same_table(name: str) -> None:
    expected, trace = read("cpp_2_1.json"), read(name)
    assert texts(trace.events) == texts(expected.events)
    assert (trace.rank, trace.world_size, trace.partial) == (1, 2, False)
    assert trace.health == expected.health == ()


def test_columns_hold_what_the_file_says() -> None:
    table = read("cpp_2_1.json").events
    document = odd.small_trace()
    durations = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(table) == len(durations)
    by_start = sorted(durations, key=lambda event: (event["ts"], -event["dur"]))
    assert table.start_ns.tolist() == [event["ts"] + odd.BASE_NS for event in by_start]
    assert table.duration_ns.tolist() == [event["dur"] for event in by_start]
    assert [table.names[name] for name in table.name] == [event["name"] for event in by_start]
    for row, event in enumerate(by_start):
        assert table.correlation[row] == event["args"].get("correlation", -1)
        assert table.external_id[row] == event["args"].get("External id", -1)
        assert table.device[row] == event["args"].get("device", -1)
        stream = event["args"].get("stream")
        assert (table.streams[table.stream[row]] if stream is not None else table.stream[row]) in (
            str(stream),
            -1,
        )


def test_payloads_and_groups_of_collectives_and_copies() -> None:
    table = read("cpp_2_1.json").events
    collective = table.select(table.group >= 0)
    assert set(collective.bytes.tolist()) == {262_144 * 4}
    assert {table.groups[group] for group in collective.group} == {"0|default_pg"}
    assert set(table.bytes[table.category == Category.MEMCPY].tolist()) == {1_048_576}


def test_the_words_of_2021_are_the_categories_of_today() -> None:
    old, new = read("of_2021.json").events, read("cpp_2_1.json").events
    assert old.category.tolist() == new.category.tolist()
    assert old.correlation.tolist() == new.correlation.tolist()
    assert old.external_id.tolist() == new.external_id.tolist()
    assert (old.start_ns == new.start_ns // 1000 * 1000).all()


def test_a_bare_list_with_absolute_text_times_keeps_its_nanoseconds() -> None:
    trace, expected = read("list_with_text_times.json"), read("cpp_2_1.json")
    assert trace.events.start_ns.tolist() == expected.events.start_ns.tolist()
    assert trace.rank is None
    assert [finding.id for finding in trace.health] == ["missing_distributed_info"]


def test_stream_0_and_streams_with_names_are_streams() -> None:
    assert set(read("stream_0.json").events.streams) == {"0", "20"}
    assert set(read("stream_as_text.json").events.streams) == {"default", "20"}


def test_thread_7_as_number_and_as_text_is_one_thread(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 7, "ts": 1, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "b", "pid": "1", "tid": "7", "ts": 2, "dur": 1},
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(events))
    table = read_trace(path, cache=False).events
    assert (table.threads, table.processes) == (("7",), ("1",))
    assert table.thread.tolist() == [0, 0]


def test_the_profilers_projection_of_a_step_is_no_range_of_the_host(tmp_path: Path) -> None:
    event = {
        "ph": "X",
        "cat": "gpu_user_annotation",
        "name": "ProfilerStep#3",
        "pid": 2,
        "tid": 7,
        "ts": 5,
        "dur": 9,
    }
    path = tmp_path / "t.json"
    path.write_text(json.dumps([event]))
    table = read_trace(path, cache=False).events
    assert table.category.tolist() == [Category.DEVICE_ANNOTATION]
    assert table.device.tolist() == [2]
    assert not table.is_device_work().any()


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.json", 3),
        ("ddp_rank12.pt.trace.json", 12),
        ("worker7_step_12.16941.json", 7),
        ("trace.json", None),
    ],
)
def test_without_distributed_info_the_name_of_the_file_tells_the_rank(
    tmp_path: Path, name: str, rank: int | None
) -> None:
    path = tmp_path / name
    path.write_bytes((odd.DATA / "missing_distributed_info.json").read_bytes())
    assert read_trace(path, cache=False).rank == rank


def test_distributed_info_as_python_text_is_understood(tmp_path: Path) -> None:
    document = odd.small_trace()
    document["distributedInfo"] = str(document["distributedInfo"])
    path = tmp_path / "t.json"
    path.write_bytes(odd.write(document))
    trace = read_trace(path, cache=False)
    assert (trace.rank, trace.world_size) == (1, 2)


@given(
    st.integers(1, 700),
    st.sampled_from(["cpp_2_1.json", "python_exporter.json", "not_available.json", "concatenated.json"]),
)
def test_the_size_of_the_blocks_changes_nothing(size: int, name: str) -> None:
    text = (odd.DATA / name).read_bytes()
    whole, cut = (
        EventStream(iter([text[place : place + length] for place in range(0, len(text), length)]))
        for length in (len(text), size * 37)
    )
    expected = [record for piece in whole for record in piece.records]
    assert [record for piece in cut for record in piece.records] == expected
    assert len(expected) >= 102
    assert (cut.complete, cut.found, cut.documents) == (whole.complete, whole.found, whole.documents)


def test_a_boundary_inside_a_string_is_no_boundary(tmp_path: Path) -> None:
    document = odd.small_trace()
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            event["args"]["note"] = 'said "}, {\\", { "ph": "X", }, {" and went on }, {'
            event["args"]["nested"] = [{"name": "a"}, {"name": "b"}]
    path = tmp_path / "t.json"
    path.write_bytes(odd.write(document))
    trace = read_trace(path, cache=False)
    assert len(trace.events) == len(read("cpp_2_1.json").events)
    assert trace.health == ()


@given(
    st.lists(st.decimals(-(10**12), 10**16, places=3) | st.integers(-(10**15), 10**15) | st.floats(0, 1e15))
)
def test_times_are_the_digits_of_the_file(values: list[object]) -> None:
    written = [str(value) for value in values]
    expected = [
        int(Decimal(text) * 1000) if abs(Decimal(text)) < 9_223_372_036_854_775 else None for text in written
    ]
    got = nanoseconds([msgspec.Raw(text.encode()) for text in written]).tolist()
    for one, should in zip(got, expected, strict=True):
        if should is not None:
            assert one == should


def test_a_time_that_a_float_cannot_hold() -> None:
    texts = [
        b"1736408883688177.931",
        b'"1736408883688177.930"',
        b"1736408883688177",
        b"0.5",
        b"12.34",
        b"1e3",
        b"-2.001",
    ]
    expected = [1736408883688177931, 1736408883688177930, 1736408883688177000, 500, 12340, 1_000_000, -2001]
    for count in range(1, len(texts) + 1):
        assert nanoseconds([msgspec.Raw(text) for text in texts[:count]]).tolist() == expected[:count]
    odd_ones = [b"", b"null", b"[1]", b"1e999999999", b"1..2", b"1.2.3"]
    assert nanoseconds([msgspec.Raw(text) for text in odd_ones]).tolist() == [
        INVALID, INVALID, INVALID, np.iinfo(np.int64).max, INVALID, INVALID,
    ]  # fmt: skip


def test_integers_of_any_spelling() -> None:
    assert integers([1, "2", 3.0, None, "x", 2.5]).tolist() == [1, 2, 3, -1, -1, -1]
    assert integers([7, 1 << 64]).tolist() == [7, INVALID]


@pytest.mark.parametrize(
    "name", ["cpp_2_1.json", "compressed.json.gz", "not_available.json", "concatenated.json"]
)
def test_arguments_are_read_when_asked_for(name: str) -> None:
    trace = read(name)
    document = odd.small_trace()
    by_name = {
        event["name"]: event["args"] for event in document["traceEvents"] if event.get("cat") == "kernel"
    }
    rows = np.flatnonzero(trace.events.category == Category.KERNEL)[::-2]
    for row, arguments in zip(rows, trace.arguments(rows), strict=True):
        assert set(arguments) == set(by_name[trace.events.names[trace.events.name[row]]])
        assert arguments["correlation"] == trace.events.correlation[row]
    assert trace.arguments([]) == []


def test_arguments_of_a_file_that_has_gone(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes((odd.DATA / "cpp_2_1.json").read_bytes())
    trace = read_trace(path, cache=False)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        trace.arguments([0])


def test_progress_reaches_the_size_of_the_file() -> None:
    seen: list[tuple[int, int]] = []
    path = odd.DATA / "compressed.json.gz"
    trace = read_trace(path, cache=False, progress=lambda done, size: seen.append((done, size)))
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)
    assert trace.format == "kineto"


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "empty"), (b"   \n", "empty"), (b'{"a": 1}', "not a trace"), (b"hello", "not a trace"),
     (b"[1, 2]", "not a trace"),
     (b"[]", "empty"), (b'{"traceEvents": []}', "empty"), (b"\x1f\x8b\x08", "empty")],
)  # fmt: skip
def test_nothing_to_read_is_said_in_words(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words):
        read_trace(path, cache=False)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "no.json", tmp_path):
        for cache in (False, True):
            with pytest.raises(DataError, match="cannot be read"):
                read_trace(path, cache=cache)


def test_an_ascend_profile_is_refused_by_name(tmp_path: Path) -> None:
    document = copy.deepcopy(odd.small_trace()["traceEvents"])
    document.append({"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "Ascend Hardware"}})
    path = tmp_path / "trace_view.json"
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match="Ascend"):
        read_trace(path, cache=False)


def _reference_cases() -> list[tuple[str, str, dict[str, float]]]:
    path = SHARED / "reference_values.json"
    if not path.exists():
        return []
    cases = json.loads(path.read_text())["cases"]
    return [
        (name, file, case["oracle"][rank]["whole_trace"])
        for name, case in cases.items()
        for rank, file in case["files"].items()
        if case["oracle"][rank]["whole_trace"]
    ]


@pytest.mark.skipif(not SHARED.exists(), reason="the shared traces are not here")
def test_window_and_union_of_public_traces_to_the_nanosecond() -> None:
    cases = _reference_cases()
    assert len(cases) > 15
    for name, file, expected in cases:
        work = read_trace(SHARED / file, cache=False).events
        work = work.select(work.is_device_work())
        reached = np.maximum.accumulate(work.end_ns)
        window = int(reached[-1] - work.start_ns[0])
        busy = window - int(np.maximum(0, work.start_ns[1:] - reached[:-1]).sum())
        # The reference took the two ends of this one trace through a float: ….404 became ….405.
        slack = 1 if name == "nccl_parser_config" else 0
        assert abs(window - round(expected["window_us"] * 1000)) <= slack, name
        assert busy == round(expected["busy_us"] * 1000), name


def test_gzip_members_one_after_another_are_one_text(tmp_path: Path) -> None:
    text = (odd.DATA / "cpp_2_1.json").read_bytes()
    path = tmp_path / "t.json.gz"
    path.write_bytes(
        b"".join(gzip.compress(text[place : place + 9000]) for place in range(0, len(text), 9000))
    )
    trace = read_trace(path, cache=False)
    assert texts(trace.events) == texts(read("cpp_2_1.json").events)
    assert trace.health == ()
