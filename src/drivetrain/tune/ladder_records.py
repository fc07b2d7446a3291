"""What a ladder knows and shows: profiled configurations, steps, what was kept, and the texts made of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from drivetrain.archive.account_file import MeanStep, mean_step_of
from drivetrain.archive.reader import open_run
from drivetrain.catalogue import Move, Numerics, Optimisation
from drivetrain.config import RunConfig, leaf_values, to_toml, tokens_per_step
from drivetrain.measure.optimisation import OptimisationRecord
from drivetrain.tune.block_window import BlockWindow
from drivetrain.tune.moves import Change
from drivetrain.tune.short_run import as_override
from drivetrain.tune.trial import why_without_effect

__all__ = [
    "BASELINE_FILE",
    "FINAL_FILE",
    "Kept",
    "Profile",
    "Rung",
    "View",
    "account_of_side",
    "empty_step",
    "fill",
    "final_toml",
    "in_words",
    "profiled",
    "step_seconds",
    "value_of",
]

BASELINE_FILE = "configs/000.toml"
FINAL_FILE = "configs/final.toml"


@dataclass(frozen=True)
class Profile:
    """A profiled configuration.

    Attributes:
        run: of the profile.
        step_s: median step without the profiler.
        tokens_per_second: tokens of a step over ``step_s``.
        classes: ns of the mean profiled step, by class.
        overhead: mean profiled over mean plain step time of that run, as the classes are means too; None where it could
            not be measured.
        steps_s: all steps of that run together, in seconds.
        inactive: requested entries that were not put into effect, or that the profiled steps refute, with the reason.
    """

    run: str
    step_s: float
    tokens_per_second: float
    classes: Mapping[str, float]
    overhead: float | None
    steps_s: float
    inactive: Mapping[str, str]

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Profile":
        """What :func:`profiled` made; other keys are of another version, and of no use here."""
        return cls(**{one.name: document[one.name] for one in fields(cls)})

    def to_document(self, config: str) -> dict[str, Any]:
        """As ``tune.json`` shows it."""
        return {
            "run": self.run,
            "config": config,
            "step_s": self.step_s,
            "tokens_per_second": self.tokens_per_second,
            "classes": dict(self.classes),
            "overhead": self.overhead,
        }


@dataclass(frozen=True)
class Rung:
    """A configuration of the ladder: where it is written, what it is, how it was profiled."""

    file: Path
    config: RunConfig
    profile: Profile


@dataclass(eq=False)
class Kept:
    """A change that is part of the configuration.

    Attributes:
        step: what the document shows of it.
        change: what was changed.
        takes_back: what puts the former values back.
        entry: whose move it was; None for a layout.
        parent: the configuration it was measured against.
        searched: it is the best value of a knob's search, not an entry switched on.
        move: of the entry, where it is one of several leaves.
        numerics: the gate that it had to pass.
        summary: what it does, in one line.
    """

    step: dict[str, Any]
    change: Change
    takes_back: Change
    entry: Optimisation | None
    parent: Path
    searched: bool
    numerics: Numerics
    summary: str
    move: Move | None = None

    @property
    def name(self) -> str | None:
        """Of its entry; None for a layout."""
        return None if self.entry is None else self.entry.name


@dataclass
class View:
    """What the document of the tune shows, in the order in which it came to be."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    leave_one_out: list[dict[str, Any]] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    baseline: dict[str, Any] | None = None
    final: dict[str, Any] | None = None
    final_gate: dict[str, Any] | None = None
    final_trial: dict[str, Any] | None = None
    speed_up: dict[str, Any] | None = None
    goal: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    saved: dict[str, Any] | None = None


def empty_step(index: int, entry: str | None, change: Change, treats: Sequence[str]) -> dict[str, Any]:
    """A step of which nothing is measured yet."""
    return {
        "index": index,
        "entry": entry,
        "move": None,
        "change": dict(change.leaves),
        "treats": list(treats),
        "predicted": None,
        "measured": None,
        "speed": None,
        "figures": None,
        "outcome": None,
        "least_effect": None,
        "memory_bytes": None,
        "memory": None,
        "blocks": [],
        "gate": None,
        "kept": False,
        "why": "",
        "classes_before": None,
        "classes_after": None,
        "device_seconds": 0.0,
    }


def fill(step: dict[str, Any], trial: Mapping[str, Any]) -> None:
    """Lay the result of its trial over a step."""
    for key in ("measured", "outcome", "least_effect", "memory_bytes", "blocks", "why"):
        step[key] = trial[key]
    for key in ("speed", "figures"):
        step[key] = trial.get(key)


def in_words(change: Change) -> str:
    """A change as it is written on the command line."""
    return " ".join(as_override(leaf, value) for leaf, value in change.leaves.items())


def value_of(config: RunConfig, leaf: str) -> Any:
    """Value of a leaf by its dotted path."""
    return next(value for one, value in leaf_values(config) if one.path == leaf)


def step_seconds(trial: Mapping[str, Any], side: str) -> float:
    """Geometric mean of the medians of a side's blocks, in seconds."""
    times = [block["step_s"] for block in trial["blocks"] if block["side"] == side]
    return math.exp(math.fsum(math.log(one) for one in times) / len(times))


def account_of_side(trial: Mapping[str, Any], side: str, config: str, tokens: int) -> dict[str, Any] | None:
    """As :meth:`Profile.to_document`, of the window of a side's middle block by its mean step; None without windows.

    Args:
        config: the side's file in the tune's folder.
        tokens: of its step.
    """
    blocks = [block for block in trial["blocks"] if block["side"] == side and block.get("window") is not None]
    if not blocks:
        return None
    block = sorted(blocks, key=lambda one: float(one["mean_step_s"]))[(len(blocks) - 1) // 2]
    window, step_s = BlockWindow.from_document(block["window"]), step_seconds(trial, side)
    return {
        "run": block["run"],
        "config": config,
        "step_s": step_s,
        "tokens_per_second": tokens / step_s,
        "classes": dict(window.classes),
        "overhead": window.overhead,
    }


def profiled(run: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """What the ladder needs of the document of ``drivetrain profile``: fields of :class:`Profile` and ``outcome``."""
    training = document.get("training") or {}
    mean = mean_step_of(run)
    step_s = (training.get("step_time_s") or {}).get("p50")
    if mean is None or step_s is None:
        what = "no account of a step" if mean is None else "no step without the profiler"
        return {"outcome": "crash", "message": f"{what} in the profile {run}"}
    records = [OptimisationRecord.from_document(one) for one in training.get("optimisations") or ()]
    return {
        "outcome": "finished",
        "run": str(run),
        "step_s": step_s,
        "tokens_per_second": tokens_per_step(open_run(run).config()) / step_s,
        "classes": dict(mean.classes),
        "overhead": _overhead(mean, document.get("overhead") or {}),
        "steps_s": float((training.get("wall") or {}).get("steps_s") or 0.0),
        "inactive": {one.name: why_without_effect(one) for one in records if one.without_effect},
    }


def _overhead(mean: MeanStep, calibration: Mapping[str, Any]) -> float | None:
    """Mean profiled step, as the account has it, over the mean of the same run's steps without the profiler."""
    plain_s = calibration.get("mean_step_s_plain")
    return mean.window_ns / 1e9 / float(plain_s) if plain_s else None


def final_toml(final: RunConfig, kept: Sequence[Kept], score: str = "the speed") -> str:
    """The final configuration as TOML, with a comment on each change above its leaf.

    Args:
        score: what measured ratios are of.
    """
    notes: dict[str, list[str]] = {}
    for one in kept:
        step, measured, gate = one.step, one.step["measured"], one.step["gate"]
        for leaf in one.change.leaves:
            was = as_override(leaf, one.takes_back.leaves[leaf]).partition("=")[2]
            notes.setdefault(leaf, []).append(
                f"was {was}: {one.summary}; treats {', '.join(step['treats'])}; {measured['ratio']:.3f}x "
                f"[{measured['low']:.3f}, {measured['high']:.3f}] {score} of its parent; gate {gate['tier']}: "
                f"{gate['verdict']}"
            )
    lines, section = [], ""
    for line in to_toml(final).splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        name = line.removeprefix("# ").partition(" = ")[0]
        lines += [f"# {note}" for note in notes.get(f"{section}.{name}", ())]
        lines.append(line)
    return "\n".join(lines) + "\n"
