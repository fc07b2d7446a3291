"""Every kind of damage the reader knows, with the rule it applies: one place, one id each.

``docs/traces.md`` explains them; ``tests/trace/test_damaged_traces.py`` has a test named after each.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from drivetrain.trace.health import Finding, Severity

__all__ = ["RULES", "Rule", "finding", "findings"]


@dataclass(frozen=True)
class Rule:
    """What is done about one kind of damage."""

    severity: Severity
    message: str
    """With ``{count}``, and ``{detail}`` where the place matters."""
    affects: tuple[str, ...] = ()


RULES: Final[Mapping[str, Rule]] = {
    # The text.
    "truncated": Rule("warning", "the file breaks off{detail}; {count} records before the break were read"),
    "missing_bracket": Rule(
        "note", "the bracket that ends the events is missing; all {count} records were read"
    ),
    "trailing_bytes": Rule(
        "warning", "text after the end of the trace is no trace and was not read ({count} times)"
    ),
    "byte_order_mark": Rule("note", "a byte order mark precedes the text"),
    "concatenated": Rule(
        "warning", "{count} further documents follow the first one; the events of all were read"
    ),
    "damaged_header": Rule(
        "warning", "the text before the events is damaged; metadata such as the rank may be missing"
    ),
    "damaged_metadata": Rule(
        "warning", "metadata beside the events does not read ({count} parts); what could be was"
    ),
    "stray_bracket": Rule("warning", "{count} closing brackets in the middle of the events were ignored"),
    "lost_record": Rule("warning", "{count} damaged records could not be read"),
    "bad_escape": Rule("note", "backslashes that escape nothing in {count} records were taken literally"),
    "control_character": Rule("note", "control characters in {count} records were read as spaces"),
    "not_a_number": Rule("note", "nan, inf or N/A in {count} places was read as no value"),
    "invalid_utf8": Rule("note", "{count} passages are not UTF-8; what cannot be decoded was replaced"),
    # Records.
    "integer_overflow": Rule("note", "{count} identifiers beyond 64 bits were left out"),
    "missing_timestamp": Rule("warning", "{count} records without a readable start were dropped"),
    "missing_duration": Rule("warning", "{count} records without a readable duration were taken as points"),
    "unpaired": Rule("warning", "{count} begin or end records without their partner were dropped"),
    "zero_timestamp": Rule("warning", "{count} records at time 0, long before all others, were dropped"),
    "outlying_timestamp": Rule(
        "warning", "{count} records more than a day away from the middle of the trace were dropped"
    ),
    "negative_duration": Rule("warning", "{count} negative durations were taken as 0"),
    "overflowing_duration": Rule("warning", "{count} durations of more than a day were taken as 0"),
    "clipped_duration": Rule(
        "warning",
        "{count} device records that last over many later ones of their stream were ended where the next one "
        "starts{detail}",
    ),
    "unsorted": Rule("note", "{count} device records were out of order on their stream and were sorted"),
    "overlapping_kernels": Rule(
        "note", "{count} kernels start before the one before them on their stream has ended; kept as they are"
    ),
    "graph_replay": Rule("note", "{count} launches stand for several device records each (graph replay)"),
    "graph_replay_incomplete": Rule(
        "warning",
        "{count} graph launches left no device records: what they ran is missing",
        ("idle_ns", "busy_ns", "compute_ns"),
    ),
    "no_device_events": Rule(
        "warning",
        "there are {count} launches but no device records (CUPTI or roctracer missing?): host view only",
    ),
    "no_kernels": Rule(
        "error",
        "there are {count} kernel launches but no kernel, only copies: the device's times are worth nothing (CUPTI "
        "missing, or its records lost?)",
        ("busy_ns", "idle_ns", "compute_ns", "communication_ns", "exposed_communication_ns", "classes"),
    ),
    # The job.
    "missing_distributed_info": Rule("note", "the file does not say its rank{detail}"),
    "missing_steps": Rule(
        "note", "no ProfilerStep range: steps have to be inferred, or the window is the whole trace"
    ),
}
"""Id → rule."""


def finding(rule_id: str, count: int, detail: str = "") -> Finding:
    """The finding that a rule applied ``count`` times."""
    rule = RULES[rule_id]
    message = rule.message.format(count=f"{count:,}", detail=detail)
    return Finding(rule_id, rule.severity, message, count, rule.affects)


def findings(found: Counter[str], details: Mapping[str, str]) -> tuple[Finding, ...]:
    """Findings for all rules that applied, worst first, else in the order of :data:`RULES`."""
    order = ("error", "warning", "note")
    applied = [finding(rule, found[rule], details.get(rule, "")) for rule in RULES if found[rule]]
    assert not set(found) - set(RULES), set(found) - set(RULES)
    return tuple(sorted(applied, key=lambda one: order.index(one.severity)))
