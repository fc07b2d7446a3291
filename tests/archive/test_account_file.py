"""The account of a run's profiled window: its mean step, and two runs' accounts side by side."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.archive.account_file import mean_step_of, newest_account
from drivetrain.archive.writer import RunWriter
from drivetrain.errors import RunError


def step(number: int, matmul: int, idle: int, unexplained: int = 0) -> dict[str, object]:
    classes = {name: ns for name, ns in (("compute.matmul", matmul), ("idle", idle)) if ns}
    return {
        "step": number,
        "classes": classes,
        "unexplained_ns": unexplained,
        "window_ns": matmul + idle + unexplained,
    }


def write(folder: Path, ranks: list[list[dict[str, object]]]) -> Path:
    account = {"ranks": [{"rank": index, "steps": steps} for index, steps in enumerate(ranks)]}
    document = {"schema": 1, "windows": [{"first": 4, "last": 6, "account": account}]}
    (folder / "account.json").write_text(json.dumps(document))
    return folder


def test_the_mean_step_leaves_the_first_out_and_closes(tmp_path: Path) -> None:
    rank0 = [step(4, 9_000, 9_000), step(5, 100, 20, 4), step(6, 300, 0)]
    rank1 = [step(4, 9_000, 9_000), step(5, 200, 40), step(6, 200, 0)]
    mean = mean_step_of(write(tmp_path, [rank0, rank1]))
    assert mean is not None
    assert (mean.first, mean.last) == (4, 6)
    assert mean.classes == {"compute.matmul": 200, "idle": 15, "unexplained": 1}
    assert mean.window_ns == sum(mean.classes.values())


def test_a_single_step_stands_for_itself(tmp_path: Path) -> None:
    mean = mean_step_of(write(tmp_path, [[step(4, 70, 30)]]))
    assert mean is not None
    assert mean.window_ns == 100


def test_a_run_that_was_never_profiled_has_none(tmp_path: Path) -> None:
    assert mean_step_of(tmp_path) is None


@pytest.mark.parametrize(
    "content", ["{}", '{"schema": 9, "windows": [1]}', '{"schema": 1, "windows": [{"first": 1}]}']
)
def test_a_damaged_account_is_an_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "account.json").write_text(content)
    with pytest.raises(RunError, match=r"account\.json"):
        mean_step_of(tmp_path)


@pytest.mark.parametrize("content", ['{"schema": 1, "windows": [3]}', '{"schema": 2, "windows": [{}]}'])
def test_what_is_no_window_is_a_damaged_file_with_its_remedy(tmp_path: Path, content: str) -> None:
    (tmp_path / "account.json").write_text(content)
    with pytest.raises(RunError, match=r"damaged.*remove it"):
        mean_step_of(tmp_path)


def profiled(writer: RunWriter, first: int, last: int) -> None:
    path = f"profile/{first}-{last}"
    writer.event("window", what="profile", first=first, last=last, path=path, file_bytes={"rank0.json.gz": 9})


def test_the_account_of_a_run_is_that_of_its_newest_window(make_run: Callable[..., RunWriter]) -> None:
    with make_run() as writer:
        writer.open_segment(1)
        entries = [{"first": first, "last": first + 2, "account": {}} for first in (4, 8)]
        (writer.path / "account.json").write_text(json.dumps({"schema": 1, "windows": entries}))
        assert newest_account(writer.path) == entries[1], "no event tells of a window"
        profiled(writer, 8, 10)
        profiled(writer, 4, 6)
        assert newest_account(writer.path) == entries[0]
        profiled(writer, 20, 22)
        assert newest_account(writer.path) is None, "nobody has made the account of the newest window"
        writer.open_segment(2)
        assert newest_account(writer.path) is None, "all of them are of steps that were repeated"


def test_events_that_cannot_be_read_cost_no_account(make_run: Callable[..., RunWriter]) -> None:
    with make_run() as writer:
        writer.open_segment(1)
    write(writer.path, [[step(4, 70, 30)]])
    (writer.path / "events.jsonl").write_text("no event\nat all\n")
    assert mean_step_of(writer.path) is not None
