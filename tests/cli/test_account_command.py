"""``drivetrain account`` on small traces of our own, and on what is no trace."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from drivetrain.cli.account_sources import first_trace
from drivetrain.cli.application import application
from drivetrain.errors import DrivetrainError, RunError
from drivetrain.measure.optimisation import OptimisationRecord
from report_samples import make_run

CONTRACT = {
    "window_ns",
    "busy_ns",
    "idle_ns",
    "compute_ns",
    "communication_ns",
    "overlapped_communication_ns",
    "exposed_communication_ns",
    "copy_ns",
    "exposed_copy_ns",
    "classes",
    "unexplained_ns",
}


def kernel(name: str, start_us: float, duration_us: float, stream: int = 7) -> dict[str, object]:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": start_us,
        "dur": duration_us,
        "args": {"device": 0, "stream": stream, "correlation": int(start_us)},
    }


def write_trace(path: Path, rank: int, events: list[dict[str, object]], world_size: int = 2) -> Path:
    document = {
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
        "traceEvents": events,
    }
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(application(), ["account", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def one_trace(tmp_path: Path) -> Path:
    events = [
        kernel("ampere_bf16_s16816gemm_bf16_128x128", 0, 60),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 40, 50, stream=20),
        kernel("Memcpy HtoD (Pinned -> Device)", 95, 5) | {"cat": "gpu_memcpy"},
    ]
    return write_trace(tmp_path / "rank0.json.gz", 0, events)


def test_the_json_document_is_the_contract_in_integers(one_trace: Path) -> None:
    document = json.loads(invoke(str(one_trace), "--json"))
    assert document.keys() >= {"health", "ranks", "collectives", "clock_residual_ns", "waterfall"}
    (rank,) = document["ranks"]
    whole = rank["whole"]
    assert whole.keys() == CONTRACT
    assert whole["window_ns"] == 100_000
    assert whole["compute_ns"] == 60_000
    assert whole["communication_ns"] == 50_000
    assert whole["overlapped_communication_ns"] == 20_000
    assert whole["exposed_communication_ns"] == 30_000
    assert whole["exposed_copy_ns"] == 5_000
    assert sum(whole["classes"].values()) + whole["unexplained_ns"] == whole["window_ns"]


def test_a_folder_is_all_its_traces(tmp_path: Path, one_trace: Path) -> None:
    write_trace(tmp_path / "rank1.json.gz", 1, [kernel("ampere_sgemm", 0, 10)])
    document = json.loads(invoke(str(tmp_path), "--json"))
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]


def test_other_json_in_a_folder_is_passed_over_and_said_so(tmp_path: Path, one_trace: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    result = CliRunner().invoke(application(), ["account", str(tmp_path), "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "passed over" in result.stderr
    assert "config.json" in result.stderr
    assert len(json.loads(result.stdout)["ranks"]) == 1


def test_pages_and_figures_are_written(tmp_path: Path, one_trace: Path) -> None:
    invoke(str(one_trace), "--html", str(tmp_path / "a.html"), "--svg", str(tmp_path / "a.svg"))
    assert (tmp_path / "a.html").read_text().lower().startswith("<!doctype html>")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"hello there", "trace"), (b"", "empty"), (b'{"traceEvents": []}', "none that can be read")],
)
def test_what_is_no_trace_is_refused_in_words(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(DrivetrainError, match=words):
        CliRunner().invoke(application(), ["account", str(path)], catch_exceptions=False)


def test_ranks_of_different_jobs_are_refused(tmp_path: Path, one_trace: Path) -> None:
    other = write_trace(tmp_path / "other.json.gz", 1, [kernel("ampere_sgemm", 0, 10)], world_size=64)
    with pytest.raises(DrivetrainError, match="job"):
        CliRunner().invoke(application(), ["account", str(one_trace), str(other)], catch_exceptions=False)


def test_flops_need_both_the_model_and_the_tokens(one_trace: Path) -> None:
    with pytest.raises(DrivetrainError, match="tokens per step"):
        CliRunner().invoke(
            application(), ["account", str(one_trace), "--model", "llama2-7b"], catch_exceptions=False
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kernels", "3", "--json"], "text only"),
        (["--device", "H100-SXM-80GB", "--peak-flops", "1e12"], "two peaks"),
        (["--dtype", "fp32"], "give a device"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(
    one_trace: Path, options: list[str], words: str
) -> None:
    with pytest.raises(DrivetrainError, match=words):
        CliRunner().invoke(application(), ["account", str(one_trace), *options], catch_exceptions=False)


def test_what_does_not_show_although_expected_is_in_health(one_trace: Path) -> None:
    document = json.loads(invoke(str(one_trace), "--json", "--expect", "fp8", "--expect", "bf16"))
    found = [finding["id"] for finding in document["health"] if finding["id"].startswith("expected_")]
    assert found == ["expected_fp8_absent"]


def test_an_unknown_expectation_names_the_legal_ones(one_trace: Path) -> None:
    with pytest.raises(
        DrivetrainError, match="Legal: flash, bf16, fp16, fp8, tf32, fused-optimizer, compile"
    ):
        invoke(str(one_trace), "--expect", "flsh")


def test_a_timeline_is_written_beside_whatever_is_printed(tmp_path: Path, one_trace: Path) -> None:
    target = tmp_path / "timeline.json.gz"
    document = json.loads(invoke(str(one_trace), "--json", "--perfetto", str(target)))
    slices = [
        one
        for one in json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
        if one.get("cat") == "class"
    ]
    classes: dict[str, int] = {}
    for one in slices:
        classes[one["name"]] = classes.get(one["name"], 0) + round(one["dur"] * 1000)
    whole = document["ranks"][0]["whole"]
    assert classes.pop("unexplained", 0) == whole["unexplained_ns"]
    assert classes == whole["classes"]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (".", "is a folder; name a file"),
        ("nowhere/timeline.json.gz", "does not exist"),
        ("timeline.html", "must end in .json or .json.gz"),
        ("rank0.json.gz", "would replace one of the traces"),
    ],
)
def test_a_timeline_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, one_trace: Path, target: str, words: str
) -> None:
    before = one_trace.read_bytes()
    with pytest.raises(DrivetrainError, match=words):
        CliRunner().invoke(
            application(),
            ["account", str(tmp_path), "--perfetto", str(tmp_path / target)],
            catch_exceptions=False,
        )
    assert one_trace.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.json.gz"]


def test_a_timeline_is_no_trace_and_may_be_written_again(tmp_path: Path, one_trace: Path) -> None:
    target = tmp_path / "timeline.json"
    invoke(str(one_trace), "--perfetto", str(target))
    with pytest.raises(DrivetrainError, match="a timeline made of an account"):
        CliRunner().invoke(application(), ["account", str(target)], catch_exceptions=False)
    first = target.read_bytes()
    result = CliRunner().invoke(
        application(),
        ["account", str(tmp_path), "--json", "--perfetto", str(target)],
        catch_exceptions=False,
    )
    assert "passed over" in result.stderr
    assert [rank["rank"] for rank in json.loads(result.stdout)["ranks"]] == [0]
    events = json.loads(first)["traceEvents"]
    assert json.loads(target.read_bytes())["traceEvents"] == events


def test_kernels_are_those_of_a_trace_the_account_is_of(tmp_path: Path, one_trace: Path) -> None:
    """A timeline and other JSON sort before the trace, and are passed over for both."""
    (tmp_path / "a.json").write_text('{"hidden_size": 4}')
    invoke(str(one_trace), "--perfetto", str(tmp_path / "account.json"))
    printed = invoke(str(tmp_path), "--kernels", "3")
    assert "\nkernels of rank0.json.gz\n" in printed
    assert first_trace([str(tmp_path)]).path == one_trace


def host(category: str, name: str, start_us: float, duration_us: float, **more: Any) -> dict[str, object]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": 100,
        "ts": start_us,
        "dur": duration_us,
        "args": more,
    }


def test_the_users_rules_say_which_calls_wait(tmp_path: Path) -> None:
    events = [
        host("cpu_op", "aten::mm", 0, 5),
        host("cuda_runtime", "cudaLaunchKernel", 1, 1, correlation=10),
        kernel("ampere_sgemm", 10, 90),
        host("cuda_runtime", "cudaQuietWait", 20, 90),
        host("cuda_runtime", "cudaLaunchKernel", 120, 1, correlation=130),
        kernel("ampere_sgemm", 130, 10),
    ]
    trace = write_trace(tmp_path / "rank0.json.gz", 0, events, world_size=1)
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nside = "cause"\nclass = "host.sync"\npattern = "^cudaQuietWait$"\n')
    assert "cudaQuietWait" not in invoke(str(trace), "--kernels", "3")
    printed = invoke(str(trace), "--kernels", "3", "--rules", str(rules))
    assert "cudaQuietWait" in printed[printed.index("where the host waits for the device") :]


def test_copies_without_kernels_tell_nothing_of_the_device(tmp_path: Path) -> None:
    events = [
        host("cpu_op", "aten::mm", 0, 5),
        host("cuda_runtime", "cudaLaunchKernel", 1, 1, correlation=10),
        kernel("Memcpy HtoD (Pinned -> Device)", 10, 5) | {"cat": "gpu_memcpy"},
        host("cpu_op", "aten::item", 20, 90),
        host("cuda_runtime", "cudaStreamSynchronize", 22, 80),
        kernel("Memcpy HtoD (Pinned -> Device)", 130, 5) | {"cat": "gpu_memcpy"},
    ]
    trace = write_trace(tmp_path / "rank0.json.gz", 0, events, world_size=1)
    printed = invoke(str(trace), "--kernels", "3")
    assert "no device was recorded: host time in operators that would wait for one" in printed
    assert "device idle because of them" not in printed


@pytest.fixture
def profiled_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a profile window of one trace, in the ``runs`` of the working directory."""
    monkeypatch.chdir(tmp_path)
    with make_run(tmp_path / "runs", "small") as writer:
        writer.open_segment(1)
        folder = writer.path / "profile" / "10-11"
        folder.mkdir(parents=True)
        trace = write_trace(folder / "rank0.json.gz", 0, [kernel("ampere_sgemm", 0, 10)], world_size=1)
        writer.event(
            "window",
            what="profile",
            first=10,
            last=11,
            path="profile/10-11",
            file_bytes={"rank0.json.gz": trace.stat().st_size},
            tokens=8192,
            effective_tokens=8192,
            model_flops=10**12,
        )
        writer.event("end", status="finished", reason=None)
    return writer.path


@pytest.mark.parametrize("reference", ["latest", "small", "id"])
def test_a_run_is_meant_by_its_name_id_or_latest(profiled_run: Path, reference: str) -> None:
    printed = invoke(profiled_run.name if reference == "id" else reference)
    assert f"Account of {profiled_run.name}" in printed


def test_an_operator_that_another_backend_served_is_said_in_the_account_of_its_run(tmp_path: Path) -> None:
    with make_run(tmp_path / "runs", "small") as writer:
        writer.open_segment(1)
        record = OptimisationRecord("rms_norm", "fusion.rms_norm", "triton", requested=True, active=True)
        writer.event("optimisation", when="start", **record.to_document())
        folder = writer.path / "profile" / "10-11"
        folder.mkdir(parents=True)
        trace = write_trace(folder / "rank0.json.gz", 0, [kernel("ampere_sgemm", 0, 10)], world_size=1)
        writer.event(
            "window",
            what="profile",
            first=10,
            last=11,
            path="profile/10-11",
            file_bytes={"rank0.json.gz": trace.stat().st_size},
            tokens=8192,
            effective_tokens=8192,
            model_flops=10**12,
        )
        fallen = replace(record, active=False, reason="no Triton here", served={"eager": 48})
        writer.event("optimisation", when="end", **fallen.to_document())
        writer.event("end", status="finished", reason=None)
    said = "fusion.rms_norm = triton was asked for; of 48 calls 48 by eager: no Triton here"
    assert f"warning: {said}" in invoke(str(writer.path)).splitlines()
    health = json.loads(invoke(str(writer.path), "--json"))["health"]
    assert [one["message"] for one in health if one["id"] == "operator_fallback"] == [said]


def test_what_is_neither_a_path_nor_a_run_says_what_was_tried(profiled_run: Path) -> None:
    with pytest.raises(RunError) as caught:
        invoke("smal1.json")
    assert "smal1.json is neither a trace nor a folder of traces, and no run" in str(caught.value)
    assert profiled_run.name in str(caught.value)


def test_a_folder_of_traces_that_no_event_tells_of_is_no_window_of_the_run(profiled_run: Path) -> None:
    """Steps 90 to 91 were profiled once, and their segment is gone."""
    folder = profiled_run / "profile" / "90-91"
    folder.mkdir()
    write_trace(folder / "rank0.json.gz", 0, [kernel("elementwise_kernel", 0, 70)], world_size=1)
    document = json.loads(invoke(str(profiled_run), "--json"))
    assert document["ranks"][0]["whole"]["window_ns"] == 10_000


def test_a_run_whose_traces_were_left_behind_says_so(profiled_run: Path) -> None:
    (profiled_run / "profile" / "10-11" / "rank0.json.gz").unlink()
    (profiled_run / "profile" / "10-11").rmdir()
    with pytest.raises(RunError, match=r"10-11 is missing; copy the run again whole, or make one with"):
        invoke(str(profiled_run))
