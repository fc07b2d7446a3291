"""A run's record of an operator that others served is a finding of its account."""

from typing import Any

import pytest

from drivetrain.measure.optimisation import Evidence, OptimisationRecord
from drivetrain.trace.operator_records import operator_findings


def record(value: str, **more: Any) -> OptimisationRecord:
    given = {"name": "rms_norm", "field": "fusion.rms_norm", "requested": True, "active": True, **more}
    return OptimisationRecord(value=value, **given)


def test_calls_that_others_served_are_counted_with_the_reason() -> None:
    partly = record("triton", served={"triton": 8, "eager": 1200}, reason="triton cannot serve int8")
    wholly = record("triton", active=False, served={"eager": 3}, reason="no Triton here")
    first, second = operator_findings([partly, wholly])
    assert (first.id, first.severity, first.count) == ("operator_fallback", "warning", 1200)
    assert first.message == (
        "fusion.rms_norm = triton was asked for; of 1,208 calls 1,200 by eager: triton cannot serve int8"
    )
    assert (second.id, second.count) == ("operator_fallback", 3)


def test_an_operator_that_was_never_called_is_not_in_effect() -> None:
    unused = record("eager", active=False, reason="no call of it was made")
    refuted = record("eager", served={"eager": 2}, evidence=Evidence("absent", "no region of it"))
    assert [(one.id, one.message) for one in operator_findings([unused, refuted])] == [
        ("operator_unused", "fusion.rms_norm = eager is not in effect: no call of it was made"),
        ("operator_unused", "fusion.rms_norm = eager is not in effect: no region of it"),
    ]


def test_a_tuned_choice_that_cannot_serve_is_a_note() -> None:
    choice = record("auto", served={"eager": 2}, reason="tuned for triton, which cannot serve: no Triton")
    (found,) = operator_findings([choice])
    assert (found.id, found.severity) == ("operator_choice", "note")
    assert found.message == "fusion.rms_norm = auto: tuned for triton, which cannot serve: no Triton"


@pytest.mark.parametrize(
    "silent",
    [
        record("triton", served={"triton": 4}),
        record("auto", served={"eager": 4, "inductor": 2}),
        record("off", requested=False, active=False),
        record("triton", requested=False, active=False, reason="the model has no RMSNorm"),
        record("bf16", name="bf16", field="precision.params_dtype", active=False, reason="emulated"),
    ],
)
def test_what_was_served_as_asked_and_what_is_no_operator_says_nothing(silent: OptimisationRecord) -> None:
    assert operator_findings([silent]) == ()
