"""Where a run came from: git with its uncommitted changes, versions, machine; no secrets."""

import subprocess
from pathlib import Path

import orjson
import pytest

from drivetrain import __version__
from drivetrain.archive.provenance import collect


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "trunk")
    (folder / "code.py").write_text("a = 1\n")
    git(folder, "add", "code.py")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_a_clean_repository_gives_commit_and_branch(repository: Path) -> None:
    state = collect([], repository)["git"]
    assert state == {
        "commit": git(repository, "rev-parse", "HEAD"),
        "branch": "trunk",
        "dirty": False,
        "diff_sha256": None,
        "untracked": [],
        "untracked_count": 0,
        "reason": None,
    }


def test_two_states_of_the_working_tree_have_different_hashes(repository: Path) -> None:
    hashes = []
    for content in ("a = 2\n", "a = 3\n", "a = 2\n"):
        (repository / "code.py").write_text(content)
        state = collect([], repository)["git"]
        assert state["dirty"] is True
        hashes.append(state["diff_sha256"])
    assert hashes[0] == hashes[2] != hashes[1]
    git(repository, "add", "code.py")
    assert collect([], repository)["git"]["diff_sha256"] == hashes[0]


def test_untracked_files_are_named_but_not_read(repository: Path) -> None:
    (repository / "new file\nwith a newline.py").write_text("password = 'hunter2'")
    (repository / ".gitignore").write_text("ignored\n")
    (repository / "ignored").write_text("")
    collected = collect([], repository)
    assert collected["git"]["untracked"] == [".gitignore", "new file\nwith a newline.py"]
    assert collected["git"]["dirty"] is True
    assert b"hunter2" not in orjson.dumps(collected)


def test_a_detached_head_has_no_branch(repository: Path) -> None:
    git(repository, "checkout", "-q", "--detach")
    state = collect([], repository)["git"]
    assert state["branch"] is None
    assert state["commit"] is not None


def test_collecting_takes_no_lock_in_the_repository(repository: Path) -> None:
    (repository / ".git" / "index.lock").touch()
    (repository / "code.py").write_text("a = 2\n")
    assert collect([], repository)["git"]["dirty"] is True


def test_no_repository_is_said_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    state = collect([], tmp_path)["git"]
    assert "not a git repository" in state.pop("reason")
    assert set(state.values()) == {None}


def test_a_repository_without_commit_is_said(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "trunk")
    state = collect([], tmp_path)["git"]
    assert state["reason"] == "the repository has no commit yet"
    assert state["commit"] is None


def test_a_machine_without_git_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert collect([], tmp_path)["git"]["reason"] == "git is not installed"


def test_versions_come_from_metadata(tmp_path: Path) -> None:
    packages = collect([], tmp_path)["packages"]
    assert packages["drivetrain"] == __version__
    assert packages["orjson"] == orjson.__version__
    assert set(packages) >= {"torch", "numpy", "safetensors"}


def test_of_the_environment_only_the_allowed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"OMP_NUM_THREADS": "3", "NCCL_ALGO": "Ring", "SLURM_JOB_ID": "7", "TORCH_LOGS": "dynamo"}
    hidden = (
        "SLURM_JWT",
        "TORCH_API_TOKEN",
        "NCCL_SECRET",
        "AWS_SECRET_ACCESS_KEY",
        "HOME_ADDRESS",
        "XNCCL_ALGO",
    )
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    for name in hidden:
        monkeypatch.setenv(name, "not for the record")
    collected = collect(["drivetrain", "train"], tmp_path)
    assert kept.items() <= collected["environment"].items()
    assert b"not for the record" not in orjson.dumps(collected)


def test_the_machine_and_the_command_are_recorded(tmp_path: Path) -> None:
    collected = collect(["drivetrain", "train", "llama-2m"], tmp_path)
    assert collected["command"] == ["drivetrain", "train", "llama-2m"]
    assert collected["cpu"]["usable_cores"] >= 1
    assert collected["memory_bytes"] > 0
    assert set(collected["platform"]) == {"system", "release", "machine"}
    assert collected["host"]
