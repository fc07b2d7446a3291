"""What an entry of the catalogue says of one optimisation."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.catalogue.knob import Knob
from drivetrain.catalogue.move import Move, Numerics
from drivetrain.catalogue.time_models import TimeFacts, TimeModel
from drivetrain.config import LaunchFacts, Rule, RunConfig, leaves
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, NoPrediction, Observation, Prediction

__all__ = ["Knob", "Numerics", "Optimisation"]


@dataclasses.dataclass(frozen=True)
class Optimisation:
    """One optimisation; the code that does it is ``engine/optimisations/<name>.py``.

    Attributes:
        name: identifier, and the name of its file.
        summary: what it does, in one line.
        sources: tags of the papers, articles or documents it comes from, in words.
        field: the configuration leaf that requests it.
        requested: whether a configuration asks for it.
        on: leaf → value of the move that switches it on, given a configuration and the launch; None where there
            is nothing to switch on (it is on, or can have no effect here).
        off: leaf → value of the move that takes it away.
        numerics: the gate that it must pass.
        treats: account classes whose time it can reduce (``data.loader``, or a whole group, ``communication``); none:
            what it gives is memory.
        evidence: whether a profiled window shows it in effect.
        cures: causes (``docs/diagnosis.md``) that it takes away, which say more than the classes it treats.
        relieves: categories of memory (``measure/memory.py``) that it makes smaller.
        applies: None, or why it can have no effect under these facts (one process has nothing to communicate).
        knobs: leaves that are searched once it is on.
        interacts_with: pairs of knobs' fields, the first of each its own: what is best of one depends on the other, so
            that they are searched together where both are.
        moves: changes of several leaves that belong together, each with a gate of its own; tried once each.
        requires: rules that hold while it is requested.
        conflicts: names of entries that cannot be requested with it.
        capability: one of ``engine/capabilities.py``'s names that it needs; None: none.
        device_bytes: change of a device's peak memory by the move that switches it on; None: there is no model of it,
            or (from the function) it depends on what is not known.
        time_model: computes the expected gain; None where there is no model of it.
        no_prediction: why there is none, in words.
        effective: what its leaf comes to where another leaf may decide for it (a level); None: the leaf's own value.
        evidence_rule: what ``evidence`` goes by, in words, for the documentation.
    """

    name: str
    summary: str
    sources: tuple[str, ...]
    field: str
    requested: Callable[[RunConfig], bool]
    on: Callable[[RunConfig, LaunchFacts], Mapping[str, Any] | None]
    off: Callable[[RunConfig], Mapping[str, Any]]
    numerics: Numerics
    treats: tuple[str, ...]
    evidence: Callable[[RunConfig, Observation, Account | None], Evidence]
    applies: Callable[[RunConfig, LaunchFacts], str | None] = dataclasses.field(
        default=lambda _config, _facts: None
    )
    cures: tuple[str, ...] = ()
    relieves: tuple[str, ...] = ()
    knobs: tuple[Knob, ...] = ()
    interacts_with: tuple[tuple[str, str], ...] = ()
    moves: tuple[Move, ...] = ()
    requires: tuple[Rule, ...] = ()
    conflicts: tuple[str, ...] = ()
    capability: str | None = None
    device_bytes: Callable[[RunConfig, LaunchFacts], int | None] | None = None
    time_model: TimeModel | None = None
    no_prediction: str = "there is no model of it yet"
    effective: Callable[[RunConfig], object] | None = None
    evidence_rule: str = ""

    def expects(self, facts: TimeFacts | None, after: RunConfig) -> Prediction | NoPrediction:
        """What it is expected to gain.

        Args:
            facts: of the configuration that was profiled; None: nothing is known of it.
            after: that configuration after a change of leaves that are this entry's.
        """
        if self.time_model is None:
            return NoPrediction(self.no_prediction)
        if facts is None:
            return NoPrediction("nothing was profiled")
        return self.time_model.predict(facts, after)

    def value(self, config: RunConfig) -> object:
        """The value of its leaf."""
        section, _, name = self.field.partition(".")
        found: object = getattr(getattr(config, section), name)
        return found

    def effective_value(self, config: RunConfig) -> object:
        """What its leaf comes to in a run of ``config``."""
        return self.value(config) if self.effective is None else self.effective(config)

    def is_asked_for(self, config: RunConfig, facts: LaunchFacts) -> bool:
        """Whether ``config`` requests it; a default that can have no effect here is nothing that anybody asked for."""
        if not self.requested(config):
            return False
        return self.applies(config, facts) is None or self.value(config) != leaves()[self.field].default

    def to_document(self) -> dict[str, Any]:
        """The entry as ``catalogue --json`` shows it."""
        return {
            "name": self.name,
            "summary": self.summary,
            "sources": list(self.sources),
            "field": self.field,
            "numerics": self.numerics,
            "treats": list(self.treats),
            "cures": list(self.cures),
            "relieves": list(self.relieves),
            "knobs": [
                {
                    "field": knob.field,
                    "low": knob.low,
                    "high": knob.high,
                    "whole": knob.whole,
                    "scale": knob.scale,
                }
                for knob in self.knobs
            ],
            "interacts_with": [list(pair) for pair in self.interacts_with],
            "moves": [
                {
                    "name": move.name,
                    "summary": move.summary,
                    "numerics": move.numerics,
                    "treats": list(move.treats),
                    "leaves": sorted(move.leaves),
                }
                for move in self.moves
            ],
            "requires": [rule.doc for rule in self.requires],
            "conflicts": list(self.conflicts),
            "capability": self.capability,
            "evidence_rule": self.evidence_rule,
            "expected_gain": None if self.time_model is None else self.time_model.rule,
            "no_prediction": self.no_prediction if self.time_model is None else None,
        }
