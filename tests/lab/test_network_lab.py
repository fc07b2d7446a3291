"""A real lab, where this machine can have one: what is made, what runs in it, and that nothing is left of it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.errors import DrivetrainError, EnvironmentFault
from drivetrain.lab import Lab, clean_up, find_lab, known_labs, missing
from drivetrain.lab.commands import call
from drivetrain.lab.network import existing
from drivetrain.lab.state import LabState, Process

PYTHON = [sys.executable, "-S", "-c"]

WHERE = "import os; print(os.environ['RANK'], os.readlink('/proc/self/ns/net'))"

# Rank 1 sends to rank 0; both say what has passed.
SEND = """
import os, socket, sys, time
rank, address = os.environ["RANK"], (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
size = int(sys.argv[1])
if rank == "0":
    with socket.create_server(address) as server:
        connection, peer = server.accept()
        total = 0
        while data := connection.recv(1 << 20):
            total += len(data)
        print(total, peer[0])
else:
    for _ in range(3000):
        try:
            connection = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    connection.sendall(bytes(size))
    connection.close()
"""


@pytest.fixture(scope="module", autouse=True)
def _a_machine_that_can_have_a_lab(tmp_path_factory: pytest.TempPathFactory, only_labs_here: None) -> None:
    reason = missing(tmp_path_factory.mktemp("trial"))
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where labs of a test are written down: apart from those that somebody uses."""
    yield tmp_path / "labs"
    left = [name for state in known_labs(tmp_path / "labs") for name in existing() if f"-{state.id}-" in name]
    for name in left:
        call("ip", "netns", "delete", name)
    assert not left, f"a lab was left behind: {left}"


def wait_for(path: Path, process: "subprocess.Popen[str]") -> str:
    while not path.exists() or not path.read_text():
        assert process.poll() is None, "it ended before it had anything to say"
        time.sleep(0.02)
    return path.read_text()


def test_each_host_has_a_network_of_its_own_and_nothing_is_left_afterwards(folder: Path) -> None:
    before = existing()
    with Lab(2, 2, "1gbit", folder=folder) as lab:
        done = lab.run([*PYTHON, WHERE], time_limit_s=60).check()
        seen = [one.stdout.split() for one in done.ranks]
        made = existing() - before
    assert [rank for rank, _ in seen] == ["0", "1", "2", "3"]
    networks = [network for _, network in seen]
    assert networks[0] == networks[1] != networks[2] == networks[3]
    assert os.readlink("/proc/self/ns/net") not in networks
    assert all(name.startswith("drivetrain-lab-") for name in made)
    assert len(made) == 3  # two hosts and the bridge between them
    assert existing() == before
    assert known_labs(folder) == []


def test_what_hosts_tell_each_other_passes_their_links_and_is_counted(folder: Path) -> None:
    size = 300_000
    with Lab(2, 1, "1gbit", folder=folder) as lab:
        before = lab.wire_bytes()
        done = lab.run([*PYTHON, SEND, str(size)], time_limit_s=60).check()
        after = lab.wire_bytes()
    assert done.ranks[0].stdout.split() == [str(size), "10.77.0.2"]
    sent, received = after[1].sent - before[1].sent, after[0].received - before[0].received
    # Headers of 66 bytes for every 1,448 of payload, and the handshake.
    assert size < sent < 1.1 * size
    assert size < received < 1.1 * size
    assert after[0].sent - before[0].sent < 0.1 * size


def test_what_ranks_of_one_host_tell_each_other_is_on_no_link(folder: Path) -> None:
    with Lab(1, 2, "1gbit", folder=folder) as lab:
        done = lab.run([*PYTHON, SEND, "300000"], time_limit_s=60).check()
        assert done.ranks[0].stdout.split() == ["300000", "10.77.0.1"]
        assert lab.wire_bytes()[0].sent < 30_000


def test_three_hosts_reach_each_other(folder: Path) -> None:
    script = SEND.replace('if rank == "0"', 'if rank == "1": raise SystemExit\nif rank == "0"')
    with Lab(3, 1, "1gbit", folder=folder) as lab:
        done = lab.run([*PYTHON, script, "1000"], time_limit_s=60).check()
    assert done.ranks[0].stdout.split() == ["1000", "10.77.0.3"]


def test_links_are_limited_in_each_direction(folder: Path) -> None:
    with Lab(2, 1, "400mbit/100mbit", links={1: "50mbit"}, folder=folder) as lab:
        shown = {}
        for host in (0, 1):
            for where, device in ((f"host{host}", "eth0"), ("hub", f"port{host}")):
                text = call("tc", "-n", f"drivetrain-lab-{lab.id}-{where}", "qdisc", "show", "dev", device)
                shown[where, device] = text.split("rate ")[1].split()[0]
    assert shown == {
        ("host0", "eth0"): "400Mbit",
        ("hub", "port0"): "100Mbit",
        ("host1", "eth0"): "50Mbit",
        ("hub", "port1"): "50Mbit",
    }


def test_the_lines_of_each_rank_are_told_as_they_come(folder: Path) -> None:
    told: list[tuple[int, str, str]] = []
    script = "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)"
    with Lab(2, 1, folder=folder) as lab:
        done = lab.run([*PYTHON, script], time_limit_s=60, on_line=lambda *line: told.append(line)).check()
    assert sorted(told) == [
        (0, "stderr", "err"),
        (0, "stdout", "out 0"),
        (1, "stderr", "err"),
        (1, "stdout", "out 1"),
    ]
    assert [one.stdout for one in done.ranks] == ["out 0\n", "out 1\n"]


def test_a_rank_that_fails_is_named_with_its_last_words_and_ends_the_others(folder: Path) -> None:
    script = (
        "import os, sys, time; print('no wire', file=sys.stderr)\n"
        "sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(600)"
    )
    with Lab(2, 1, folder=folder) as lab:
        done = lab.run([*PYTHON, script], grace_s=0.2)
        assert lab.processes() == {}
    assert (done.exit_code, done.first_failed, done.timed_out) == (3, 1, False)
    assert done.ranks[0].exit_code == -signal.SIGKILL
    with pytest.raises(DrivetrainError, match="rank 1 on host 1 ended with exit code 3: no wire"):
        done.check()


def test_a_command_that_is_not_there_is_named(folder: Path) -> None:
    with Lab(1, 1, folder=folder) as lab:
        done = lab.run(["no-such-command"])
    with pytest.raises(DrivetrainError, match="no-such-command"):
        done.check()


def test_the_time_limit_ends_everything_that_was_started(folder: Path) -> None:
    script = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
    )
    with Lab(2, 1, folder=folder) as lab:
        done = lab.run([*PYTHON, script], time_limit_s=1.0, grace_s=0.2)
        assert lab.processes() == {}
    assert (done.exit_code, done.timed_out) == (124, True)
    with pytest.raises(DrivetrainError, match="still running"):
        done.check()


def test_ranks_that_end_when_they_are_asked_to_keep_their_own_exit_code(folder: Path) -> None:
    script = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); time.sleep(600)"
    )
    with Lab(2, 1, folder=folder) as lab:
        # On a busy machine a rank may not be so far after a second: it is then ended like any other program.
        for limit_s in (1.0, 10.0, 60.0):
            done = lab.run([*PYTHON, script], time_limit_s=limit_s)
            assert done.timed_out
            if all(one.exit_code == 7 for one in done.ranks):
                break
    assert [one.exit_code for one in done.ranks] == [7, 7]


OWNER = """
import sys, pathlib
from drivetrain.lab import Lab
folder, told = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
def line(rank, stream, text):
    with told.open("a") as file:
        file.write(text + "\\n")
{body}
"""


def killed_owner(folder: Path, tmp_path: Path, body: str) -> str:
    """Run a script that makes a lab, kill it with SIGKILL once it has said something; what it said."""
    told = tmp_path / "told"
    script = OWNER.format(body=textwrap.dedent(body))
    process = subprocess.Popen([sys.executable, "-c", script, str(folder), str(told)], text=True)
    try:
        said = wait_for(told, process)
    finally:
        process.kill()
        process.wait()
    return said


def is_alive(process: int) -> bool:
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.parametrize("by", ["down", "up"])
def test_a_lab_whose_owner_was_killed_is_removed_by_whoever_comes_next(
    folder: Path, tmp_path: Path, by: str
) -> None:
    before = existing()
    body = """
    with Lab(2, 1, folder=folder) as lab:
        lab.run(["sh", "-c", "echo $$; exec sleep 600"], on_line=line)
    """
    killed_owner(folder, tmp_path, body)
    (state,) = known_labs(folder)
    assert state.is_stale
    left = existing() - before
    assert len(left) == 3
    if by == "down":
        assert clean_up(folder) == [state.id]
    else:
        with Lab(1, 1, folder=folder):
            assert not (existing() & left)
    assert existing() == before
    assert known_labs(folder) == []


def test_a_lab_that_was_killed_half_made_is_removed(folder: Path, tmp_path: Path) -> None:
    before = existing()
    body = """
    from drivetrain.lab.network import Wiring
    import drivetrain.lab.network as network, time
    whole = network._limit
    def stop(namespace, device, rate):
        if device == "port0":
            line(0, "", namespace)
            time.sleep(600)
        whole(namespace, device, rate)
    network._limit = stop
    Lab(2, 1, folder=folder).make("kept")
    """
    killed_owner(folder, tmp_path, body)
    (state,) = known_labs(folder)
    assert (state.is_stale, state.is_complete) == (True, False)
    assert len(existing() - before) == 2  # the hub and one host
    with pytest.raises(DrivetrainError, match="no lab called kept"):
        find_lab("kept", folder)
    Lab(1, 1, folder=folder).make("kept")
    find_lab("kept", folder).take_down()
    assert existing() == before


def test_ranks_end_with_the_process_that_started_them(folder: Path, tmp_path: Path) -> None:
    body = """
    with Lab(1, 1, folder=folder) as lab:
        lab.run(["sh", "-c", "echo $$; exec sleep 600"], on_line=line)
    """
    process = int(killed_owner(folder, tmp_path, body))
    while is_alive(process):
        time.sleep(0.02)
    clean_up(folder)


def test_what_a_killed_user_left_running_in_a_kept_lab_is_ended_by_the_next_one(
    folder: Path, tmp_path: Path
) -> None:
    kept = Lab(1, 1, folder=folder)
    kept.make("kept")
    try:
        body = """
        from drivetrain.lab import find_lab
        find_lab("kept", folder).run(["sh", "-c", "setsid sleep 600 & echo $!; wait"], on_line=line)
        """
        left = int(killed_owner(folder, tmp_path, body))
        assert is_alive(left)
        (state,) = known_labs(folder)
        assert not state.is_stale
        done = find_lab("kept", folder).run(["true"]).check()
        assert not is_alive(left)
        assert done.exit_code == 0
    finally:
        kept.take_down()


def test_a_lab_in_use_is_neither_used_twice_nor_taken_down(folder: Path, tmp_path: Path) -> None:
    kept = Lab(1, 1, folder=folder)
    kept.make("kept")
    told = tmp_path / "told"
    script = OWNER.format(
        body="from drivetrain.lab import find_lab\n"
        "find_lab('kept', folder).run(['sh', '-c', 'echo here; exec sleep 600'], on_line=line)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(folder), str(told)], text=True)
    try:
        wait_for(told, process)
        for what in (lambda: find_lab("kept", folder).run(["true"]), find_lab("kept", folder).take_down):
            with pytest.raises(DrivetrainError, match=f"in use: process {process.pid}"):
                what()
    finally:
        process.kill()
        process.wait()
        kept.take_down()
    assert known_labs(folder) == []


def test_two_labs_with_equal_addresses_do_not_meet(folder: Path) -> None:
    with Lab(2, 1, folder=folder) as one, Lab(2, 1, folder=folder) as other:
        assert one.id != other.id
        for lab in (one, other):
            assert (
                lab.run([*PYTHON, SEND, "1000"], time_limit_s=60).check().ranks[0].stdout.startswith("1000 ")
            )


def test_a_name_is_given_once(folder: Path) -> None:
    kept = Lab(1, 1, folder=folder)
    kept.make("kept")
    try:
        with pytest.raises(DrivetrainError, match="a lab called kept already"):
            Lab(1, 1, folder=folder).make("kept")
        assert find_lab("kept", folder).topology == kept.topology
    finally:
        kept.take_down()
    with pytest.raises(DrivetrainError, match="no lab called kept; make one with"):
        find_lab("kept", folder)


def test_a_file_that_is_no_lab_of_ours_stops_before_anything_is_made(folder: Path) -> None:
    before = existing()
    folder.mkdir()
    (folder / "odd.json").write_text('{"schema": 2}')
    with pytest.raises(EnvironmentFault, match=r"odd\.json does not describe a lab"):
        Lab(1, 1, folder=folder).make()
    assert existing() == before
    (folder / "odd.json").unlink()


def test_a_process_with_the_number_of_a_dead_owner_is_not_taken_for_it(folder: Path) -> None:
    this = Process.this()
    assert this.is_alive
    later = Process(this.id, this.started - 1)
    assert not later.is_alive
    with Lab(1, 1, folder=folder) as lab:
        assert not LabState(lab.id, lab.topology, owner=this).is_stale
        assert LabState(lab.id, lab.topology, owner=later).is_stale
