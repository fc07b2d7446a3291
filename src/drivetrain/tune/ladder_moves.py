"""Which size of a declared move the ladder tries: it must fit the memory limit, and is the one that promises most."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.catalogue import Optimisation, Setting, StepEstimate
from drivetrain.catalogue.move import Move
from drivetrain.config import RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import NoPrediction, Prediction
from drivetrain.tune.candidates import illegal
from drivetrain.tune.goals import counted_event
from drivetrain.tune.moves import Change, changed
from drivetrain.tune.short_run import as_override

__all__ = ["Estimate", "Size", "choose_size", "counted_bytes", "memory_in_words"]

Estimate = Callable[[RunConfig], StepEstimate | str]
"""Configuration → what a step of it needs, or why it cannot be run."""


@dataclass(frozen=True)
class Size:
    """One size of a move that fits.

    Attributes:
        change: with it.
        needs: what a step needs then.
        predicted: its gain, or why it is not known.
    """

    change: Change
    needs: StepEstimate
    predicted: Prediction | NoPrediction

    def memory_document(self, parent: StepEstimate | str, limit_bytes: int) -> dict[str, Any]:
        """What the step of the ladder says of memory, before anything was run."""
        return {
            "limit_bytes": limit_bytes,
            "predicted_bytes": {
                "parent": parent.peak_bytes if isinstance(parent, StepEstimate) else None,
                "candidate": self.needs.peak_bytes,
            },
            "counted_bytes": {"parent": None, "candidate": None},
            "recomputed": self.needs.recomputed,
        }


def choose_size(
    entry: Optimisation,
    move: Move,
    config: RunConfig,
    setting: Setting,
    *,
    estimate: Estimate,
    account: Account | None,
) -> Size | str:
    """The size of ``move`` with the best prediction among those that fit ``memory.device_memory_limit_bytes``.

    Sizes are tried without memory from the smallest up to the first that does not fit. Without a prediction the largest
    is taken.

    Returns:
        Why there is none, where there is none.
    """
    limit_bytes = config.memory.device_memory_limit_bytes
    assert limit_bytes is not None, "a move that fits no limit was not refused"
    parent = estimate(config)
    found: list[Size] = []
    why: list[str] = []
    for leaves in move.proposes(config, setting):
        change = Change(dict(leaves), move.name)
        words = " ".join(as_override(leaf, value) for leaf, value in leaves.items())
        broken = illegal(config, change, setting.facts)
        if broken is not None:
            why.append(f"{words}: {broken}")
            continue
        after = changed(config, change)
        needs = estimate(after)
        if isinstance(needs, str):
            why.append(f"{words}: {needs}")
            break
        if needs.peak_bytes > limit_bytes:
            why.append(
                f"{words} needs {needs.peak_bytes:,} bytes, and memory.device_memory_limit_bytes = {limit_bytes:,}"
            )
            break
        if not needs.recomputed and entry.requested(after) and not entry.requested(config):
            why.append(f"{words} fits with nothing recomputed")
            continue
        predicted: Prediction | NoPrediction = NoPrediction(
            "what a step needs now, or its account, is not known"
        )
        if account is not None and isinstance(parent, StepEstimate):
            predicted = move.predict(account, config, after, setting.facts, parent, needs)
        found.append(Size(change, needs, predicted))
    if not found:
        return "; ".join(why) or "there is no larger size"
    return max(reversed(found), key=_expected)


def _expected(size: Size) -> float:
    return size.predicted.ratio if isinstance(size.predicted, Prediction) else 0.0


def counted_bytes(blocks: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """Live bytes at the peak that the runs of a trial counted when they began; None where none did, or none is there to
    say so any more."""
    found: dict[str, int | None] = {"parent": None, "candidate": None}
    for name, side in (("parent", "A"), ("candidate", "B")):
        for block in blocks:
            if block["side"] != side or block["run"] is None or block["outcome"] != "finished":
                continue
            counted = counted_event(Path(block["run"]))
            if counted is not None:
                found[name] = int(counted["peak_bytes"])
                break
    return found


def memory_in_words(memory: Mapping[str, Any]) -> str:
    """What a step of the ladder says of memory, for a reader."""
    parts = []
    for word in ("predicted", "counted"):
        sides = [memory[f"{word}_bytes"][side] for side in ("parent", "candidate")]
        if any(one is not None for one in sides):
            old, new = ("unknown" if one is None else f"{one:,}" for one in sides)
            parts.append(f"{old} to {new} {word}")
    return (
        f"live bytes at the peak {', '.join(parts)}, of {memory['limit_bytes']:,}; recomputed: "
        f"{memory['recomputed'] or 'nothing'}"
    )
