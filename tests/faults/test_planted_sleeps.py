"""Time lost on purpose in a profiled run, on two ranks: the traces show it where it was lost."""

import gzip
import json
import statistics
from pathlib import Path

import pytest
from planted import Fault, PlantedRun, planted_run

from drivetrain.archive.reader import open_run
from runs_on_the_spot import Tiny

SLEEP_S = 0.1
FIRST, LAST = 8, 17
SETTINGS = [
    "model.hidden_size=128",
    "model.seq_length=64",
    "training.micro_batch_size=4",
    "training.global_batch_size=16",
    f"training.train_iters={LAST}",
    "training.eval_iters=0",
    "profiler.profile=true",
    f"profiler.profile_step_start={FIRST}",
    f"profiler.profile_step_end={LAST + 1}",
    "profiler.profile_ranks=all",
    "overlap.bucket_size_mb=1",
]
STEPS = range(FIRST, LAST + 1)


def run_with(tiny: Tiny, place: str, rank: int | None = None) -> PlantedRun:
    return planted_run(tiny.file, Fault(place, SLEEP_S, rank=rank), *SETTINGS)  # type: ignore[arg-type]


def spans_of(trace: Path, name: str) -> dict[int, float]:
    """Seconds of the spans of that name, by step."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    found = {}
    for step in ranges:
        if step["name"].startswith("ProfilerStep#"):
            start, end = step["ts"], step["ts"] + step["dur"]
            inside = [one["dur"] for one in ranges if one["name"] == name and start <= one["ts"] < end]
            found[int(step["name"].partition("#")[2])] = sum(inside) / 1e6
    return found


@pytest.mark.parametrize("place", ["fetch", "sync", "forward"])
def test_a_planted_sleep_lies_in_its_span_in_every_profiled_step(tiny: Tiny, place: str) -> None:
    planted = run_with(tiny, place, rank=1)
    run = open_run(planted.path)
    assert run.status() == "finished"
    assert planted.slept_s[0] == {}
    steps = [line["time/step_s"] for line in run.metrics() if line["step"] in STEPS]
    assert statistics.median(steps) < SLEEP_S / 0.2, "at least a fifth of a step is planted"
    for rank in (0, 1):
        spans = spans_of(
            planted.path / "profile" / f"{FIRST}-{LAST}" / f"rank{rank}.json.gz", f"drivetrain/{place}"
        )
        assert list(spans) == list(STEPS)
        if rank == 1:
            assert all(spans[step] >= planted.slept_s[1][step] for step in STEPS)


def test_a_run_that_breaks_in_its_window_leaves_no_trace_of_it(tiny: Tiny) -> None:
    with pytest.raises(AssertionError, match="planted"):
        planted_run(tiny.file, Fault("break", first_step=LAST - 2), *SETTINGS, world_size=1)
    run = tiny.only_run()
    assert run.status() == "failed"
    assert run.metrics()[-1]["step"] >= FIRST, "the window had begun"
    assert [path for path in (run.path / "profile").rglob("*") if path.is_file()] == []
