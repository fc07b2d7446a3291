"""A run's optimisation records: the newest word on each, of the last segment, with the evidence laid over."""

import json
from collections.abc import Callable

import pytest

from drivetrain.archive.optimisations import add_evidence, records_of
from drivetrain.archive.reader import open_run
from drivetrain.archive.writer import RunWriter
from drivetrain.errors import RunError
from drivetrain.measure.optimisation import Evidence, OptimisationRecord

COMPILE = OptimisationRecord("compile", "fusion.compile", True, requested=True, active=True)
BF16 = OptimisationRecord("bf16", "precision.params_dtype", "fp32", requested=False, active=False)
SHOWN = Evidence("shown", "it ran")


def with_evidence(record: OptimisationRecord, evidence: Evidence) -> OptimisationRecord:
    return OptimisationRecord(
        record.name, record.field, record.value, record.requested, record.active, record.reason, evidence
    )


def start(writer: RunWriter, step: int, *records: OptimisationRecord) -> None:
    writer.open_segment(step)
    for record in records:
        writer.event("optimisation", when="start", **record.to_document())


def test_a_run_without_records_has_none(make_run: Callable[..., RunWriter]) -> None:
    with make_run() as writer:
        assert records_of(open_run(writer.path)) == ()


def test_records_come_back_as_they_were_written_by_name(make_run: Callable[..., RunWriter]) -> None:
    with make_run() as writer:
        start(writer, 1, COMPILE, BF16)
        assert records_of(open_run(writer.path)) == (BF16, COMPILE)


def test_the_end_of_a_segment_replaces_its_start_and_evidence_stays(
    make_run: Callable[..., RunWriter],
) -> None:
    with make_run() as writer:
        start(writer, 1, COMPILE, BF16)
        shown = with_evidence(COMPILE, SHOWN)
        writer.event("optimisation", when="window", **shown.to_document())
        late = OptimisationRecord("compile", "fusion.compile", True, True, False, "no graph was built")
        writer.event("optimisation", when="end", **late.to_document())
        assert records_of(open_run(writer.path)) == (BF16, with_evidence(late, SHOWN))


def test_a_later_segment_starts_afresh(make_run: Callable[..., RunWriter]) -> None:
    with make_run() as writer:
        start(writer, 1, with_evidence(COMPILE, SHOWN), BF16)
        start(writer, 9, COMPILE)
        assert records_of(open_run(writer.path)) == (COMPILE,)
        writer.open_segment(12)
        assert records_of(open_run(writer.path)) == (), "this segment has not said anything yet"


def test_evidence_is_added_to_events_and_summary_and_the_rest_is_kept(
    make_run: Callable[..., RunWriter],
) -> None:
    with make_run() as writer:
        start(writer, 1, COMPILE)
        writer.event("end", status="finished", reason=None)
        writer.write_summary({"final_loss": float("inf"), "findings": ["first"], "optimisations": []})
    run = open_run(writer.path)
    record = with_evidence(COMPILE, Evidence("absent", "no call"))
    changed = add_evidence(run, [record], ["second"])
    assert changed == {"optimisations": [record.to_document()], "findings": ["first", "second"]}
    assert records_of(run) == (record,)
    assert record.without_effect
    summary = run.summary()
    assert summary is not None
    assert summary["findings"] == ["first", "second"]
    assert summary["final_loss"] == float("inf")
    assert run.status() == "finished"
    assert [event["message"] for event in run.events() if event["kind"] == "warning"] == ["second"]


def test_a_run_without_a_summary_takes_no_evidence(make_run: Callable[..., RunWriter]) -> None:
    with make_run() as writer:
        start(writer, 1, COMPILE)
    with pytest.raises(RunError, match="no summary"):
        add_evidence(open_run(writer.path), [COMPILE], [])


def test_a_damaged_record_is_an_error_that_names_the_file(make_run: Callable[..., RunWriter]) -> None:
    with make_run() as writer:
        start(writer, 1, COMPILE)
    file = writer.path / "events.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    del lines[0]["active"]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(RunError, match=r"events\.jsonl.*'active'"):
        records_of(open_run(writer.path))
