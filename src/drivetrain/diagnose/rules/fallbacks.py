"""What was expected to run and did not, by the findings of ``account --expect``."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.rule import Rule

__all__ = ["ENTRY_OF_WORD", "RULE"]

ENTRY_OF_WORD = {"bf16": "bf16", "fp16": "fp16", "fused_optimizer": "fused_adamw", "compile": "compile"}
"""Word of an expectation, as in a finding's id → the catalogue's entry that is the same thing."""


def _detect(facts: Facts) -> Iterator[Finding]:
    said = {record.name for record in facts.records if record.without_effect}
    for finding in facts.account.health:
        word, _, answer = finding.id.removeprefix("expected_").rpartition("_")
        if not finding.id.startswith("expected_") or answer not in ("absent", "partly"):
            continue
        if ENTRY_OF_WORD.get(word) in said:
            continue  # The record of the run says so already.
        yield Finding(
            rule="fallbacks",
            kind="not_in_effect",
            subject=word.replace("_", "-"),
            cause="kernels.fallback",
            text=finding.message,
            evidence=(Evidence("names of the operators and kernels that ran", "trace"),),
            unknown={
                "cost_ns": "what the expected implementation would have taken was not measured",
                "points": "what the expected implementation would have taken was not measured",
            },
        )


RULE = Rule("fallbacks", ("kernels.fallback",), (), _detect)
