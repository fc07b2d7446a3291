"""Preparing that is ended midway: what is finished is kept, verified, and gone on from; the bytes are the same."""

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from preparation import Killed, content, decoded, killing_after, make

from drivetrain.engine.data import partial as subject
from drivetrain.engine.data.partial import partial_path
from drivetrain.engine.data.prepare import prepare
from drivetrain.engine.data.progress import Progress
from drivetrain.errors import DataError, EnvironmentFault


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    """JSON lines with broken, empty and equal ones among them, a folder of small texts, and a long text."""
    folder = tmp_path / "in"
    folder.mkdir()
    lines = []
    for number in range(60):
        text = f"line {number % 50}: " + "some words and more of them " * (number % 5)
        lines.append(orjson.dumps({"text": "" if number % 17 == 3 else text}))
        if number % 20 == 11:
            lines.append(b'{"text": broken')
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    (folder / "b").mkdir()
    for number in range(12):
        (folder / "b" / f"{number:02}.txt").write_text(f"small text {number % 10}\n" * 4)
    (folder / "c.txt").write_text("".join(f"Line {number} of a long text.\n" for number in range(120)))
    (folder / "d.txt").write_text("".join(f"Line {number} of a long text.\n" for number in range(120)))
    return [folder / "a.jsonl", folder]


@pytest.mark.parametrize(
    ("drop_duplicates", "every"),
    [
        (True, 14),
        pytest.param(False, 1, marks=pytest.mark.long),
        pytest.param(True, 1, marks=pytest.mark.long),
    ],
)
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    inputs: list[Path], tmp_path: Path, drop_duplicates: bool, every: int
) -> None:
    make(inputs, tmp_path / "whole", drop_duplicates=drop_duplicates)
    expected = content(tmp_path / "whole")
    calls = 0

    def count(_: Progress) -> None:
        nonlocal calls
        calls += 1

    make(inputs, tmp_path / "counted", progress=count, drop_duplicates=drop_duplicates)
    assert calls > 30
    went_on = 0
    for point in range(1, calls + 1, every):
        prefix = tmp_path / f"killed-{point}"
        with pytest.raises(Killed):
            make(inputs, prefix, progress=killing_after(point), drop_duplicates=drop_duplicates)
        assert not Path(f"{prefix}.bin").exists()
        heard: list[Progress] = []
        make(inputs, prefix, progress=heard.append, drop_duplicates=drop_duplicates)
        assert content(prefix) == expected
        assert not partial_path(prefix).exists()
        went_on += any("going on" in progress.phase for progress in heard)
    assert went_on > 15 // every


def test_killed_again_and_again_it_comes_to_the_same_end(inputs: list[Path], tmp_path: Path) -> None:
    make(inputs, tmp_path / "whole")
    kills = 0
    while True:
        try:
            make(inputs, tmp_path / "c", progress=killing_after(12))
        except Killed:
            kills += 1
            continue
        break
    assert kills > 3
    assert content(tmp_path / "c") == content(tmp_path / "whole")


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.long)])
def test_the_bytes_do_not_depend_on_how_many_processes_encode_or_how_inputs_are_cut(
    inputs: list[Path], tmp_path: Path, workers: int
) -> None:
    make(inputs, tmp_path / "one")
    make(inputs, tmp_path / "several", workers=workers, block_bytes=333, part_bytes=10_000)
    assert content(tmp_path / "several") == content(tmp_path / "one")


def test_what_is_finished_is_kept_after_an_interrupt(inputs: list[Path], tmp_path: Path) -> None:
    said: list[str] = []

    def interrupt(progress: Progress) -> None:
        said.append(progress.phase)
        if progress.done > 2_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(inputs, tmp_path / "c", progress=interrupt, part_bytes=10**9)
    assert said[-1] == (
        f"interrupted: finished parts are kept in {tmp_path / 'c.partial'}, and the same command goes on from there"
    )
    heard: list[Progress] = []
    make(inputs, tmp_path / "c", progress=heard.append)
    assert "going on: 1 finished parts are sound" in heard[0].phase
    make(inputs, tmp_path / "whole")
    assert content(tmp_path / "c") == content(tmp_path / "whole")


def interrupted(inputs: list[Path], prefix: Path) -> Path:
    with pytest.raises(Killed):
        make(inputs, prefix, progress=killing_after(40))
    return partial_path(prefix)


def flip_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "tokens end too early": lambda folder: os.truncate(folder / "tokens", 900),
    "a token is another": lambda folder: flip_byte(folder / "tokens", 1_500),
    "a document's record is another": lambda folder: flip_byte(folder / "documents", 250),
    "a line of the journal is no JSON": lambda folder: flip_byte(folder / "journal", 0),
    "no tokens are left": lambda folder: (folder / "tokens").unlink(),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_part_that_is_not_what_was_written_is_encoded_again(
    inputs: list[Path], tmp_path: Path, damage: str
) -> None:
    folder = interrupted(inputs, tmp_path / "c")
    DAMAGES[damage](folder)
    heard: list[Progress] = []
    make(inputs, tmp_path / "c", progress=heard.append)
    assert any("is not what was written" in progress.phase for progress in heard)
    make(inputs, tmp_path / "whole")
    assert content(tmp_path / "c") == content(tmp_path / "whole")


def test_a_torn_line_of_the_journal_costs_its_part_alone(inputs: list[Path], tmp_path: Path) -> None:
    folder = interrupted(inputs, tmp_path / "c")
    parts = (folder / "journal").read_bytes().count(b"\n")
    os.truncate(folder / "journal", (folder / "journal").stat().st_size - 5)
    heard: list[Progress] = []
    make(inputs, tmp_path / "c", progress=heard.append)
    assert f"going on: {parts - 1} finished parts" in heard[0].phase
    make(inputs, tmp_path / "whole")
    assert content(tmp_path / "c") == content(tmp_path / "whole")


def test_changed_inputs_or_options_begin_anew_and_say_so(inputs: list[Path], tmp_path: Path) -> None:
    interrupted(inputs, tmp_path / "c")
    heard: list[Progress] = []
    with pytest.raises(Killed):
        make(inputs, tmp_path / "c", progress=killing_after(40), drop_duplicates=True)
    (tmp_path / "in" / "c.txt").write_text("now another text")
    make(inputs, tmp_path / "c", progress=heard.append, drop_duplicates=True)
    assert "thrown away: it is of other work (inputs changed)" in heard[0].phase
    assert "now another text" in decoded(tmp_path / "c")


@pytest.mark.parametrize("drop_duplicates", [False, True])
def test_inputs_that_turn_out_to_be_empty_leave_no_unfinished_work(
    tmp_path: Path, drop_duplicates: bool
) -> None:
    # Long enough for several parts to be finished before it shows that they hold nothing.
    (tmp_path / "in.jsonl").write_bytes(b'{"text": ""}\n{"text": 3}\n' * 200)
    with pytest.raises(DataError, match=r"the corpus is empty.*left out: 200 broken JSON lines; 200 empty"):
        make([tmp_path / "in.jsonl"], tmp_path / "corpus", drop_duplicates=drop_duplicates)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("step", ["nothing", "tokens", "index"])
def test_killed_while_the_corpus_appears_it_appears_the_next_time(
    inputs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    make(inputs, tmp_path / "whole")

    def killed(*_: object) -> None:
        raise Killed

    replaces = Path.replace

    def killed_at_the_index(path: Path, target: Path) -> Path:
        if path.name == "index":
            raise Killed
        return replaces(path, target)

    if step == "nothing":
        monkeypatch.setattr(subject, "finish_publishing", killed)
    elif step == "tokens":
        monkeypatch.setattr(Path, "replace", killed_at_the_index)
    else:
        monkeypatch.setattr(subject.shutil, "rmtree", killed)
    with pytest.raises(Killed):
        make(inputs, tmp_path / "c")
    monkeypatch.undo()
    heard: list[Progress] = []
    meta = make(inputs, tmp_path / "c", progress=heard.append)
    assert not heard
    assert meta.documents
    assert content(tmp_path / "c") == content(tmp_path / "whole")
    assert not partial_path(tmp_path / "c").exists()


def test_a_learned_tokenizer_is_not_learned_again(inputs: list[Path], tmp_path: Path) -> None:
    def kill(progress: Progress) -> None:
        if progress.phase == "encoding":
            raise Killed

    with pytest.raises(Killed):
        prepare(inputs, tmp_path / "c", vocab_size=280, progress=kill)
    heard: list[Progress] = []
    prepare(inputs, tmp_path / "c", vocab_size=280, progress=heard.append)
    assert {progress.phase for progress in heard} == {"encoding"}
    prepare(inputs, tmp_path / "whole", vocab_size=280)
    assert content(tmp_path / "c") == content(tmp_path / "whole")


def test_two_processes_do_not_prepare_the_same_corpus(inputs: list[Path], tmp_path: Path) -> None:
    def again(progress: Progress) -> None:
        with pytest.raises(DataError, match="another process is preparing"):
            make(inputs, tmp_path / "c")
        raise Killed

    with pytest.raises(Killed):
        make(inputs, tmp_path / "c", progress=again)


def test_a_full_disk_keeps_finished_parts_and_says_where(inputs: list[Path], tmp_path: Path) -> None:
    make(inputs, tmp_path / "whole")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, limits[1]))
    try:
        with pytest.raises(EnvironmentFault) as caught:
            make(inputs, tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = str(caught.value)
    assert os.strerror(errno.EFBIG) in message
    assert f"finished parts are kept in {tmp_path / 'c.partial'}, and the same command goes on" in message
    assert "free some space" in message
    heard: list[Progress] = []
    make(inputs, tmp_path / "c", progress=heard.append)
    assert "going on" in heard[0].phase
    assert content(tmp_path / "c") == content(tmp_path / "whole")


SCRIPT = """
import sys
from preparation import make
if __name__ == "__main__":
    make(sys.argv[2:], sys.argv[1], workers=2)
"""


def descendants(pid: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            child = int(stat.parent.name)
            found |= {child} | descendants(child)
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_after_kill_minus_nine_no_process_is_left_and_the_work_goes_on(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(
        b"".join(orjson.dumps({"text": f"{number} " * 30}) + b"\n" for number in range(6_000))
    )
    (tmp_path / "script.py").write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py", tmp_path / "c", tmp_path / "x.jsonl"],
        env={**os.environ, "PYTHONPATH": path},
    )
    journal = tmp_path / "c.partial" / "journal"
    try:
        while not (journal.exists() and journal.stat().st_size > 2_000):
            assert process.poll() is None
            time.sleep(0.01)
        workers = descendants(process.pid)
        assert len(workers) >= 2
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 600
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.02)
    heard: list[Progress] = []
    make([tmp_path / "x.jsonl"], tmp_path / "c", progress=heard.append, block_bytes=1 << 20)
    assert "going on" in heard[0].phase
    make([tmp_path / "x.jsonl"], tmp_path / "whole", block_bytes=1 << 20)
    assert content(tmp_path / "c") == content(tmp_path / "whole")


def test_a_process_that_is_killed_ends_the_work_in_one_message_and_keeps_what_is_finished(
    tmp_path: Path,
) -> None:
    (tmp_path / "x.jsonl").write_bytes(
        b"".join(orjson.dumps({"text": f"{number} " * 30}) + b"\n" for number in range(5_000))
    )

    def kill_a_worker(progress: Progress) -> None:
        if progress.done > 100_000:
            for pid in descendants(os.getpid()):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                    if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(pid, signal.SIGKILL)

    with pytest.raises(
        EnvironmentFault, match=r"a process that encodes was killed.* the same command goes on"
    ):
        make([tmp_path / "x.jsonl"], tmp_path / "c", progress=kill_a_worker, workers=2, block_bytes=20_000)
    heard: list[Progress] = []
    make([tmp_path / "x.jsonl"], tmp_path / "c", progress=heard.append, block_bytes=1 << 20)
    assert "going on" in heard[0].phase
