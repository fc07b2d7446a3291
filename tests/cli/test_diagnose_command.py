"""``drivetrain diagnose`` on traces, on a run of ours, and on what is neither."""

import gzip
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from drivetrain.cli.application import application
from drivetrain.errors import DrivetrainError
from runs_on_the_spot import Tiny


def event(category: str, name: str, start: float, duration: float, **arguments: Any) -> dict[str, Any]:
    on_device = category in ("kernel", "gpu_memcpy")
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0 if on_device else 1,
        "tid": 7 if on_device else 100,
        "ts": start,
        "dur": duration,
        "args": {"device": 0, "stream": 7, **arguments} if on_device else arguments,
    }


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three steps of 1 ms: 600 us of fp32 products, and a loader that everything waits for."""
    events = []
    for step in range(3):
        at = step * 1000.0
        events += [
            event("user_annotation", f"ProfilerStep#{step}", at, 1000),
            event("cpu_op", "aten::mm", at, 10, **{"External id": step + 1}),
            event(
                "cuda_runtime",
                "cudaLaunchKernel",
                at + 2,
                1,
                correlation=step + 1,
                **{"External id": step + 1},
            ),
            event("kernel", "ampere_sgemm_128x64_nn", at + 5, 600, correlation=step + 1),
            event(
                "user_annotation",
                "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
                at + 600,
                395,
            ),
        ]
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


FLOPS = ("--model", "llama-2m", "--tokens-per-step", "4096", "--peak-flops", "2e14")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(application(), ["diagnose", *arguments], catch_exceptions=False)


def test_the_largest_loss_of_a_trace_comes_first_with_its_remedy(trace: Path) -> None:
    result = invoke(str(trace))
    assert result.exit_code == 0, result.output
    rows = result.stdout[result.stdout.index("losses") :].splitlines()
    assert "data.loader: the training thread waits for its batch" in rows[2]
    assert "data_workers (data.num_workers, at most 1." in rows[3]


def test_json_is_one_document_with_ranked_findings(trace: Path) -> None:
    document = json.loads(invoke(str(trace), "--json", "--expect", "bf16").stdout)
    assert document["schema"] == 2
    findings = document["findings"]
    assert [finding["subject"] for finding in findings][:2] == ["bf16", "data.loader"]
    assert findings[1]["ms_per_step"] == pytest.approx(0.39, rel=0.05)
    assert findings[1]["mfu_points"] is None
    assert "model FLOPs are unknown" in findings[1]["mfu_points_reason"]


def test_a_loss_above_the_limit_exits_with_1_and_names_it(trace: Path) -> None:
    assert invoke(str(trace), *FLOPS, "--fail-above", "90").exit_code == 0
    result = invoke(str(trace), *FLOPS, "--fail-above", "10")
    assert result.exit_code == 1
    assert result.stderr == "data.loader takes 39.1 points, more than 10\n"


def test_a_limit_in_points_without_points_is_refused(trace: Path) -> None:
    with pytest.raises(
        DrivetrainError, match="--fail-above 10 cannot be judged without MFU points: model FLOPs"
    ):
        invoke(str(trace), "--fail-above", "10")


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text("hello")
    with pytest.raises(DrivetrainError, match="not a trace"):
        invoke(str(path))
    with pytest.raises(DrivetrainError):
        invoke(str(tmp_path / "absent.json"))


def test_a_request_that_cannot_take_effect_is_a_warning_of_the_run_and_a_finding(tiny: Tiny) -> None:
    done = tiny.run("profile", str(tiny.file), "overlap.bucket_size_mb=30", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert "overlap.bucket_size_mb" in done.stderr
    assert "one process has nobody to communicate with" in done.stderr
    run = json.loads(done.stdout)["run"]
    diagnosed = tiny.run("diagnose", run, "--json")
    assert diagnosed.returncode == 0, diagnosed.stderr
    document = json.loads(diagnosed.stdout)
    first = document["findings"][0]
    assert (first["rule"], first["kind"], first["subject"]) == (
        "without_effect",
        "not_in_effect",
        "ddp_bucket",
    )
    assert "one process has nobody to communicate with" in first["evidence"][0]["text"]
    losses = {finding["subject"]: finding for finding in document["findings"] if finding["kind"] == "loss"}
    assert losses["data.loader"]["remedies"][0]["change"] == {"data.num_workers": 1}


def test_a_run_without_a_profile_says_how_to_make_one(tiny: Tiny) -> None:
    run = tiny.train("training.train_iters=2")["run"]
    done = tiny.run("diagnose", run)
    assert done.returncode == 2
    assert "drivetrain profile" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_loss_too_small_to_be_claimed_counts_against_the_limit(tmp_path: Path) -> None:
    events = []
    for step in range(3):
        at, correlation = step * 1000.0, step + 1
        launch = event("cuda_runtime", "cudaLaunchKernel", at + 2, 1, correlation=correlation)
        events += [
            event("user_annotation", f"ProfilerStep#{step}", at, 1000),
            event("cpu_op", "aten::mm", at, 10),
            launch,
            event("kernel", "ampere_sgemm_128x64_nn", at + 5, 992, correlation=correlation),
        ]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    mfu = json.loads(invoke(str(path), *FLOPS, "--json").stdout)["mfu"]
    # The products reach 99% of a step at this peak, so that nothing takes a whole point.
    figures = (*FLOPS[:4], "--peak-flops", str(2e14 * mfu / 99.0))
    document = json.loads(invoke(str(path), *figures, "--json").stdout)
    known = [one for one in document["findings"] if one["kind"] == "loss" and one["ms_per_step"] is not None]
    assert known == []
    assert invoke(str(path), *figures, "--fail-above", "1").exit_code == 0
    result = invoke(str(path), *figures, "--fail-above", "0.4")
    assert result.exit_code == 1
    assert "points, more than 0.4" in result.stderr


def test_no_line_is_blamed_for_idleness_that_the_account_does_not_know(tmp_path: Path) -> None:
    """Copies without kernels: the account is of the host alone."""
    events = [
        event("cpu_op", "aten::mm", 0, 5),
        event("cuda_runtime", "cudaLaunchKernel", 1, 1, correlation=1),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 10, 5, correlation=2),
        event("cpu_op", "aten::item", 20, 90),
        event("cuda_runtime", "cudaStreamSynchronize", 22, 80),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 130, 5, correlation=3),
    ]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    findings = json.loads(invoke(str(path), "--json").stdout)["findings"]
    assert [finding for finding in findings if finding["rule"] == "synchronisation_points"] == []


def test_the_document_keeps_its_contract(trace: Path) -> None:
    document = json.loads(invoke(str(trace), *FLOPS, "--json").stdout)
    assert document.keys() >= {"health", "findings", "nearest_published"}
    assert [one["position"] for one in document["findings"]] == list(range(1, len(document["findings"]) + 1))
    keys = {"position", "cause", "class", "ms_per_step", "mfu_points", "confidence", "evidence", "remedies"}
    first = document["findings"][0]
    assert first.keys() >= keys
    assert (first["cause"], first["class"], first["confidence"]) == ("data.waiting", "data.loader", "high")
    assert first["remedies"][0].keys() >= {"optimisation", "change", "bound", "estimate", "memory_bytes"}
    reasons = {one["rule"]: one["reason"] for one in document["not_asked"]}
    assert "traces of several ranks" in reasons["late_ranks"]
    assert document["nearest_published"]["source"]


def test_a_view_is_one_of_four(trace: Path) -> None:
    assert "1. data loading" in invoke(str(trace), "--view", "search").stdout
    assert "symptom, cause, first remedy" in invoke(str(trace), "--view", "symptoms").stdout
    assert "nearest published run" in invoke(str(trace)).stdout
    charts = invoke(str(trace), "--view", "charts").stdout
    assert [charts.count(title) for title in ("Data gap", "Kernels with", "Communication share")] == [1, 1, 1]
    with pytest.raises(DrivetrainError, match="--view 'chart' is none of losses, symptoms, search, charts"):
        invoke(str(trace), "--view", "chart")


def test_the_first_screen_of_a_trace_names_the_loss_and_what_to_do(trace: Path) -> None:
    top = invoke(str(trace)).stdout.split("\n\n")[1]
    assert "39.1% of a step to data.loader" in " ".join(top.split())
    assert "Do next   data_workers: " in top
    assert "\x1b[" not in top, "no colours without a terminal"


def test_the_document_holds_the_charts_and_the_next_step(trace: Path) -> None:
    document = json.loads(invoke(str(trace), "--json", "--device", "A100-SXM-80GB").stdout)
    gap, kernels, exposed = (document["charts"][name] for name in ("data_gap", "kernels", "communication"))
    assert [row["share"] for row in gap["rows"]] == pytest.approx([0.395, 0.395, 0.395], abs=0.01)
    assert (kernels["kernels"][0]["name"], kernels["kernels"][0]["calls"]) == ("ampere_sgemm_128x64_nn", 1.0)
    assert kernels["kernels"][0]["per_second_reason"] == "no shapes were recorded for it"
    assert exposed["withheld"].startswith("no collective was recorded")
    assert (document["next"]["kind"], document["next"]["position"]) == ("change", 1)


def test_a_page_of_a_trace_is_well_formed_and_has_the_charts(trace: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    result = invoke(str(trace), "--html", str(target))
    assert result.exit_code == 0
    assert f"wrote {target}" in result.stderr
    page = target.read_text(encoding="utf-8")
    ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>").replace("&#160;", " "))
    assert page.count("<svg") == 3, "waterfall, data gap, kernels"
    assert "Communication share: withheld. No collective was recorded" in page
    assert "<script" not in page
