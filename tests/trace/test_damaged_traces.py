"""One rule, one test, for each kind of damage; and two hundred files damaged at random."""

import gzip
import random
import zlib
from pathlib import Path

import make_odd_files as odd
import numpy as np
import pytest

from drivetrain.errors import DataError
from drivetrain.trace.health import Finding, withheld
from drivetrain.trace.kineto.rules import RULES
from drivetrain.trace.kineto.scanning import split_objects
from drivetrain.trace.read import read_trace
from drivetrain.trace.table import Category, EventTable, Trace

SHARED = Path(__file__).resolve().parents[2] / ".." / "shared" / "traces" / "odd"
EVENTS = 93
"""Records with a duration in the whole trace."""


def read(name: str) -> Trace:
    return read_trace(odd.DATA / name, cache=False)


def found(trace: Trace) -> dict[str, int]:
    return {finding.id: finding.count for finding in trace.health}


def kernels(trace: Trace) -> EventTable:
    return trace.events.select(trace.events.category == Category.KERNEL)


def whole() -> EventTable:
    return read("cpp_2_1.json").events


def check_invariants(trace: Trace) -> None:
    """What must hold whatever the file."""
    table = trace.events
    assert len(table) > 0
    order = np.lexsort((table.file_index, -table.duration_ns, table.start_ns))
    assert (order == np.arange(len(table))).all()
    assert (table.duration_ns >= 0).all()
    assert (table.end_ns >= table.start_ns).all()
    for column, texts in (("name", table.names), ("process", table.processes), ("thread", table.threads),
                          ("stream", table.streams), ("group", table.groups)):  # fmt: skip
        indices = getattr(table, column)
        assert indices.min() >= -1
        assert indices.max() < len(texts)
    assert all(isinstance(finding, Finding) and finding.count > 0 for finding in trace.health)


def test_truncated_text_is_read_to_the_break() -> None:
    trace = read("truncated.json")
    assert trace.partial
    assert found(trace)["truncated"] == 28
    text = (odd.DATA / "truncated.json").read_text()
    assert f"at byte {text.rindex('{', 0, text.rindex('ph')):,} of {len(text):,}" in trace.health[0].message
    assert len(trace.events) == 26


def test_truncated_gzip_is_read_to_the_break() -> None:
    content = (odd.DATA / "truncated.json.gz").read_bytes()
    text = zlib.decompressobj(31).decompress(content)
    complete = split_objects(text, text.index(b"[", text.index(b'"traceEvents"')) + 1)
    trace = read("truncated.json.gz")
    assert trace.partial
    assert found(trace)["truncated"] == len(complete)


def test_a_flipped_bit_in_gzip_leaves_what_precedes_it(tmp_path: Path) -> None:
    content = bytearray(gzip.compress((odd.DATA / "cpp_2_13.json").read_bytes(), mtime=0))
    content[len(content) * 9 // 10] ^= 0x10
    path = tmp_path / "t.json.gz"
    path.write_bytes(content)
    trace = read_trace(path, cache=False)
    check_invariants(trace)
    assert len(trace.events) > EVENTS // 2
    assert "truncated" in found(trace)


def test_bytes_behind_the_gzip_stream_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes((odd.DATA / "compressed.json.gz").read_bytes() + b"garbage")
    trace = read_trace(path, cache=False)
    assert found(trace) == {"trailing_bytes": 1}
    assert len(trace.events) == EVENTS


def test_a_missing_bracket_costs_nothing() -> None:
    trace = read("missing_bracket.json")
    assert found(trace) == {"missing_bracket": 102}
    assert not trace.partial
    assert len(trace.events) == EVENTS


def test_concatenated_documents_are_all_read() -> None:
    trace = read("concatenated.json")
    assert found(trace) == {"concatenated": 1}
    assert len(trace.events) == 2 * EVENTS
    assert set(np.unique(trace.events.duration_ns)) == set(np.unique(whole().duration_ns))


def test_a_byte_order_mark_is_skipped() -> None:
    assert found(read("byte_order_mark.json")) == {"byte_order_mark": 1}


def test_a_bad_escape_is_taken_literally() -> None:
    trace = read("bad_escape.json")
    assert found(trace) == {"bad_escape": 1}
    assert r"C:\Users\qt\aten::mm" in trace.events.names
    assert len(trace.events) == EVENTS


def test_control_characters_are_spaces() -> None:
    trace = read("control_character.json")
    assert found(trace) == {"control_character": 1}
    assert "aten :: mm" in trace.events.names


def test_what_is_no_utf8_is_replaced() -> None:
    trace = read("invalid_utf8.json")
    assert found(trace) == {"invalid_utf8": 1}
    assert "\ufffd\ufffdaten::mm" in trace.events.names


def test_invalid_utf8_in_arguments_nobody_reads_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes((odd.DATA / "cpp_2_1.json").read_bytes().replace(b'"cbid": 211', b'"cbid": "\xff"', 1))
    trace = read_trace(path, cache=False)
    assert found(trace) == {"invalid_utf8": 1}
    runtime = np.flatnonzero(trace.events.category == Category.RUNTIME)
    assert trace.arguments(runtime)[0]["cbid"] == "\ufffd"


@pytest.mark.parametrize("name", ["nan_inf.json", "not_available.json"])
def test_nan_inf_and_not_available_are_no_value(name: str) -> None:
    trace = read(name)
    assert found(trace) == {"not_a_number": 1}
    assert len(trace.events) == EVENTS


def test_a_name_with_nan_keeps_it_when_its_record_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    text = (odd.DATA / "nan_inf.json").read_bytes().replace(b"Memcpy HtoD", b"fill: nan, inf, N/A", 1)
    path.write_bytes(text)
    assert "fill: nan, inf, N/A (Pinned -> Device)" in read_trace(path, cache=False).events.names


def test_integers_beyond_64_bits_are_left_out() -> None:
    trace = read("integer_overflow.json")
    assert found(trace) == {"integer_overflow": 2}
    assert int((trace.events.correlation == -1).sum()) == int((whole().correlation == -1).sum()) + 2


@pytest.mark.parametrize(
    ("member", "finding"),
    [
        ('{"rank": 0, "world_size": 1000000000000000000000000000000}', "integer_overflow"),
        ('{"rank": 0, "more": [1, {"id": -9223372036854775809}]}', "integer_overflow"),
        ('{"rank": 0, "more": ' + "[" * 200 + "]" * 200 + "}", "damaged_metadata"),
        ('{"rank": 0, "more": ' + "[" * 100_000 + "]" * 100_000 + "}", "damaged_metadata"),
        ("\"{'rank': 0, 'more': {1, 2}}\"", "damaged_metadata"),
    ],
)
def test_metadata_that_no_json_can_hold_is_left_out(tmp_path: Path, member: str, finding: str) -> None:
    """Also from the cache, which is JSON."""
    path = tmp_path / "t.json"
    event = (
        '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 5, "dur": 2, "pid": 1, "tid": 1, "args": {}}'
    )
    path.write_text(f'{{"schemaVersion": 1, "distributedInfo": {member}, "traceEvents": [{event}]}}')
    first, second = read_trace(path), read_trace(path)
    assert len(first.events) == 1
    assert finding in {one.id for one in first.health}
    assert (second.metadata, second.rank, second.health) == (first.metadata, first.rank, first.health)


def test_records_at_time_zero_are_dropped() -> None:
    trace = read("zero_timestamp.json")
    assert found(trace) == {"zero_timestamp": 2}
    assert len(trace.events) == EVENTS - 2
    assert int(np.ptp(trace.events.start_ns)) < 10**10


def test_a_trace_that_begins_at_zero_keeps_its_first_record(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        '[{"ph":"X","cat":"cpu_op","name":"a","ts":0,"dur":5},{"ph":"X","cat":"cpu_op","name":"b","ts":9,"dur":5}]'
    )
    trace = read_trace(path, cache=False)
    assert trace.events.start_ns.tolist() == [0, 9000]


def test_times_far_from_all_others_are_dropped() -> None:
    trace = read("outlying_timestamp.json")
    assert found(trace) == {"outlying_timestamp": 1}
    assert len(trace.events) == EVENTS - 1


def test_negative_durations_are_zero() -> None:
    trace = read("negative_duration.json")
    assert found(trace) == {"negative_duration": 2}
    assert int((kernels(trace).duration_ns == 0).sum()) == 2


def test_overflowing_durations_are_zero() -> None:
    trace = read("overflowing_duration.json")
    assert found(trace) == {"overflowing_duration": 1}
    assert int((kernels(trace).duration_ns == 0).sum()) == 1


def test_a_kernel_that_swallows_its_stream_ends_where_the_next_one_starts() -> None:
    trace = read("clipped_duration.json")
    assert found(trace) == {"clipped_duration": 1}
    stream = kernels(trace)
    stream = stream.select(np.array([stream.streams[one] == "7" for one in stream.stream]))
    assert stream.end_ns[0] == stream.start_ns[1]
    expected = whole()
    assert (np.sort(trace.events.start_ns) == np.sort(expected.start_ns)).all()


def test_overlapping_kernels_on_one_stream_are_kept() -> None:
    trace = read("overlapping_kernels.json")
    assert found(trace) == {"overlapping_kernels": 2}
    expected = whole()
    extra = int(trace.events.duration_ns.sum() - expected.duration_ns.sum())
    assert extra == 3 * 2_000


def test_the_branches_of_a_graph_on_one_stream_are_not_clipped(tmp_path: Path) -> None:
    document = odd.small_trace()
    for event in odd.kernels(document):
        event["args"]["correlation"] = 77
    odd.kernels(document)[0]["dur"] = 5_000_000
    path = tmp_path / "t.json"
    path.write_bytes(odd.write(document))
    trace = read_trace(path, cache=False)
    assert "clipped_duration" not in found(trace)
    assert int(kernels(trace).duration_ns.max()) == 5_000_000


def test_unsorted_records_are_sorted() -> None:
    trace = read("unsorted.json")
    assert set(found(trace)) == {"unsorted"}
    assert trace.events.start_ns.tolist() == whole().start_ns.tolist()


def test_one_launch_of_a_graph_has_many_kernels() -> None:
    trace = read("graph_replay.json")
    assert found(trace) == {"graph_replay": 1}
    assert len(trace.events) == EVENTS


def test_graph_launches_without_records_withhold_idle_time(tmp_path: Path) -> None:
    document = odd.small_trace()
    launches = [event for event in document["traceEvents"] if event["name"] == "cudaLaunchKernel"]
    for number, launch in enumerate(launches[:6]):
        launch["name"] = "cudaGraphLaunch"
        if number % 2:
            launch["args"]["correlation"] = 90_000 + number
    path = tmp_path / "t.json"
    path.write_bytes(odd.write(document))
    trace = read_trace(path, cache=False)
    assert found(trace) == {"graph_replay_incomplete": 3}
    assert withheld(trace.health)["idle_ns"] == "graph_replay_incomplete"


def test_missing_steps_are_noted() -> None:
    assert found(read("missing_steps.json")) == {"missing_steps": 1}


def test_missing_distributed_info_is_noted() -> None:
    assert found(read("missing_distributed_info.json")) == {"missing_distributed_info": 1}


def test_launches_without_device_records_are_reported() -> None:
    trace = read("no_device_events.json")
    assert found(trace) == {"no_device_events": 27}
    assert not withheld(trace.health)


def test_copies_without_kernels_withhold_the_device_times(tmp_path: Path) -> None:
    document = odd.small_trace()
    document["traceEvents"] = [event for event in document["traceEvents"] if event.get("cat") != "kernel"]
    path = tmp_path / "t.json"
    path.write_bytes(odd.write(document))
    trace = read_trace(path, cache=False)
    assert found(trace) == {"no_kernels": 27}
    assert {"busy_ns", "idle_ns"} <= set(withheld(trace.health))


def test_a_damaged_header_leaves_the_events(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes((odd.DATA / "cpp_2_1.json").read_bytes().replace(b'"traceEvents"', b'"traceEve'))
    trace = read_trace(path, cache=False)
    assert "damaged_header" in found(trace)
    assert len(trace.events) >= EVENTS - 1


def test_damaged_metadata_keeps_the_base_time_and_the_rank(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(
        (odd.DATA / "cpp_2_1.json").read_bytes().replace(b'"schemaVersion": 1,', b'"schemaVersion" 1,')
    )
    trace = read_trace(path, cache=False)
    assert found(trace) == {"damaged_metadata": 1}
    assert trace.rank == 1
    assert trace.events.start_ns.tolist() == whole().start_ns.tolist()


def test_a_bracket_in_the_middle_of_the_events_is_ignored(tmp_path: Path) -> None:
    text = (odd.DATA / "cpp_2_1.json").read_bytes()
    half = text.index(b"{", len(text) // 2)
    half = text.rindex(b"\n  },", 0, half) + 4
    path = tmp_path / "t.json"
    path.write_bytes(text[:half] + b"]" + text[half:])
    trace = read_trace(path, cache=False)
    assert found(trace) == {"stray_bracket": 1}
    assert len(trace.events) == EVENTS


@pytest.mark.parametrize("seed", range(12))
def test_a_record_cut_out_of_costs_itself_alone(tmp_path: Path, seed: int) -> None:
    text = (odd.DATA / ("cpp_2_13.json", "python_exporter.json")[seed % 2]).read_bytes()
    spans = split_objects(text, text.index(b"[", text.index(b'"traceEvents"')) + 1)
    chance = random.Random(seed)
    begin, end = spans[chance.randrange(10, len(spans) - 10)]
    start = chance.randrange(begin, end - 1)
    path = tmp_path / "t.json"
    path.write_bytes(text[:start] + text[chance.randrange(start + 1, end) :])
    trace = read_trace(path, cache=False)
    check_invariants(trace)
    assert len(trace.events) >= EVENTS - 2


@pytest.mark.parametrize("share", [0.12, 0.3, 0.5, 0.77, 0.95, 0.999])
@pytest.mark.parametrize(
    "name", ["cpp_2_1.json", "cpp_2_13.json", "python_exporter.json", "list_with_text_times.json"]
)
def test_everything_before_a_cut_is_recovered(tmp_path: Path, name: str, share: float) -> None:
    text = (odd.DATA / name).read_bytes()
    text = text[: int(len(text) * share)]
    start = text.index(b"[", text.find(b'"traceEvents"') + 1 if b'"traceEvents"' in text else 0) + 1
    complete = sum(b'"ph": "X"' in text[slice(*span)] for span in split_objects(text, start))
    path = tmp_path / "t.json"
    path.write_bytes(text)
    trace = read_trace(path, cache=False)
    assert len(trace.events) == complete
    assert trace.partial


def _mutated(content: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 1, 2, 5))):
        place = chance.randrange(len(content))
        length = chance.choice((1, 1, 3, 30, 400, 4_000))
        kind = chance.choice(("cut", "flip", "duplicate", "insert", "end"))
        if kind == "cut":
            content = content[:place] + content[place + length :]
        elif kind == "flip":
            flipped = bytes([content[place] ^ (1 << chance.randrange(8))])
            content = content[:place] + flipped + content[place + 1 :]
        elif kind == "duplicate":
            content = content[: place + length] + content[place:]
        elif kind == "insert":
            content = content[:place] + chance.randbytes(length) + content[place:]
        else:
            content = content[: max(1, place)]
    return content or b"{"


MUTATED = (
    "cpp_2_1.json",
    "cpp_2_13.json",
    "python_exporter.json",
    "compressed.json.gz",
    "list_with_text_times.json",
)


@pytest.mark.parametrize("seed", range(250))
def test_a_file_damaged_at_random_gives_a_table_or_a_refusal(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = tmp_path / "t.json"
    path.write_bytes(_mutated((odd.DATA / MUTATED[seed % len(MUTATED)]).read_bytes(), chance))
    trace = None
    refusal = ""
    try:
        trace = read_trace(path, cache=False)
    except DataError as error:
        refusal = str(error)
    if trace is None:
        assert any(words in refusal for words in ("not a trace", "metadata only", "empty"))
        return
    check_invariants(trace)
    arguments = trace.arguments(np.arange(len(trace.events)))
    assert len(arguments) == len(trace.events)


def test_every_rule_has_a_place_in_the_documentation() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "traces.md").read_text()
    for rule in RULES:
        assert f"`{rule}`" in text, rule


@pytest.mark.skipif(not SHARED.exists(), reason="the shared traces are not here")
def test_all_public_odd_files_give_a_table_or_a_clear_refusal() -> None:
    refused = {}
    files = sorted(SHARED.glob("*.json*"))
    assert len(files) == 23
    for path in files:
        try:
            check_invariants(read_trace(path, cache=False))
        except DataError as error:
            refused[path.name] = str(error)
    assert set(refused) == {"metadata_only.json", "not_a_trace.json"}
    assert "metadata only" in refused["metadata_only.json"]
    assert "not a trace" in refused["not_a_trace.json"]
