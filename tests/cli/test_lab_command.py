"""``drivetrain lab``: what it prints, what it refuses; with a real lab where this machine can have one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from drivetrain.cli import lab
from drivetrain.errors import DrivetrainError
from drivetrain.lab import known_labs, missing
from drivetrain.lab.network import existing


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("DRIVETRAIN_LAB_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def with_lab(folder: Path, only_labs_here: None) -> Iterator[Path]:
    """Skips where there can be no lab; takes down what a test leaves."""
    reason = missing(folder)
    if reason is not None:
        pytest.skip(reason)
    before = existing()
    yield folder
    call("down")
    assert existing() == before


def call(*arguments: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    lab.register(app)
    return CliRunner().invoke(app, ["lab", *arguments])


def document(result: Result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--hosts", "0"], "0 hosts: a lab has 1 to 64"),
        (["up", "--ranks", "99"], "99 ranks on a host.*nearest legal value is 64"),
        (["up", "--rate", "fast"], "rate 'fast' is no rate; write bits a second as 800mbit"),
        (["up", "--rate", "1bit"], "nearest legal value is 10kbit"),
        (["up", "--link", "1"], "--link '1': write the number of a host and its rate"),
        (["up", "--link", "5=1gbit"], "host 5: there are 2 hosts"),
        (["up", "--name", "My Lab"], "cannot be called 'My Lab'"),
        (["run", "--time-limit", "soon", "--", "true"], "--time-limit 'soon' is no duration"),
        (["run", "--time-limit", "0s", "--", "true"], "leaves no time"),
    ],
)
def test_bad_input_is_one_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("drivetrain.lab.network_lab.require_means", lambda: None)
    result = call(*arguments)
    assert isinstance(result.exception, DrivetrainError), result.output
    assert re.search(message, str(result.exception))
    assert known_labs(folder) == []


@pytest.mark.parametrize("arguments", [["up"], ["run", "--", "true"], ["down"]])
def test_without_root_every_one_of_them_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(DrivetrainError, match="takes root"):
        raise call(*arguments).exception or AssertionError("it went on")


def test_the_command_itself_exits_with_2_and_no_traceback(tmp_path: Path) -> None:
    environment = {**os.environ, "DRIVETRAIN_LAB_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain", "lab", "up", "--rate", "quick"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: rate 'quick' is no rate")
    assert "Traceback" not in done.stderr


def test_nothing_is_there_before_anything_is_made(with_lab: Path) -> None:
    assert call("show").stdout.startswith("no lab is up; make one with: drivetrain lab up")
    assert document(call("show", "--json")) == {"schema": 1, "labs": []}
    assert call("down").stdout == "no lab is up\n"
    for arguments in (["run", "--", "true"], ["down", "--name", "lab"]):
        assert "no lab called lab" in str(call(*arguments).exception)


def test_up_run_show_down(with_lab: Path) -> None:
    made = document(
        call("up", "--hosts", "2", "--ranks", "2", "--rate", "800mbit", "--link", "1=100mbit", "--json")
    )
    assert made["world_size"] == 4
    assert [host["up_bits_per_s"] for host in made["hosts"]] == [800_000_000, 100_000_000]
    assert "a lab called lab already" in str(call("up").exception)
    shown = document(call("show", "--json"))
    assert [one["name"] for one in shown["labs"]] == ["lab"]
    script = "import os, sys; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], '--flag' in sys.argv)"
    ran = call("run", "--", sys.executable, "-S", "-c", script, "--flag")
    assert (ran.exit_code, ran.stdout) == (0, "rank 0 of 4 True\n")
    assert sorted(ran.stderr.splitlines()) == [f"[rank {n}] rank {n} of 4 True" for n in (1, 2, 3)]
    told = document(call("run", "--json", "--", sys.executable, "-S", "-c", script))
    assert [rank["stdout"] for rank in told["ranks"]] == [f"rank {n} of 4 False\n" for n in range(4)]
    assert [rank["host"] for rank in told["ranks"]] == [0, 0, 1, 1]
    assert document(call("down", "--json")) == {"schema": 1, "taken_down": ["lab"], "cleaned_up": []}


def test_the_exit_code_is_that_of_the_rank_that_failed(with_lab: Path) -> None:
    document(call("up", "--hosts", "1", "--ranks", "2", "--json"))
    ran = call("run", "--", "sh", "-c", "echo broken >&2; exit $((RANK * 5))")
    assert ran.exit_code == 5
    assert ran.stderr.splitlines()[-1] == "rank 1 on host 0 ended with exit code 5: broken"
    late = call("run", "--time-limit", "1s", "--", "sleep", "600")
    assert late.exit_code == 124


def test_what_belongs_to_a_process_that_lives_is_not_taken_down(with_lab: Path) -> None:
    from drivetrain.lab import Lab

    with Lab(1, 1, folder=with_lab) as own:
        assert document(call("down", "--json"))["taken_down"] == []
        assert [one["name"] for one in document(call("show", "--json"))["labs"]] == [own.id]


def test_a_signal_ends_the_ranks_and_the_command_with_130(with_lab: Path) -> None:
    document(call("up", "--hosts", "2", "--json"))
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(130)))\n"
        "print('on', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-m", "drivetrain", "lab", "run", "--", sys.executable, "-S", "-c", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "on\n"
    # A rank that is not so far yet would not be asked, but ended.
    while process.stderr.readline() not in ("[rank 1] on\n", ""):
        pass
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=300)
    assert (process.returncode, out) == (130, "saved\n")
    (shown,) = document(call("show", "--json"))["labs"]
    assert shown["state"] == "up"


def test_after_a_kill_down_removes_what_runs_and_what_it_ran_in(with_lab: Path) -> None:
    document(call("up", "--hosts", "2", "--json"))
    command = [
        sys.executable,
        "-m",
        "drivetrain",
        "lab",
        "run",
        "--",
        "sh",
        "-c",
        "setsid sleep 600 & echo $!; wait",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    left = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    assert Path(f"/proc/{left}").exists()
    assert document(call("down", "--json"))["taken_down"] == ["lab"]
    while Path(f"/proc/{left}/cmdline").exists() and Path(f"/proc/{left}/cmdline").read_bytes():
        time.sleep(0.02)
