"""The benchmark that kills ranks: whom it finds, what it notices, and a short run of it to the end."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drivetrain.archive.reader import open_run
from harness.claims import verdict
from harness.layout_runs import LayoutRuns
from harness.rank_kills import leftovers, ranks_of, whole_checkpoints
from kill_ranks import FULL, Plan, Session, claims_of, compare

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def start(*arguments: str, **environment: str) -> "subprocess.Popen[bytes]":
    program = "import time; time.sleep(600)"
    return subprocess.Popen([sys.executable, "-c", program, *arguments], env={**os.environ, **environment})


def test_ten_kills_of_four_ranks_in_each_layout() -> None:
    assert FULL.kills == 10
    assert FULL.layouts == ["dp4 zero2", "tp2 pp2"]


def test_ranks_are_the_processes_of_this_run_that_have_a_rank(tmp_path: Path) -> None:
    run, other = str(tmp_path / "run"), str(tmp_path / "other")
    processes = [
        start("drivetrain", run, RANK="3"),
        start("drivetrain", run, RANK="0"),
        start("drivetrain", run),
        start("drivetrain", other, RANK="1"),
    ]
    try:
        deadline = time.monotonic() + 600
        while len(found := ranks_of(Path(run))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found == {3: processes[0].pid, 0: processes[1].pid}
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_what_a_rank_has_started_is_no_rank(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', *sys.argv[1:]])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "try:\n    time.sleep(600)\nfinally:\n    child.kill()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, "drivetrain", run], env={**os.environ, "RANK": "2"}
    )
    try:
        deadline = time.monotonic() + 600
        told = tmp_path / "child"
        while not (told.exists() and told.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        child = int(told.read_text())
        assert b"RANK=2" in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        assert ranks_of(Path(run)) == {2: parent.pid}
    finally:
        os.kill(int((tmp_path / "child").read_text()), 9)
        parent.kill()
        parent.wait()


def test_whatever_is_half_written_is_found(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    (tmp_path / "heartbeat.json").touch()
    assert leftovers(tmp_path) == []
    (tmp_path / "checkpoints" / ".tmp-step-00000010-1-ab").mkdir()
    (tmp_path / ".heartbeat.json.12-ab.tmp").touch()
    assert leftovers(tmp_path) == [".heartbeat.json.12-ab.tmp", "checkpoints/.tmp-step-00000010-1-ab"]
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["step-00000005"]


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_four_ranks_that_hold_one_model_go_on_after_two_kills_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    plan = Plan(["tp2 pp2"], kills=2, steps=80)
    session = Session(LayoutRuns(tmp_path), plan)
    session.run()
    (claim,) = claims_of(session.done, plan)
    assert verdict(claim) == "won", claim.note
    assert len(session.done["tp2 pp2"]["resumed"]) == 2
    runs = session.runs
    (quiet,) = (open_run(path) for path in runs.runs_dir.glob("*-tp2-pp2-quiet-*"))
    (killed,) = (open_run(path) for path in runs.runs_dir.glob("*-tp2-pp2-killed-*"))

    def broken() -> set[str]:
        return {what for what, how in compare(quiet, killed, []).items() if how is not None}

    # Without the kills that were made, their restarts are none that were asked for.
    restarts = "each kill is a restart that names its rank"
    assert broken() == {restarts}
    last = killed.path / "checkpoints" / "step-00000080"
    moments = last / "optimizer.safetensors"
    content = bytearray(moments.read_bytes())
    content[-1] ^= 1
    moments.write_bytes(content)
    assert broken() == {
        restarts,
        "weights and moments of the last checkpoint",
        "all checkpoints are sound in the end",
    }
    shutil.copytree(last, killed.path / "checkpoints" / ".tmp-step-00000085-1-ab")
    assert "nothing half-written is left" in broken()
    metrics = sorted(killed.path.glob("segments/*/metrics.jsonl"))[-1]
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join(lines[:-1]) + "\n")
    assert "losses of all steps" in broken()
