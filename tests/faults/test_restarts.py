"""Ranks that die or hang in a run with several processes: who is named, and how the run goes on."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from drivetrain.archive.reader import open_run
from drivetrain.engine import hang
from drivetrain.engine.agent import cause_of, describe
from drivetrain.engine.hang import report_hang, watched, who_waits
from drivetrain.engine.launch import Launch
from drivetrain.engine.parallel.process_group import Ranks
from drivetrain.engine.rendezvous import agree_on_run
from rank_processes import on_ranks
from runs_on_the_spot import Tiny, losses_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SETTINGS = [
    "training.train_iters=60",
    "checkpoint.save_interval=4",
    "training.eval_iters=0",
    "model.hidden_dropout=0.1",
]


def ranks_of(tiny: Tiny) -> dict[int, int]:
    """Process of each rank that trains now."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes()
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(tiny.runs).encode() in command and b"-u\0-m\0drivetrain" in command:
                rank = next((one for one in environment.split(b"\0") if one.startswith(b"RANK=")), None)
                if rank is not None:
                    found[int(rank[5:])] = int(entry.name)
    return found


def steps_done(tiny: Tiny, segment: int) -> int:
    """Lines of metrics in that segment."""
    files = list(tiny.runs.glob(f"*/segments/{segment:04d}/metrics.jsonl"))
    return files[0].read_bytes().count(b"\n") - 1 if files else -1


def kill_a_rank(tiny: Tiny, process: "subprocess.Popen[bytes]", segment: int, after: int, rank: int) -> bool:
    """SIGKILL to ``rank`` when the segment has ``after`` steps and a checkpoint is whole; False if the run ended."""
    # Against a hang alone: on a busy machine two minutes pass before the first step.
    deadline = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < deadline:
        whole = any(tiny.runs.glob("*/checkpoints/step-*"))
        if whole and steps_done(tiny, segment) >= after and rank in (ranks := ranks_of(tiny)):
            os.kill(ranks[rank], signal.SIGKILL)
            return True
        time.sleep(0.02)
    return False


def kills(tiny: Tiny, num_ranks: int, times: int, seed: int, *overrides: str) -> None:
    draw = random.Random(seed)
    # So many steps that whoever looks for the moment to kill may be kept from it for a while.
    settings = [*SETTINGS, "training.train_iters=90", *overrides]
    nproc = ["--nproc", str(num_ranks)]
    expected = losses_of(open_run(tiny.train(*settings, options=nproc)["run"]))
    before = set(tiny.runs.iterdir())
    arguments = ["train", str(tiny.file), *settings, *nproc, "--max-restarts", str(times), "--json"]
    process = tiny.start(*arguments)
    (tiny.runs.parent / "aside").mkdir()
    for path in before:
        path.rename(tiny.runs.parent / "aside" / path.name)
    killed = []
    for segment in range(times):
        rank = draw.randrange(num_ranks)
        if not kill_a_rank(tiny, process, segment, draw.randint(5, 8), rank):
            process.kill()
            raise AssertionError(process.communicate()[1].decode())
        killed.append(rank)
    out, errors = process.communicate(timeout=600)
    message = errors.decode()
    assert process.returncode == 0, message
    run = tiny.only_run()
    assert losses_of(run) == expected, "every step as if nothing had happened"
    assert json.loads(out)["status"] == "finished"
    restarts = [event for event in run.events() if event["kind"] == "restart"]
    assert [event["rank"] for event in restarts] == killed
    assert all("was ended by SIGKILL" in event["reason"] for event in restarts)
    assert all(f"restart {number} of {times}: rank" in message for number in range(1, times + 1))
    resumed = [event["step"] for event in run.events() if event["kind"] == "resume"]
    assert len(resumed) == times
    assert all(step % 4 == 0 and step > 0 for step in resumed), "from the last checkpoint"


@pytest.mark.long
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(tiny: Tiny) -> None:
    kills(tiny, 2, 2, 1, "checkpoint.async_save=true")


@pytest.mark.long
def test_restarts_end_and_the_rank_that_failed_is_named_first(tiny: Tiny) -> None:
    settings = [*SETTINGS, "training.train_iters=100000"]
    process = tiny.start("train", str(tiny.file), *settings, "--nproc", "2", "--max-restarts", "1")
    for segment in range(2):
        if not kill_a_rank(tiny, process, segment, 5, 1):
            process.kill()
            raise AssertionError(process.communicate()[1].decode())
    _, errors = process.communicate(timeout=400)
    message = errors.decode()
    assert process.returncode == 2, message
    assert message.count("restart 1 of 1: rank 1") == 1
    assert message.splitlines()[-1].startswith("error: rank 1 (process "), message
    assert "Traceback" not in message
    assert ranks_of(tiny) == {}


@pytest.mark.long
def test_bad_input_is_not_tried_again(tiny: Tiny) -> None:
    overrides = ["training.train_iters=4", "memory.device_memory_limit_bytes=1000"]
    done = tiny.run("train", str(tiny.file), *overrides, "--nproc", "2", "--max-restarts", "3")
    assert done.returncode == 2
    assert "restart 1" not in done.stderr


def test_restarts_of_one_process_are_refused(tiny: Tiny) -> None:
    done = tiny.run("train", str(tiny.file), "--max-restarts", "3")
    assert done.returncode == 2
    assert "--max-restarts watches over several processes" in done.stderr
    assert not tiny.runs.exists()


@pytest.mark.parametrize(
    ("code", "name", "again"),
    [
        (0, None, False),
        (2, None, False),
        (130, None, False),
        (137, "SIGINT", False),
        (137, None, True),
        (1, None, True),
    ],
)
def test_only_what_need_not_happen_again_is_tried_again(code: int, name: str | None, again: bool) -> None:
    assert Launch(code, name).is_worth_another_try == again


def failure(code: int, timestamp: int) -> ProcessFailure:
    made = ProcessFailure(local_rank=0, pid=7, exitcode=code, error_file="")
    made.timestamp = timestamp
    return made


def test_the_cause_is_the_rank_that_died_and_not_those_that_missed_it() -> None:
    ended = {0: failure(2, 1), 1: failure(-signal.SIGKILL, 2), 2: failure(-signal.SIGTERM, 1)}
    rank, why = cause_of(ended)
    assert rank == 1
    assert describe(rank, why).startswith("rank 1 (process 7) was ended by SIGKILL")
    assert cause_of({0: failure(2, 1), 1: failure(1, 3)})[0] == 1
    assert cause_of({0: failure(2, 2), 1: failure(2, 1)})[0] == 1


# A run that stands still.


def stands_still(folder: str) -> str:
    """On one of three ranks: the last one never comes to the second sum.

    The collectives' limit is well above what the watch is told: on a busy machine it writes late.
    """
    import torch
    import torch.distributed as dist

    from drivetrain.engine.hang import watched
    from drivetrain.engine.parallel.process_group import Ranks, join

    ranks = Ranks.from_environment()
    # The limit holds for joining as well: nobody begins before everybody is there.
    (Path(folder) / f"{ranks.rank}.there").touch()
    while len(list(Path(folder).glob("*.there"))) < 3:
        time.sleep(0.01)
    with join(ranks, "cpu", 7 / 60):
        try:
            with watched(Path(folder), ranks.rank, 3.0, lambda: 0):
                dist.all_reduce(torch.ones(3))
                if ranks.rank == 2:
                    while len(list(Path(folder).glob("*.gave_up"))) < 2:
                        time.sleep(0.05)
                    raise RuntimeError("asleep")
                dist.all_reduce(torch.ones(5))
        except RuntimeError as error:
            (Path(folder) / f"{ranks.rank}.gave_up").touch()
            return str(error)
    return "it went on"


def test_a_run_that_stands_still_leaves_stacks_and_says_who_waits_for_whom(tmp_path: Path) -> None:
    before = time.time() - 1
    told = on_ranks(stands_still, 3, str(tmp_path))
    assert all("it went on" not in one for one in told), told
    stacks = [(tmp_path / "stacks" / f"r{rank:05d}.txt").read_text() for rank in range(3)]
    assert all("in stands_still" in text for text in stacks)
    assert all("all_reduce" in text for text in stacks[:2])
    lines = report_hang(tmp_path, before)
    assert "ranks 0, 1 wait in collective number" in lines[0]
    assert "all_reduce of [[5]]" in lines[0]
    assert "for rank 2, whose last was number" in lines[0]
    assert lines[-1].endswith(str(tmp_path / "stacks"))
    assert report_hang(tmp_path, time.time() + 60) == [], "those of an earlier attempt are not this one's"


@pytest.mark.long
def test_a_stopped_rank_ends_the_run_and_is_named(tiny: Tiny) -> None:
    settings = [*SETTINGS, "training.train_iters=100000", "parallelism.distributed_timeout_minutes=0.4"]
    process = tiny.start("train", str(tiny.file), *settings, "--nproc", "2")
    # Against a hang alone: on a busy machine two minutes pass before the first step.
    deadline = time.monotonic() + 600
    while steps_done(tiny, 0) < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(ranks_of(tiny)[1], signal.SIGSTOP)
    _, errors = process.communicate(timeout=400)
    message = errors.decode()
    assert process.returncode != 0, message
    assert "rank 0 waits in collective number" in message
    assert "for rank 1, which has written nothing" in message
    assert (tiny.only_run().path / "stacks" / "r00000.txt").read_text()
    assert "Traceback" not in message
    assert ranks_of(tiny) == {}


@pytest.mark.long
def test_a_run_under_plain_torchrun_goes_on_after_a_kill(tiny: Tiny) -> None:
    """torchrun's agent restarts it; each attempt finds its ranks under a name of its own."""
    tiny.runs.mkdir()
    path = open_run(tiny.train(*SETTINGS, "training.train_iters=4")["run"]).path
    process = subprocess.Popen(
        [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--rdzv-backend=c10d",
                "--rdzv-endpoint=127.0.0.1:0",
            ),
            *(
                "--nproc-per-node=2",
                "--max-restarts=1",
                "-m",
                "drivetrain",
                "train",
                str(path / "config.toml"),
            ),
            *("training.train_iters=150", f"run.runs_dir={tiny.runs}", "run.name=again"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    # Against a hang alone: on a busy machine two minutes pass before the first step.
    deadline = time.monotonic() + 600
    killed = False
    while process.poll() is None and not killed and time.monotonic() < deadline:
        files = list(tiny.runs.glob("*again*/segments/0000/metrics.jsonl"))
        if files and files[0].read_bytes().count(b"\n") > 6 and 1 in (ranks := ranks_of(tiny)):
            os.kill(ranks[1], signal.SIGKILL)
            killed = True
        time.sleep(0.02)
    _, errors = process.communicate(timeout=600)
    assert killed, errors.decode()
    assert process.returncode == 0, errors.decode()
    (again,) = tiny.runs.glob("*again*")
    assert [event["kind"] for event in open_run(again).events() if event["kind"] in ("start", "resume")] == [
        "start",
        "resume",
    ]
    assert max(losses_of(open_run(again))) == 150


def goes_on(folder: str) -> None:
    from drivetrain.engine.hang import watched
    from drivetrain.engine.parallel.process_group import Ranks, join

    step = 0
    with (
        join(Ranks.from_environment(), "cpu", 1.0) as group,
        watched(Path(folder), group.ranks.rank, 0.5, lambda: step),
    ):
        for step in range(2):  # noqa: B007 - the watch looks at it
            time.sleep(1.0)
        group.barrier()


def test_a_slow_run_that_goes_on_leaves_nothing(tmp_path: Path) -> None:
    on_ranks(goes_on, 2, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def record(*entries: tuple[str, int, str], **groups: str) -> dict[str, Any]:
    return {
        "entries": [
            {
                "is_p2p": False,
                "process_group": [group, "undefined"],
                "collective_seq_id": number,
                "profiling_name": f"gloo:{kind}",
                "input_sizes": [[4]],
            }
            for group, number, kind in entries
        ],
        "pg_config": {
            name: {"name": name, "desc": "undefined", "ranks": ranks} for name, ranks in groups.items()
        },
    }


def test_groups_are_told_apart_and_a_rank_that_called_none_is_named() -> None:
    records = {
        0: record(("a", 3, "all_reduce"), ("b", 1, "all_gather"), a="[0, 1]", b="[0, 2]"),
        1: record(("a", 3, "all_reduce"), a="[0, 1]"),
        2: record(b="[0, 2]"),
    }
    (line,) = who_waits(records)
    assert line.startswith("rank 0 waits in collective number 1 of group")
    assert "all_gather of [[4]]" in line
    assert line.endswith("for rank 2, which has called none")
    assert who_waits({0: record(("a", 3, "x")), 1: record(("a", 3, "x"))}) == []


def test_a_damaged_record_of_a_rank_counts_as_none(tmp_path: Path) -> None:
    folder = tmp_path / "stacks"
    folder.mkdir()
    (folder / "r00000.txt").write_text("a stack")
    whole = json.dumps(record(("a", 3, "all_reduce"), a="[0, 1]"))
    (folder / "r00000.json").write_text(whole)
    (folder / "r00001.json").write_text(whole[: len(whole) // 2])
    first, last = report_hang(tmp_path, 0)
    assert first.startswith("rank 0 waits in collective number 3")
    assert first.endswith("for rank 1, which has written nothing")
    assert last.endswith(f"stacks of rank 0 are in {folder}")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_record_has_its_name_only_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, cut = Path.write_bytes, threading.Event()

    def cut_short(path: Path, data: bytes) -> int:
        write(path, data[:5])
        cut.set()
        raise SystemExit  # ends this thread alone, as the end of the process would

    monkeypatch.setattr(hang, "_dump_fr_trace_json", lambda: b'{"entries": []}')
    monkeypatch.setattr(Path, "write_bytes", cut_short)

    def ended_while_it_writes() -> None:
        with watched(tmp_path, 0, 0.2, lambda: 0):
            assert cut.wait(60)
            raise RuntimeError("the run was ended")

    with pytest.raises(RuntimeError, match="was ended"):
        ended_while_it_writes()
    assert (tmp_path / "stacks" / "r00000.txt").read_text()
    assert not (tmp_path / "stacks" / "r00000.json").exists()


def test_a_job_goes_on_with_the_run_it_has_made_however_often_it_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = []

    def make_run() -> Path:
        made.append(tmp_path / f"run-{len(made)}")
        return made[-1]

    def agreed(attempt: int, job: str = "one", rank: int = 0) -> Path:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        return agree_on_run(Ranks(rank=rank, local_rank=rank, world_size=2, local_world_size=2), make_run)

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    first = agreed(0)
    assert first == tmp_path / "run-0"
    assert agreed(0) == first, "machines came or went, which torchrun does not count as an attempt"
    assert agreed(0, rank=1) == first
    assert agreed(1) == first
    assert agreed(3) == first, "attempt 2 has ended before it agreed on anything"
    assert agreed(3, rank=1) == first
    assert agreed(0, job="another") == agreed(0, job="another", rank=1) == tmp_path / "run-1"
