"""Evidence of what hides communication says how much the run itself saw hidden."""

from typing import Any

import pytest

from drivetrain.cli.evidence import _overlap_in_words, _proved
from drivetrain.config import load_config
from drivetrain.measure.optimisation import Observation, OptimisationRecord

SUMMARY = {"communication": {"steps": 12, "overlap_frac": 0.634, "exposed_frac": 0.0421}}


class _Run:
    """Stands for a run with buckets."""

    def config(self) -> Any:
        return load_config("llama-2m", ["overlap.bucket_size_mb=1"]).config


def record(name: str = "ddp_bucket") -> OptimisationRecord:
    return OptimisationRecord(name, "overlap.bucket_size_mb", 1.0, True, True)


def why(name: str, seen: Observation, summary: dict[str, Any]) -> tuple[str, str]:
    proved = _proved(record(name), _Run(), seen, _overlap_in_words(summary))  # type: ignore[arg-type]
    assert proved.evidence is not None
    return proved.evidence.kind, proved.evidence.why


def test_what_was_hidden_stands_behind_the_evidence_of_what_treats_communication() -> None:
    seen = Observation(num_steps=2, collective_bytes={"all_reduce": [1_000_000] * 8})
    kind, words = why("ddp_bucket", seen, SUMMARY)
    assert kind == "shown"
    assert words.endswith(
        "; in 12 steps without the profiler 63% of communication was hidden, and 4.2% of a step spent waiting for it"
    )


def test_evidence_that_is_absent_has_nothing_to_say_of_it() -> None:
    kind, words = why("ddp_bucket", Observation(num_steps=2), SUMMARY)
    assert kind == "absent"
    assert "hidden" not in words


@pytest.mark.parametrize("summary", [{}, {"communication": None}, {"communication": {"overlap_frac": None}}])
def test_a_run_that_does_not_know_says_nothing(summary: dict[str, Any]) -> None:
    assert _overlap_in_words(summary) == ""
