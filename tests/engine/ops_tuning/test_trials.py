"""Trying a backend: what is wrong is rejected, what crashes or hangs takes no tuner with it."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tuning_examples import BAD, FOLDER, MODULE, OPERATOR, norm_call

from drivetrain.engine.ops.discovery import operator_named
from drivetrain.engine.ops.signature import Argument, Signature
from drivetrain.engine.ops_tuning.calling import arguments_on, forward_and_backward, peak_bytes
from drivetrain.engine.ops_tuning.child import answer
from drivetrain.engine.ops_tuning.described import described
from drivetrain.engine.ops_tuning.processes import Children
from drivetrain.engine.ops_tuning.timing import disagreement, time_backends
from rank_processes import on_ranks


def grade_request(backend: str, tokens: list[int] | None = None) -> dict[str, Any]:
    return {
        "do": "grade",
        "module": MODULE,
        "call": described(norm_call()),
        "threads": 1,
        "deterministic": False,
        "keep_freed_memory": False,
        "backend": backend,
        "tokens": [24, 23] if tokens is None else tokens,
    }


def test_a_right_backend_is_graded_with_errors_and_memory() -> None:
    found = answer(grade_request("quick"))
    assert found["problems"] == []
    assert {one["what"] for one in found["measured"]} == {"output 0", "gradient of x", "gradient of weight"}
    assert all(0 <= one["error"] <= one["allowed"] for one in found["measured"])
    assert found["peak_bytes"] is None or found["peak_bytes"] >= 0


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("wrong", "output 0: relative error"),
        ("overwriting", "it wrote into its argument x"),
        ("wrong_when_odd", "with 23 tokens"),
        ("elsewhere", "it refuses the call: it needs another device"),
    ],
)
def test_a_wrong_backend_is_rejected_with_what_is_wrong(backend: str, said: str) -> None:
    found = answer(grade_request(backend))
    assert said in "; ".join(found["problems"])
    assert found["peak_bytes"] is None


def test_without_the_odd_number_of_tokens_a_fault_at_borders_would_pass() -> None:
    assert answer(grade_request("wrong_when_odd", [24]))["problems"] == []


def test_backends_are_timed_in_the_same_rounds() -> None:
    found = time_backends(OPERATOR, ["eager", "quick"], norm_call(), rounds=7, most_rounds=7, allowed=None)
    assert found["problems"] == {}
    slow, quick = found["seconds"]["eager"], found["seconds"]["quick"]
    assert len(slow) == len(quick) >= 7
    # The slow one sleeps 20 ms in each call: no machine is so loaded that this does not show in the least of seven.
    assert min(slow) >= 0.02
    assert min(quick) < min(slow)


def test_a_backend_that_is_wrong_at_full_size_alone_is_not_timed() -> None:
    allowed = {"output 0": 1e-6, "gradient of x": 1e-6, "gradient of weight": 1e-6}
    found = time_backends(
        OPERATOR, ["eager", "quick", "wrong"], norm_call(), rounds=7, most_rounds=7, allowed=allowed
    )
    assert "output 0 differs by" in found["problems"]["wrong"]
    assert set(found["seconds"]) == {"eager", "quick"}


def test_what_is_missing_or_not_a_number_disagrees() -> None:
    one = {"output 0": torch.ones(4)}
    assert disagreement(one, {"output 0": torch.ones(4)}, {"output 0": 1e-6}) is None
    assert "no output 0" in (disagreement(one, {}, {"output 0": 1e-6}) or "")
    broken = {"output 0": torch.full((4,), float("nan"))}
    assert "differs by nan" in (disagreement(one, broken, {"output 0": 1e-6}) or "")
    assert disagreement(one, {"output 0": torch.full((4,), 1.0 + 1e-5)}, {"output 0": 1e-6}) is not None


def test_a_call_through_the_dispatcher_gives_outputs_and_gradients_by_name() -> None:
    given = arguments_on(norm_call(), seed=0)
    results = forward_and_backward(OPERATOR, "quick", given)()
    assert set(results) == {"output 0", "gradient of x", "gradient of weight"}
    inference = arguments_on(norm_call(requires_grad=False), seed=0)
    assert set(forward_and_backward(OPERATOR, "quick", inference)()) == {"output 0", "gradient of weight"}


def test_peak_memory_is_that_of_the_call() -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux tells the most memory of a stretch")
    # Pages of a process that has run nothing else: whatever other tests have left in this one comes and goes.
    (peaks,) = on_ranks(peaks_of_cross_entropy, 1)
    whole, chunked, logits = peaks
    assert whole is not None
    assert chunked is not None
    # The plain form holds all logits and their gradient at once; the chunked one a part of them at a time.
    assert whole > 1.5 * logits
    assert chunked < 0.5 * whole


def peaks_of_cross_entropy() -> tuple[int | None, int | None, int]:
    """Of the plain form and of the chunked one; and what all logits take."""
    tokens, width, words = 4096, 16, 4096
    hidden = Argument((tokens, width), torch.float32, True, True)
    weight = Argument((words, width), torch.float32, True, True)
    labels = Argument((tokens,), torch.int64, True, False)
    arguments = (("hidden", hidden), ("weight", weight), ("labels", labels))
    signature = Signature("linear_cross_entropy", "cpu", arguments, ())
    operator = operator_named("linear_cross_entropy")
    given = arguments_on(signature, seed=0)
    whole, chunked = (
        peak_bytes(forward_and_backward(operator, name, given), "cpu") for name in ("eager", "chunked")
    )
    return whole, chunked, tokens * words * 4


@pytest.mark.long
def test_children_that_crash_hang_or_raise_are_reported_and_the_next_one_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{FOLDER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with Children(tmp_path) as ask:
        crashed = ask(grade_request("crashing"), limit_s=120)
        assert (crashed.found, crashed.failure) == (None, "it was ended by SIGSEGV")
        hung = ask(grade_request("hanging"), limit_s=5)
        assert (hung.found, hung.timed_out, hung.failure) == (None, True, "it took more than 5 s")
        raised = ask(grade_request("raising"), limit_s=120)
        assert raised.failure == "it failed: RuntimeError: no kernel image is there for this device"
        right = ask(grade_request("quick"), limit_s=120)
        assert right.found is not None
        assert right.found["problems"] == []
        nursery = ask._nursery
        assert nursery is not None
    assert nursery.poll() is not None


@pytest.mark.long
def test_a_child_that_hangs_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{FOLDER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with Children(tmp_path) as ask:
        ask(grade_request("quick"), limit_s=120)
        nursery = ask._nursery
        assert nursery is not None
        ask(grade_request("hanging"), limit_s=3)
        children = Path(f"/proc/{nursery.pid}/task/{nursery.pid}/children")
        if not children.exists():
            pytest.skip("only Linux lists the children of a process")
        until = time.monotonic() + 600
        while children.read_text().split() and time.monotonic() < until:
            time.sleep(0.05)
        assert children.read_text().split() == []


@pytest.mark.long
def test_children_end_with_a_tuner_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from test_trials import *\n"
        "ask = Children(Path(sys.argv[1]))\n"
        "ask(grade_request('quick'), limit_s=120)\n"
        "print(ask._nursery.pid, flush=True)\n"
        "ask(grade_request('hanging'), limit_s=600)\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(FOLDER), str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    tuner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=environment
    )
    assert tuner.stdout is not None
    nursery = int(tuner.stdout.readline())
    children = Path(f"/proc/{nursery}/task/{nursery}/children")
    if not children.exists():
        tuner.kill()
        pytest.skip("only Linux lists the children of a process")
    until = time.monotonic() + 600
    while not (hanging := children.read_text().split()) and time.monotonic() < until:
        time.sleep(0.05)
    assert hanging, "no child was started"
    tuner.kill()
    tuner.communicate()
    until = time.monotonic() + 600
    while any(map(_runs, (str(nursery), *hanging))) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(_runs, (str(nursery), *hanging)))


def _runs(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_each_bad_backend_is_one_of_the_operator() -> None:
    assert {*BAD, "eager", "quick", "elsewhere"} == {one.name for one in OPERATOR.backends}
