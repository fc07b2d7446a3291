"""``drivetrain report``: the page, Markdown and JSON of a run or a tune, and what is neither."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from drivetrain.archive.reader import open_run
from drivetrain.archive.writer import RunWriter
from drivetrain.cli.application import application, main
from drivetrain.errors import DrivetrainError, RunError
from report_samples import finished_run, make_tune, tune_document
from runs_on_the_spot import Tiny

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(application(), ["report", *map(str, arguments)], catch_exceptions=False)

    return run


def test_the_page_is_written_into_the_run(tmp_path: Path, invoke: Invoke) -> None:
    path = finished_run(tmp_path / "runs")
    result = invoke("latest")
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    root = ElementTree.fromstring((path / "report.html").read_text())
    assert root.find("head/title") is not None
    assert open_run(path).status() == "finished"


def test_the_page_goes_where_output_says_and_nothing_is_written_into_the_run(
    tmp_path: Path, invoke: Invoke
) -> None:
    path = finished_run(tmp_path / "runs")
    before = sorted(entry.name for entry in path.iterdir())
    assert invoke(path, "--output", "page.html").exit_code == 0
    assert (tmp_path / "page.html").is_file()
    assert sorted(entry.name for entry in path.iterdir()) == before


def test_markdown_is_printed_or_written(tmp_path: Path, invoke: Invoke) -> None:
    path = finished_run(tmp_path / "runs")
    printed = invoke(path, "--markdown")
    assert printed.stdout.startswith("# llama-2m\n")
    assert not (path / "report.html").exists()
    assert invoke(path, "--markdown", "--output", "page.md").stdout == ""
    assert (tmp_path / "page.md").read_text() == printed.stdout


def test_json_is_the_summary_and_says_where_the_page_is(tmp_path: Path, invoke: Invoke) -> None:
    path = finished_run(tmp_path / "runs")
    document = json.loads(invoke(path, "--json").stdout)
    stored = json.loads((path / "summary.json").read_text())
    for key in ("mfu", "step_time_s", "final_loss", "mfu_rule", "reasons", "tokens"):
        assert document[key] == stored[key]
    assert document["report"] == str(path / "report.html")
    assert (path / "report.html").is_file()


def test_two_documents_do_not_share_stdout(tmp_path: Path, invoke: Invoke) -> None:
    path = finished_run(tmp_path / "runs")
    with pytest.raises(DrivetrainError, match="--output"):
        invoke(path, "--json", "--markdown")
    assert (
        json.loads(invoke(path, "--json", "--markdown", "--output", "page.md").stdout)["report"] == "page.md"
    )


@pytest.mark.parametrize("reference", ["id", "start", "end", "path", "path/"])
def test_a_tune_is_found_by_its_id_or_its_folder(tmp_path: Path, invoke: Invoke, reference: str) -> None:
    path = make_tune(tmp_path / "tunes")
    name = {
        "id": path.name,
        "start": path.name[:15],
        "end": "beef",
        "path": f"tunes/{path.name}",
        "path/": f"tunes/{path.name}/",
    }[reference]
    document = json.loads(invoke(name, "--json").stdout)
    assert document["tune"] == path.name
    assert document["steps"] == json.loads(json.dumps(tune_document()["steps"]))
    assert (path / "report.html").is_file()


def test_latest_is_a_run_where_there_are_runs_and_a_tune_where_there_are_none(
    tmp_path: Path, invoke: Invoke
) -> None:
    tune = make_tune(tmp_path / "tunes")
    assert json.loads(invoke("latest", "--json").stdout)["tune"] == tune.name
    run = finished_run(tmp_path / "runs")
    assert json.loads(invoke("latest", "--json").stdout)["id"] == run.name


def test_what_is_neither_run_nor_tune_is_named_with_what_there_is(tmp_path: Path, invoke: Invoke) -> None:
    finished_run(tmp_path / "runs", "llama")
    with pytest.raises(RunError, match=r"no run 'lama'.*did you mean 'llama'"):
        invoke("lama")
    (tmp_path / "folder" / "empty").mkdir(parents=True)
    with pytest.raises(RunError, match=r"run\.json is missing"):
        invoke("folder/empty")
    (tmp_path / "file.json").write_text("{}")
    with pytest.raises(RunError):
        invoke(tmp_path / "file.json")


def test_the_exit_code_of_bad_input_is_2_and_there_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["drivetrain", "report", "nothing"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Traceback" not in error


def test_a_manifest_of_a_newer_version_is_refused_with_what_helps(tmp_path: Path, invoke: Invoke) -> None:
    path = finished_run(tmp_path / "runs")
    manifest = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**manifest, "schema": 99}))
    with pytest.raises(RunError, match="upgrade drivetrain"):
        invoke(path)


def trace_of_one_rank(path: Path) -> None:
    """A trace of two kernels beside each other."""
    events = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": name,
            "pid": 0,
            "tid": 7,
            "ts": start,
            "dur": 40,
            "args": {"device": 0, "stream": 7, "correlation": start},
        }
        for name, start in (("ampere_bf16_s16816gemm_bf16_128x128", 0), ("elementwise_kernel", 60))
    ]
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}))


def profiled_run(runs_dir: Path) -> Path:
    """A run whose events tell of a profile window, without an account."""
    path = finished_run(runs_dir, with_account=False)
    with RunWriter.resume(path) as writer:
        writer.segment = 0
        counts = {"tokens": 8192, "effective_tokens": 8192, "model_flops": 10**12}
        window = {"first": 10, "last": 11, "path": "profile/10-11", "file_bytes": {"rank0.json": 100}}
        writer.event("window", what="profile", **window, **counts)
    return path


def test_traces_without_an_account_are_read_for_the_page(tmp_path: Path, invoke: Invoke) -> None:
    path = profiled_run(tmp_path / "runs")
    trace_of_one_rank(path / "profile" / "10-11" / "rank0.json")
    printed = invoke(path, "--markdown").stdout
    assert "compute.matmul" in printed
    assert not (path / "account.json").exists(), "a report writes nothing but itself"


def test_traces_that_cannot_be_read_cost_only_their_section(tmp_path: Path, invoke: Invoke) -> None:
    path = profiled_run(tmp_path / "runs")
    target = path / "profile" / "10-11" / "rank0.json"
    target.parent.mkdir(parents=True)
    target.write_text("no trace at all")
    printed = invoke(path, "--markdown").stdout
    assert "the account: " in printed
    assert "13,653" in printed


def test_a_run_that_was_really_trained_has_every_section_with_its_own_figures(
    tiny: Tiny, invoke: Invoke
) -> None:
    summary = tiny.train(
        "profiler.profile=true",
        "profiler.profile_step_start=5",
        "profiler.profile_step_end=7",
        "data.num_workers=1",
    )
    printed = invoke(summary["run"], "--markdown").stdout
    sections = printed.split("\n## ")
    assert [section.partition("\n")[0] for section in sections[1:]] == [
        "What to do next",
        "Five dimensions",
        "What changed",
        "Where the time went",
        "What is lost",
        "Three charts",
        "Loss and gradient norm",
        "Step time",
        "Optimisations",
        "Events",
        "Provenance",
    ]
    assert f"{summary['final_loss']:.4f} nat/token" in sections[2]
    assert summary["mfu_rule"]["window"] in sections[2]
    assert "step 6" in sections[4]
    assert "compute.matmul" in sections[4]
    losses = {line["step"]: line["train/loss"] for line in open_run(summary["run"]).metrics()}
    assert f"loss: {losses[1]:.4f} at step 1, {losses[8]:.4f} at step 8" in sections[7]
    assert f"held-out loss at step 8: {summary['validation_loss']:.4f}" in sections[7]
    assert "| data\\_workers | `data.num_workers=1` | yes | yes | shown" in sections[9]
    assert f"seed: {open_run(summary['run']).manifest['seed']}" in sections[11]
