"""What the entries demand of a configuration, for the one pass that tries all rules."""

import functools

from drivetrain.catalogue.discovery import catalogue
from drivetrain.catalogue.entry import Optimisation
from drivetrain.config import BASIC_RULES, LaunchFacts, Rule, RunConfig
from drivetrain.config.serialise import value_text

__all__ = ["all_rules", "rules_of"]


def all_rules() -> tuple[Rule, ...]:
    """The basic rules, then those of every entry: what ``check`` tries, and every verb before it starts a run."""
    return (*BASIC_RULES, *rules_of(catalogue()))


@functools.cache
def rules_of(entries: tuple[Optimisation, ...]) -> tuple[Rule, ...]:
    """The rules of ``entries``. Each holds only while its optimisation is requested; of two entries that exclude
    each other the pair is one rule, whichever of them says so."""
    known = {one.name: one for one in entries}
    pairs = sorted({tuple(sorted((one.name, other))) for one in entries for other in one.conflicts})
    return (
        *(_while_requested(one, rule) for one in entries for rule in one.requires),
        *(_not_both(known[first], known[second]) for first, second in pairs),
    )


def _while_requested(entry: Optimisation, rule: Rule) -> Rule:
    def check(config: RunConfig, facts: LaunchFacts) -> str | None:
        return rule.check(config, facts) if entry.requested(config) else None

    return Rule(rule.id, rule.fields, check, rule.doc)


def _not_both(first: Optimisation, second: Optimisation) -> Rule:
    def check(config: RunConfig, _facts: LaunchFacts) -> str | None:
        if not (first.requested(config) and second.requested(config)):
            return None
        return (
            f"{first.name} and {second.name} ({second.field}) exclude each other; take one of them away: "
            f"{_assignments(first, config)}, or {_assignments(second, config)}"
        )

    return Rule(
        f"{first.name}-or-{second.name}",
        (first.field, second.field),
        check,
        f"{first.field} and {second.field} do not request both {first.name} and {second.name}.",
    )


def _assignments(entry: Optimisation, config: RunConfig) -> str:
    """The move that takes ``entry`` away, as it is written on the command line."""
    return " ".join(f"{leaf}={value_text(value)}" for leaf, value in entry.off(config).items())
