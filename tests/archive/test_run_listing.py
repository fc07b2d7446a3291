"""Find runs: list a folder of them, and resolve what a user typed."""

from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from drivetrain.archive.listing import list_runs, resolve_run
from drivetrain.archive.reader import Run
from drivetrain.archive.writer import RunWriter
from drivetrain.errors import RunError

MakeRun = Callable[..., RunWriter]


@pytest.fixture
def runs_dir(make_run: MakeRun, tmp_path: Path) -> Path:
    """Three runs at different times: two of one name, one of another."""
    ids = (
        ("20260103-000000-small-00aa", "small"),
        ("20260101-000000-base-11bb", "base"),
        ("20260102-000000-base-22cc", "base"),
    )
    for name, base in ids:
        path = make_run(base).path
        document = orjson.loads((path / "run.json").read_bytes())
        created = f"{name[:4]}-{name[4:6]}-{name[6:8]}T00:00:00+00:00"
        (path / "run.json").write_bytes(orjson.dumps(document | {"id": name, "created": created}))
        path.rename(path.with_name(name))
    return tmp_path / "runs"


def ids(runs: list[Run]) -> list[str]:
    return [run.id[-4:] for run in runs]


def test_runs_are_listed_oldest_first_and_strangers_are_ignored(runs_dir: Path) -> None:
    (runs_dir / "notes.txt").write_text("x")
    (runs_dir / "empty").mkdir()
    assert ids(list_runs(runs_dir)) == ["11bb", "22cc", "00aa"]


def test_a_folder_that_does_not_exist_holds_no_runs(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "runs") == []


def test_a_file_is_no_folder_of_runs(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("x")
    with pytest.raises(RunError, match="is a file"):
        list_runs(tmp_path / "runs")


def test_a_damaged_run_hides_no_other(runs_dir: Path) -> None:
    (runs_dir / "20260102-000000-base-22cc" / "run.json").write_bytes(b"{")
    faults: list[str] = []
    assert ids(list_runs(runs_dir, on_fault=faults.append)) == ["11bb", "00aa"]
    assert len(faults) == 1
    assert "22cc" in faults[0]
    with pytest.raises(RunError, match="22cc"):
        list_runs(runs_dir)
    assert resolve_run("small", runs_dir).id.endswith("00aa")


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("latest", "00aa"),
        ("20260101-000000-base-11bb", "11bb"),
        ("small", "00aa"),
        ("20260102", "22cc"),
        ("11bb", "11bb"),
        ("base-22cc", "22cc"),
    ],
)
def test_a_reference_is_resolved(runs_dir: Path, reference: str, found: str) -> None:
    assert resolve_run(reference, runs_dir).id.endswith(found)


def test_a_path_is_resolved_wherever_it_is(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = runs_dir / "20260101-000000-base-11bb"
    assert resolve_run(str(path), "nowhere").id == path.name
    monkeypatch.chdir(tmp_path)
    assert resolve_run(f"runs/{path.name}", "nowhere").id == path.name
    monkeypatch.chdir(runs_dir)
    assert resolve_run(path.name, "nowhere").id == path.name
    moved = tmp_path / "mine"
    path.rename(moved)
    assert resolve_run(str(moved), runs_dir).id == path.name


def test_a_path_that_is_no_run_says_so(runs_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no run directory: run\.json is missing"):
        resolve_run(str(tmp_path), runs_dir)
    with pytest.raises(RunError, match="does not exist"):
        resolve_run(str(tmp_path / "runs" / "nothing"), runs_dir)


@pytest.mark.parametrize("reference", ["base", "2026010"])
def test_an_ambiguous_reference_names_its_candidates(runs_dir: Path, reference: str) -> None:
    with pytest.raises(RunError, match="is ambiguous in") as caught:
        resolve_run(reference, runs_dir)
    assert "20260101-000000-base-11bb" in str(caught.value)
    assert "20260102-000000-base-22cc" in str(caught.value)


def test_an_unknown_reference_names_the_nearest_and_the_latest(runs_dir: Path) -> None:
    with pytest.raises(RunError, match="did you mean 'small'") as caught:
        resolve_run("smal1", runs_dir)
    assert "20260103-000000-small-00aa" in str(caught.value)


def test_a_damaged_run_that_was_asked_for_is_said_to_be_damaged(runs_dir: Path) -> None:
    (runs_dir / "20260102-000000-base-22cc" / "run.json").write_bytes(b"{")
    with pytest.raises(RunError, match=r"22cc/run\.json is damaged"):
        resolve_run("20260102-000000-base-22cc", runs_dir)


def test_an_empty_archive_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run 'latest': there are no runs in"):
        resolve_run("latest", tmp_path)
