"""Figures that a run's files hold beside its traces, on a run directory made by hand."""

from pathlib import Path

import pytest

from drivetrain.archive.reader import open_run
from drivetrain.archive.writer import RunWriter
from drivetrain.diagnose.run_figures import figures_of
from report_samples import make_run


def log(writer: RunWriter, step: int, step_s: float, *tags: str, read_s: float = 0.01) -> None:
    metrics = {"time/step_s": step_s, "time/data_wait_s": 0.02, "data/read_s": read_s}
    writer.log_metrics(step, metrics, tags)


@pytest.fixture
def writer(tmp_path: Path) -> RunWriter:
    """Twenty steady steps, of which one is tagged gc and one compile, after two of warm-up."""
    made = make_run(tmp_path / "runs", overrides=("training.train_iters=24",))
    made.open_segment(1)
    made.event("start", step=0, threads=2)
    for step in (1, 2):
        log(made, step, 3.0, "warmup", "compile")
    for step in range(3, 25):
        tags = {10: ("gc",), 12: ("compile",)}.get(step, ())
        seconds = {10: 0.2, 12: 1.1}.get(step, 0.1)
        log(made, step, seconds, *tags, read_s=0.03 if step < 8 else 0.01)
    return made


def test_means_are_over_steady_steps_and_quarters_are_told_apart(writer: RunWriter) -> None:
    found = figures_of(open_run(writer.path))
    assert found.steady_steps == 20
    assert found.means["time/step_s"] == pytest.approx(0.1)
    assert found.early["data/read_s"] == pytest.approx(0.03)
    assert found.late["data/read_s"] == pytest.approx(0.01)


def test_steps_with_a_tag_count_what_they_are_longer_and_warm_up_does_not(writer: RunWriter) -> None:
    found = figures_of(open_run(writer.path))
    assert found.excess_s["gc"] == {10: pytest.approx(0.1)}
    assert found.excess_s["compile"] == {12: pytest.approx(1.0)}
    assert found.logged_steps == 22


def test_a_step_that_something_else_made_longer_too_is_not_laid_at_the_collectors_door(
    writer: RunWriter,
) -> None:
    log(writer, 25, 5.0, "gc", "profile")
    found = figures_of(open_run(writer.path))
    assert found.excess_s["gc"].keys() == {10}
    assert found.logged_steps == 22, "nor is the excess spread over it"


def test_steps_without_a_time_and_figures_that_are_not_finite_give_no_mean(writer: RunWriter) -> None:
    log(writer, 25, float("nan"))
    log(writer, 26, 0.1, read_s=float("inf"))
    writer.log_metrics(27, {"train/loss": 1.0}, ())
    found = figures_of(open_run(writer.path))
    assert found.steady_steps == 21
    assert found.means["time/step_s"] == pytest.approx(0.1)
    assert "data/read_s" not in found.means


def test_of_a_resumed_run_maintenance_is_held_against_the_steps_of_its_own_segment(writer: RunWriter) -> None:
    # The summary's steps are those of the whole run, its times those of the last segment.
    writer.open_segment(25)
    for step in range(25, 29):
        log(writer, step, 0.1)
    for step in (26, 28):
        writer.event("checkpoint", step=step, path=f"step-{step}")
    writer.write_summary({"steps": 28, "wall": {"maintenance_s": {"checkpoint": 0.4}}})
    found = figures_of(open_run(writer.path))
    assert found.segment_steps == 4
    assert found.maintenance["checkpoint"].seconds == pytest.approx(0.2)


def test_the_machine_and_the_padding_are_what_the_run_wrote_down(writer: RunWriter) -> None:
    writer.event("data", when="start", padding_frac=0.25)
    writer.event("data", when="end", operations={})
    found = figures_of(open_run(writer.path))
    assert (found.threads, found.cores, found.local_processes) == (2, 2, 1)
    assert found.padding == 0.25
    assert found.memory_bytes == 16_000_000_000


def test_only_what_was_not_meant_is_a_graph_break_or_a_recompilation(writer: RunWriter) -> None:
    breaks = [
        {"place": "a.py:1", "why": "x", "intended": True, "count": 1},
        {"place": "b.py:2", "why": "y", "intended": False, "count": 3},
    ]
    again = [{"function": "f", "place": "c.py:3", "why": "z", "expected": False, "count": 1}]
    writer.event("compilation", when="step", step=3, graph_breaks=[], recompilations=[])
    writer.event("compilation", when="end", step=24, graph_breaks=breaks, recompilations=again)
    found = figures_of(open_run(writer.path))
    assert [one["place"] for one in found.graph_breaks] == ["b.py:2"]
    assert [one["place"] for one in found.recompilations] == ["c.py:3"]


def test_the_last_checkpoint_belongs_to_every_run_and_is_left_out(writer: RunWriter) -> None:
    for step in (8, 16, 24):
        writer.event("checkpoint", step=step, path=f"step-{step}")
    writer.write_summary({"steps": 24, "wall": {"maintenance_s": {"checkpoint": 0.9}}})
    found = figures_of(open_run(writer.path))
    assert found.segment_steps == 24
    assert found.maintenance["checkpoint"].times == 2
    assert found.maintenance["checkpoint"].seconds == pytest.approx(0.6)
    assert "evaluation" not in found.maintenance


def test_a_run_without_a_step_has_no_figures_and_no_error(tmp_path: Path) -> None:
    found = figures_of(open_run(make_run(tmp_path / "runs").path))
    assert found.steady_steps == 0
    assert found.means == {}
    assert found.maintenance == {}
