"""A disk that is full when a good run has ended costs the evidence, and neither the summary nor the exit code."""

from pathlib import Path
from typing import Any

import pytest

from drivetrain.archive import optimisations
from drivetrain.archive.reader import open_run
from drivetrain.archive.writer import RunWriter
from drivetrain.cli import evidence
from drivetrain.config import config_hash, load_config, to_toml
from drivetrain.errors import EnvironmentFault
from drivetrain.measure.optimisation import Evidence, OptimisationRecord

SUMMARY = {"optimisations": ["as it was"], "findings": []}


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a record, whose profiled window shows the optimisation."""
    record = OptimisationRecord("bf16", "precision.params_dtype", "bf16", requested=True, active=True)
    config = load_config("llama-2m").config
    facts: dict[str, Any] = {"config_hash": config_hash(config), "layout": {"world_size": 1}, "seed": 1}
    facts |= {"provenance": {}, "devices": {}, "dataset": {}}
    with RunWriter.create(tmp_path, "ended", config_toml=to_toml(config), manifest=facts) as writer:
        writer.open_segment(1)
        writer.event("optimisation", when="start", **record.to_document())
        writer.write_summary(SUMMARY)
        monkeypatch.setattr(evidence, "_window_of", lambda run: {})
        monkeypatch.setattr(evidence, "_observation", lambda run, window: None)
        shown = OptimisationRecord(
            "bf16", "precision.params_dtype", "bf16", True, True, None, Evidence("shown", "")
        )
        monkeypatch.setattr(evidence, "_proved", lambda record, run, seen, overlap: shown)
        return Path(writer.path)


def full(*arguments: object, **more: object) -> None:
    raise EnvironmentFault("no space is left")


@pytest.mark.parametrize(
    ("lost", "event_is_lost"), [(("write_json",), False), (("append_event", "write_json"), True)]
)
def test_a_full_disk_leaves_the_summary_as_it_is_and_is_said(
    lost: tuple[str, ...],
    event_is_lost: bool,
    ended: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in lost:
        monkeypatch.setattr(optimisations, name, full)
    if event_is_lost:
        monkeypatch.setattr(evidence, "append_event", full)
    assert evidence.with_evidence(ended, dict(SUMMARY)) == SUMMARY
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "warning: no evidence of optimisations: no space is left"
    last = open_run(ended).events()[-1]
    if event_is_lost:
        assert said[1:] == ["warning: the run's events do not say so: no space is left"]
        assert last["kind"] == "optimisation"
    else:
        assert said[1:] == []
        assert (last["kind"], last["message"]) == (
            "warning",
            "no evidence of optimisations: no space is left",
        )
