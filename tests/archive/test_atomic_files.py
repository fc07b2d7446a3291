"""A file is the old one or the new one, whatever happens in between."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from drivetrain.archive.atomic import write_bytes, write_json, write_text
from drivetrain.archive.encoding import read_document, restore_non_finite
from drivetrain.errors import EnvironmentFault, RunError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_content_is_replaced_and_no_temporary_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_text(path, "first, and longer than the second")
    write_text(path, "zweite ü")
    assert path.read_text(encoding="utf-8") == "zweite ü"
    assert names(tmp_path) == ["state.json"]


def test_the_file_and_its_folder_are_fsynced_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []
    fsync = os.fsync

    def counting(descriptor: int) -> None:
        synced.append(os.path.isdir(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", counting)
    write_bytes(tmp_path / "kept", b"x")
    assert synced == [False, True]
    write_bytes(tmp_path / "heartbeat", b"x", fsync=False)
    assert synced == [False, True]


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_at_any_step_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    path = tmp_path / "state.json"
    write_text(path, "old")

    def fail(*arguments: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        expected = EnvironmentFault if isinstance(error, OSError) else KeyboardInterrupt
        with pytest.raises(expected) as caught:
            write_text(path, "new")
    if expected is EnvironmentFault:
        assert str(path) in str(caught.value)
        assert "the previous file is unchanged; free some space" in str(caught.value)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["state.json"]


FULL_DISK = """
import resource, sys
from pathlib import Path
from drivetrain.archive.atomic import write_bytes
from drivetrain.errors import EnvironmentFault
path = Path(sys.argv[1])
write_bytes(path, b"old")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_bytes(path, bytes(100_000))
except EnvironmentFault as fault:
    print(fault)
"""


def test_a_file_that_the_kernel_refuses_to_grow_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "state.bin"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True
    )
    assert f"cannot write {path}: File too large" in done.stdout
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["state.bin"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"nothing was written; the folder .*nowhere does not exist"):
        write_bytes(tmp_path / "nowhere" / "state.json", b"x")


def test_others_may_read_the_file_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_bytes(tmp_path / "state.json", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "state.json").stat().st_mode & 0o777 == 0o644


def test_a_reader_never_sees_a_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    contents = [{"n": [number] * 20_000} for number in range(2)]
    write_json(path, contents[0], fsync=False)
    stop = threading.Event()

    def keep_writing() -> None:
        number = 0
        while not stop.is_set():
            number = 1 - number
            write_json(path, contents[number], fsync=False)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        for _ in range(200):
            assert read_document(path) in contents
    finally:
        stop.set()
        writer.join()


def test_json_keeps_non_finite_numbers_huge_integers_and_numpy_values(tmp_path: Path) -> None:
    value = {
        "loss": float("nan"),
        "up": [float("inf"), -float("inf")],
        "flops": 10**30,
        "small": np.int64(7),
        "share": np.float32(0.5),
        "list": np.arange(3),
        "flag": True,
        "where": tmp_path,
        "nothing": None,
    }
    write_json(tmp_path / "a.json", value)
    raw = json.loads((tmp_path / "a.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert raw["loss"] == "NaN"
    assert raw["flops"] == 1e30
    back = restore_non_finite(read_document(tmp_path / "a.json"))
    assert np.isnan(back.pop("loss"))
    assert back == {
        "up": [float("inf"), -float("inf")],
        "flops": 1e30,
        "small": 7,
        "share": 0.5,
        "list": [0, 1, 2],
        "flag": True,
        "where": str(tmp_path),
        "nothing": None,
    }


@pytest.mark.parametrize(
    ("content", "complaint"), [(b"{", "damaged"), (b"[1]", "object is expected, found list")]
)
def test_a_damaged_document_is_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(RunError, match=complaint) as caught:
        read_document(path)
    assert str(path) in str(caught.value)


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match="file is a file, a folder is needed"):
        write_bytes(tmp_path / "file" / "inner", b"")
