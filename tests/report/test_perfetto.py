"""The timeline for Perfetto: it reads back as it was written, nests, is on one clock, and adds up to the account."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.measure.account import Account
from drivetrain.report.perfetto import perfetto_json
from drivetrain.trace.account import account_of
from drivetrain.trace.read import is_timeline, read_trace
from drivetrain.trace.slices import RankSplit

GEMM = "ampere_sgemm_128x64_nn"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
BASE_NS = 1_700_000_000_000_000_000
STEP_NS = 100_000


@dataclass(frozen=True)
class Slice:
    """One slice read back; absolute ns."""

    rank: int
    track: str
    name: str
    start_ns: int
    end_ns: int


def record(category: str, name: str, start_ns: int, duration_ns: int, **arguments: Any) -> dict[str, Any]:
    on_device = category == "kernel"
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0 if on_device else 100,
        "tid": arguments.get("stream", 1),
        "ts": f"{start_ns // 1000}.{start_ns % 1000:03d}",
        "dur": f"{duration_ns // 1000}.{duration_ns % 1000:03d}",
        "args": arguments | ({"device": 0} if on_device else {}),
    }


def rank_file(folder: Path, rank: int, arrivals: Sequence[int], clock_ns: int) -> Path:
    """A step of 100 us for each arrival: compute until the all-reduce begins, which is over at 95.007 us."""
    events = []
    for i, arrival in enumerate(arrivals):
        start = clock_ns + i * STEP_NS
        events += [
            record("user_annotation", f"ProfilerStep#{i + 1}", start, STEP_NS),
            record("cuda_runtime", "cudaLaunchKernel", start + 1, 1000, correlation=2 * i + 1),
            record("cuda_runtime", "cudaLaunchKernel", start + 1500, 1000, correlation=2 * i + 2),
            record("kernel", GEMM, start + 2001, arrival - 2001, stream=7, correlation=2 * i + 1),
            record(
                "kernel",
                ALL_REDUCE,
                start + arrival,
                95_007 - arrival,
                stream=20,
                correlation=2 * i + 2,
                **{"Process Group Name": "0", "Process Group Description": "default_pg"},
            ),
        ]
    group = {"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]}
    document = {
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2, "pg_config": [group]},
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": events,
    }
    path = folder / f"rank{rank}.json"
    path.write_text(json.dumps(document))
    return path


def timeline(paths: Sequence[Path], target: Path) -> tuple[Account, list[RankSplit]]:
    splits: list[RankSplit] = []
    traces = (read_trace(path, cache=False) for path in paths)
    account = account_of(traces, on_split=splits.append)
    compress = target.suffix == ".gz"
    target.write_bytes(perfetto_json(splits, title="a job", name_table=account.name_table, compress=compress))
    return account, splits


def read_back(path: Path) -> list[Slice]:
    """What our own reader finds in a timeline; the tracks' names are in records that it leaves out."""
    content = path.read_bytes()
    document = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    tracks = {
        (str(one["pid"]), str(one["tid"])): one["args"]["name"]
        for one in document["traceEvents"]
        if one["name"] == "thread_name"
    }
    trace = read_trace(path, cache=False)
    events = trace.events
    assert not trace.partial
    assert {finding.id for finding in trace.health} <= {
        "missing_distributed_info",
        "missing_steps",
        "unsorted",
    }
    assert len(events) == sum(one["ph"] == "X" for one in document["traceEvents"])
    return [
        Slice(
            int(events.processes[events.process[i]]),
            tracks[events.processes[events.process[i]], events.threads[events.thread[i]]],
            events.names[events.name[i]],
            int(events.start_ns[i]),
            int(events.start_ns[i] + events.duration_ns[i]),
        )
        for i in range(len(events))
    ]


@pytest.fixture
def job(tmp_path: Path) -> list[Path]:
    """Rank 1 is late in the first two steps, rank 0 in the third; its clock is 5 s and 3 ns ahead."""
    return [
        rank_file(tmp_path, 0, [20_003, 20_000, 70_001], 0),
        rank_file(tmp_path, 1, [50_000, 60_002, 30_000], 5_000_000_003),
    ]


@pytest.mark.parametrize("name", ["timeline.json", "timeline.json.gz"])
def test_slices_of_a_step_add_up_to_its_window_and_its_classes(
    tmp_path: Path, job: list[Path], name: str
) -> None:
    account, splits = timeline(job, tmp_path / name)
    slices = read_back(tmp_path / name)
    for rank, split in zip(account.ranks, splits, strict=True):
        assert split.offset_ns is not None
        steps = {one.name: one for one in slices if (one.rank, one.track) == (rank.rank, "steps")}
        assert steps.keys() == {"step 1", "step 2", "step 3"}
        for step in rank.steps:
            window = steps[f"step {step.step}"]
            assert (window.start_ns, window.end_ns) == (
                step.start_ns + split.offset_ns,
                step.end_ns + split.offset_ns,
            )
            mine = [one for one in slices if one.rank == rank.rank and one.track == "account"]
            mine = [one for one in mine if window.start_ns <= one.start_ns < window.end_ns]
            assert sum(one.end_ns - one.start_ns for one in mine) == step.window.window_ns
            sums: dict[str, int] = {}
            for one in mine:
                sums[one.name] = sums.get(one.name, 0) + one.end_ns - one.start_ns
            assert sums == dict(step.window.classes)


def test_ranks_are_on_one_clock_and_name_the_last_one(tmp_path: Path, job: list[Path]) -> None:
    timeline(job, tmp_path / "timeline.json")
    slices = read_back(tmp_path / "timeline.json")
    arrived = [BASE_NS + 50_000, BASE_NS + STEP_NS + 60_002, BASE_NS + 2 * STEP_NS + 70_001]
    for rank in (0, 1):
        transfers = [one for one in slices if (one.rank, one.name) == (rank, "transfer")]
        assert [one.start_ns for one in transfers] == arrived
    waits = [(one.rank, one.name, one.end_ns - one.start_ns) for one in slices if one.name.startswith("wait")]
    assert waits == [
        (0, "wait for rank 1", 29_997),
        (0, "wait for rank 1", 40_002),
        (1, "wait for rank 0", 40_001),
    ]


def test_exposed_communication_is_its_own_track_with_the_sums_of_the_account(
    tmp_path: Path, job: list[Path]
) -> None:
    account, _ = timeline(job, tmp_path / "timeline.json")
    slices = read_back(tmp_path / "timeline.json")
    for rank in account.ranks:
        mine = [one for one in slices if (one.rank, one.track) == (rank.rank, "exposed communication")]
        assert sum(one.end_ns - one.start_ns for one in mine) == rank.whole.exposed_communication_ns


def test_counters_end_at_the_sums_of_all_windows(tmp_path: Path, job: list[Path]) -> None:
    account, _ = timeline(job, tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    for rank in account.ranks:
        values = [one["args"] for one in events if one["ph"] == "C" and one["pid"] == rank.rank]
        assert len(values) == 5, "the borders of three steps, and the end of the last kernel"
        assert set(values[0].values()) == {0}
        total = {name: sum(step.window.classes.get(name, 0) for step in rank.steps) for name in values[-1]}
        assert {name: round(ms * 1e6) for name, ms in values[-1].items()} == total


def test_times_are_microseconds_with_three_digits(tmp_path: Path, job: list[Path]) -> None:
    timeline(job, tmp_path / "timeline.json")
    lines = (tmp_path / "timeline.json").read_text().splitlines()
    document = json.loads("\n".join(lines))
    assert document["schema"] == 1
    assert document["baseTimeNanoseconds"] == BASE_NS + 2001
    assert '"ts":0.000,' in next(line for line in lines if '"cat":"step"' in line)
    assert all(one["ts"] >= 0 for one in document["traceEvents"] if one["ph"] == "X")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 90_000), st.integers(1, 40_000)), min_size=1, max_size=8))
def test_slices_of_a_track_nest_whatever_overlaps(
    tmp_path_factory: pytest.TempPathFactory, collectives: list[tuple[int, int]]
) -> None:
    """Viewers drop a slice that reaches over the end of the one it begins in."""
    folder = tmp_path_factory.mktemp("nest")
    events = [
        record("kernel", ALL_REDUCE, start, length, stream=20 + i, correlation=i)
        for i, (start, length) in enumerate(collectives)
    ]
    path = folder / "rank0.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": BASE_NS, "traceEvents": events}))
    timeline([path], folder / "timeline.json")
    open_until: dict[str, list[int]] = {}
    slices = read_back(folder / "timeline.json")
    for one in slices:
        ends = open_until.setdefault(one.track, [])
        while ends and ends[-1] <= one.start_ns:
            ends.pop()
        assert not ends or one.end_ns <= ends[-1]
        ends.append(one.end_ns)
    shown = [one for one in slices if one.track.startswith("collectives")]
    assert len(shown) == len(collectives)


def test_a_timeline_is_known_as_one(tmp_path: Path, job: list[Path]) -> None:
    timeline(job, tmp_path / "timeline.json.gz")
    assert is_timeline(tmp_path / "timeline.json.gz")
    assert not is_timeline(job[0])
