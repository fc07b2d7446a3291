"""A run directory as it is written and read back: segments, shadowing, events, summary, damage."""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.archive.reader import Run, open_run
from drivetrain.archive.writer import RankLog, RunWriter, append_event
from drivetrain.config import load_config
from drivetrain.errors import EnvironmentFault, RunError

MakeRun = Callable[..., RunWriter]


def test_a_new_run_has_its_manifest_and_configuration(make_run: MakeRun) -> None:
    with make_run("llama 2m/x", overrides=("training.train_iters=7",)) as writer:
        run = open_run(writer.path)
    assert run.id == writer.path.name
    assert run.name == "llama-2m-x"
    date, clock, *_, tail = run.id.split("-")
    assert (len(date), len(clock), len(tail)) == (8, 6, 4)
    assert run.config() == load_config("llama-2m", ("training.train_iters=7",)).config
    assert run.raw_config()["training"]["train_iters"] == 7
    assert run.manifest["schema"] == 1
    assert run.manifest["seed"] == 1234
    assert run.manifest["parent"] is None
    assert run.manifest["change"] is None
    assert run.metrics() == []
    assert run.events() == []
    assert run.summary() is None
    assert run.segments() == []


def test_runs_of_one_second_get_directories_of_their_own(make_run: MakeRun) -> None:
    paths = {make_run().path for _ in range(20)}
    assert len(paths) == 20


def test_a_manifest_without_provenance_is_our_own_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the manifest lacks"):
        RunWriter.create(tmp_path, "x", config_toml="", manifest={})


def test_a_run_that_cannot_be_written_leaves_nothing(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise EnvironmentFault("no space left on device")

    monkeypatch.setattr("drivetrain.archive.writer.write_json", full)
    with pytest.raises(EnvironmentFault):
        make_run()
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_runs_folder_that_cannot_be_made_is_named(tmp_path: Path, manifest: dict[str, Any]) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(EnvironmentFault, match="no run was started") as caught:
        RunWriter.create(tmp_path / "runs", "x", config_toml="", manifest=manifest)
    assert str(tmp_path / "runs") in str(caught.value)


def test_metrics_come_back_as_they_were_logged(make_run: MakeRun) -> None:
    writer = make_run()
    assert writer.open_segment(1) == 0
    writer.log_metrics(1, {"train/loss": 2.5, "throughput/device/mfu": None, "progress/flops": 10**20})
    writer.log_metrics(2, {"train/loss": math.nan, "train/grad_norm": math.inf}, tags=("checkpoint", "gc"))
    writer.close()
    first, second = open_run(writer.path).metrics()
    assert first.pop("time") <= second.pop("time")
    assert first == {
        "step": 1,
        "train/loss": 2.5,
        "throughput/device/mfu": None,
        "progress/flops": 1e20,
        "tags": [],
    }
    assert math.isnan(second.pop("train/loss"))
    assert second == {"step": 2, "train/grad_norm": math.inf, "tags": ["checkpoint", "gc"]}


def test_non_finite_values_are_strings_in_the_file(make_run: MakeRun) -> None:
    writer = make_run()
    writer.open_segment(1)
    values = {"train/loss": math.nan, "train/grad_norm": math.inf, "optim/lr": -math.inf}
    writer.log_metrics(1, values)
    header, line = (writer.path / "segments/0000/metrics.jsonl").read_text().splitlines()
    refuse = pytest.fail  # Python's parser would accept the bare word NaN, which is no JSON.
    parsed = json.loads(line, parse_constant=refuse)
    assert [parsed[key] for key in values] == ["NaN", "Infinity", "-Infinity"]
    head = json.loads(header)
    assert {key: head[key] for key in ("schema", "kind", "segment", "start_step")} == {
        "schema": 1,
        "kind": "metrics",
        "segment": 0,
        "start_step": 1,
    }


def test_a_metric_that_is_not_registered_cannot_be_logged(make_run: MakeRun) -> None:
    writer = make_run()
    writer.open_segment(1)
    with pytest.raises(AssertionError, match="train/los'"):
        writer.log_metrics(1, {"train/los": 1.0})


def test_each_line_is_there_as_soon_as_it_is_logged(make_run: MakeRun) -> None:
    writer = make_run()
    writer.open_segment(1)
    run = open_run(writer.path)
    for step in range(1, 4):
        writer.log_metrics(step, {"train/loss": float(step)})
        assert [line["step"] for line in run.metrics()] == list(range(1, step + 1))


@settings(deadline=None, max_examples=60)
@given(
    plan=st.lists(
        st.tuples(st.integers(1, 12), st.lists(st.integers(1, 3), max_size=8)), min_size=1, max_size=5
    )
)
def test_a_later_segment_shadows_the_steps_it_repeats_and_all_after(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[int, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("run")
    expected: dict[int, int] = {}
    for index, (start, strides) in enumerate(plan):
        folder = path / "segments" / f"{index:04d}"
        folder.mkdir(parents=True)
        header = {"schema": 1, "kind": "metrics", "segment": index, "start_step": start, "time": 0}
        lines: list[dict[str, Any]] = [header]
        expected = {step: owner for step, owner in expected.items() if step < start}
        step = start - 1
        for stride in strides:
            step += stride
            expected[step] = index
            lines.append({"step": step, "owner": index})
        (folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    facts = {"provenance": {}, "devices": {}, "dataset": {}, "layout": {}}
    document = {"schema": 1, "id": "x", "name": "x", "created": "2026-01-01T00:00:00+00:00", **facts}
    (path / "run.json").write_bytes(orjson.dumps(document))
    found = [(line["step"], line["owner"]) for line in open_run(path).metrics()]
    assert found == sorted(expected.items())


def test_a_segment_that_died_before_its_header_shadows_nothing(make_run: MakeRun) -> None:
    writer = make_run()
    writer.open_segment(1)
    for step in (1, 2, 3):
        writer.log_metrics(step, {"train/loss": 1.0})
    writer.close()
    (writer.path / "segments/0001").mkdir()
    (writer.path / "segments/0002").mkdir()
    (writer.path / "segments/0002/metrics.jsonl").write_bytes(b'{"schema":1,"kind":"met')
    run = open_run(writer.path)
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    assert [line["step"] for line in run.recent_metrics()] == [1, 2, 3]
    assert [segment.start_step for segment in run.segments()] == [1, None, None]
    resumed = RunWriter.resume(writer.path)
    assert resumed.open_segment(2) == 3
    resumed.log_metrics(2, {"train/loss": 2.0})
    assert [(line["step"], line["train/loss"]) for line in run.metrics()] == [(1, 1.0), (2, 2.0)]


def test_a_resumed_run_whose_event_file_was_torn_stays_readable(make_run: MakeRun) -> None:
    writer = make_run()
    writer.open_segment(1)
    writer.event("start", step=0)
    writer.event("checkpoint", step=5)
    writer.close()
    events = writer.path / "events.jsonl"
    events.write_bytes(events.read_bytes()[:-9])
    with RunWriter.resume(writer.path) as resumed:
        resumed.open_segment(1)
        resumed.event("resume", step=0)
    found = [(event["kind"], event["segment"]) for event in open_run(writer.path).events()]
    assert found == [("start", 0), ("resume", 1)]


def test_ranks_write_files_of_their_own_that_are_shadowed_alike(make_run: MakeRun) -> None:
    writer = make_run()
    for start in (1, 3):
        segment = writer.open_segment(start)
        logs = {rank: RankLog(writer.path, segment=segment, rank=rank, start_step=start) for rank in (0, 12)}
        for step in range(start, start + 3):
            logs[0].log(step, {"time/step_s": float(start)})
            logs[12].log(step, {"time/step_s": 10.0 * start})
        for log in logs.values():
            log.close()
    writer.close()
    ranks = open_run(writer.path).ranks()
    assert set(ranks) == {0, 12}
    assert [(line["step"], line["time/step_s"]) for line in ranks[12]] == [
        (1, 10.0),
        (2, 10.0),
        (3, 30.0),
        (4, 30.0),
        (5, 30.0),
    ]


def test_the_summary_of_an_earlier_segment_is_not_the_runs_summary(make_run: MakeRun) -> None:
    writer = make_run()
    writer.open_segment(1)
    writer.write_summary({"status": "interrupted", "final_loss": math.nan, "step_time_s": {"p50": math.inf}})
    run = open_run(writer.path)
    summary = run.summary()
    assert summary is not None
    assert math.isnan(summary["final_loss"])
    assert summary["step_time_s"]["p50"] == math.inf
    assert summary["schema"] == 1
    writer.open_segment(2)
    assert run.summary() is None


def test_a_moved_run_still_opens(make_run: MakeRun, tmp_path: Path) -> None:
    writer = make_run()
    writer.open_segment(1)
    writer.log_metrics(1, {"train/loss": 1.0})
    writer.event("end", status="finished", reason=None)
    writer.write_summary({"status": "finished", "final_loss": 1.0})
    writer.close()
    moved = tmp_path / "elsewhere" / "renamed"
    shutil.move(writer.path, moved)
    run = open_run(moved)
    assert run.id == writer.path.name
    assert run.status() == "finished"
    assert run.config() == load_config("llama-2m").config
    assert [line["step"] for line in run.metrics()] == [1]
    summary = run.summary()
    assert summary is not None
    with RunWriter.resume(moved) as resumed:
        assert resumed.open_segment(2) == 1
    stored = [path for path in moved.rglob("*") if path.is_file() and str(tmp_path) in path.read_text()]
    assert stored == []


def test_a_run_is_read_while_it_is_written(make_run: MakeRun) -> None:
    writer = make_run()
    writer.open_segment(1)

    def write() -> None:
        for step in range(1, 1501):
            if step % 500 == 0:
                writer.open_segment(step - 100)
            writer.log_metrics(step, {"train/loss": float(step), "train/grad_norm": math.nan})
            writer.event("evaluation", step=step)

    thread = threading.Thread(target=write)
    thread.start()
    run = open_run(writer.path)
    while thread.is_alive():
        steps = [line["step"] for line in run.metrics()]
        assert steps == sorted(set(steps))
        run.events()
        run.recent_metrics()
        run.segments()
    thread.join()
    assert run.metrics()[-1]["step"] == 1500


def test_a_tag_is_an_event_that_rewrites_nothing(make_run: MakeRun) -> None:
    writer = make_run()
    writer.open_segment(1)
    writer.event("start", step=0)
    before = (writer.path / "events.jsonl").read_bytes()
    for tag, action in (("good", "add"), ("slow", "add"), ("good", "remove"), ("best", "add")):
        append_event(writer.path, "tag", tag=tag, action=action)
    writer.event("warning", message="the writer goes on")
    run = open_run(writer.path)
    assert run.tags() == ["slow", "best"]
    assert (writer.path / "events.jsonl").read_bytes().startswith(before)
    assert run.events()[-1]["kind"] == "warning"
    assert [event["segment"] for event in run.events()] == [0, None, None, None, None, 0]


def test_an_event_of_an_unknown_kind_is_our_own_mistake(make_run: MakeRun) -> None:
    writer = make_run()
    with pytest.raises(AssertionError, match="no kind of event"):
        writer.event("finish")
    with pytest.raises(AssertionError, match="status='running'"):
        writer.event("end", status="running", reason=None)


class TestWhatIsNoRun:
    def test_a_path_that_does_not_exist(self, make_run: MakeRun) -> None:
        writer = make_run()
        wrong = writer.path.with_name(writer.path.name[:-1] + "z")
        with pytest.raises(RunError, match="does not exist; the nearest run in") as caught:
            open_run(wrong)
        assert str(caught.value).endswith(writer.path.name)

    def test_the_folder_of_runs_itself(self, make_run: MakeRun) -> None:
        writer = make_run()
        with pytest.raises(
            RunError, match=r"no run directory: run\.json is missing; the latest run in"
        ) as caught:
            open_run(writer.path.parent)
        assert str(caught.value).endswith(writer.path.name)

    def test_a_folder_inside_a_run(self, make_run: MakeRun) -> None:
        writer = make_run()
        with pytest.raises(RunError, match=f"the run is .*{writer.path.name}$"):
            open_run(writer.path / "segments")

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "x.toml").write_text("")
        with pytest.raises(RunError, match="is a file, a run is a folder"):
            open_run(tmp_path / "x.toml")

    def test_a_run_of_a_newer_version(self, make_run: MakeRun) -> None:
        path = make_run().path / "run.json"
        path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | {"schema": 2}))
        with pytest.raises(RunError, match="has schema 2, this version of drivetrain reads up to 1"):
            open_run(path.parent)

    def test_a_segment_of_a_newer_version(self, make_run: MakeRun) -> None:
        writer = make_run()
        writer.open_segment(1)
        path = writer.path / "segments/0000/metrics.jsonl"
        path.write_bytes(path.read_bytes().replace(b'"schema":1', b'"schema":7'))
        with pytest.raises(RunError, match=r"metrics\.jsonl has schema 7"):
            open_run(writer.path).metrics()

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [(b"{", "damaged"), (b"{}", "no schema"), (b'{"schema":1}', "'id' is missing")],
    )
    def test_a_damaged_manifest(self, make_run: MakeRun, content: bytes, complaint: str) -> None:
        path = make_run().path / "run.json"
        path.write_bytes(content)
        with pytest.raises(RunError, match=complaint) as caught:
            open_run(path.parent)
        assert str(path) in str(caught.value)

    def test_a_run_without_configuration(self, make_run: MakeRun) -> None:
        path = make_run().path
        (path / "config.toml").unlink()
        with pytest.raises(RunError, match=r"has no config\.toml"):
            open_run(path).config()
        with pytest.raises(RunError, match=r"has no config\.toml"):
            open_run(path).raw_config()

    def test_metrics_without_their_header(self, make_run: MakeRun) -> None:
        writer = make_run()
        writer.open_segment(1)
        (writer.path / "segments/0000/metrics.jsonl").write_bytes(b'{"step":1}\n{"step":2}\n')
        with pytest.raises(RunError, match="damaged at line 1: the segment's header"):
            open_run(writer.path).metrics()


@pytest.mark.parametrize(
    "line",
    [
        '{"a": 1}',
        '{"schema": 1, "kind": "end"}',
        '{"schema": 1, "time": 1, "segment": 0, "kind": "end"}',
        '{"schema": 1, "time": 1, "segment": 0, "kind": "tag"}',
        '{"schema": 1, "time": "x", "segment": 0, "kind": "start"}',
    ],
)
def test_a_line_that_is_no_event_is_an_error_that_names_it(make_run: MakeRun, line: str) -> None:
    with make_run() as writer:
        writer.event("start", step=0)
    with (writer.path / "events.jsonl").open("a") as file:
        file.write(line + "\n")
    for read in (Run.events, Run.tags, Run.end, Run.status):
        with pytest.raises(RunError, match=r"events\.jsonl is damaged at line 2"):
            read(open_run(writer.path))


def test_names_that_are_no_utf_8_are_kept_readable(make_run: MakeRun) -> None:
    with make_run(provenance={"command": ["drivetrain", "train", "caf\udce9.toml"]}) as writer:
        assert open_run(writer.path).manifest["provenance"]["command"][2] == "caf\\udce9.toml"


def test_a_run_is_read_whatever_the_locale(make_run: MakeRun) -> None:
    with make_run(overrides=("data.data_path=caf\u00e9",)) as writer:
        pass
    code = (
        "import sys; from drivetrain.archive.reader import open_run; "
        "run = open_run(sys.argv[1]); print(ascii(run.raw_config()['data']['data_path']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(writer.path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )
    assert done.stdout.strip() == r"'caf\xe9'", done.stderr
