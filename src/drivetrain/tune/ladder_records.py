"""What a ladder knows and shows: profiled configurations, steps, what was kept, and the texts and sums made of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.archive.account_file import MeanStep, mean_step_of
from drivetrain.archive.reader import open_run
from drivetrain.catalogue import Move, Numerics, Optimisation
from drivetrain.config import RunConfig, leaf_values, to_toml, tokens_per_step
from drivetrain.errors import RunError
from drivetrain.measure.optimisation import OptimisationRecord
from drivetrain.tune.moves import Change
from drivetrain.tune.profile_state import ProfileState
from drivetrain.tune.short_run import as_override
from drivetrain.tune.trial import why_without_effect

__all__ = [
    "BASELINE_FILE",
    "FINAL_FILE",
    "Kept",
    "Profile",
    "Rung",
    "View",
    "empty_step",
    "fill",
    "final_toml",
    "in_words",
    "mean_step_seconds",
    "plain_steps_of",
    "profiled",
    "saved",
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
        mean_plain_step_s: mean of that run's steps without the profiler, in seconds; None where there were none.
        plain_steps: how many those were.
    """

    run: str
    step_s: float
    tokens_per_second: float
    classes: Mapping[str, float]
    overhead: float | None
    steps_s: float
    inactive: Mapping[str, str]
    mean_plain_step_s: float | None = None
    plain_steps: int | None = None

    @property
    def plain_s(self) -> dict[str, float]:
        """Seconds a step of each class, without what the profiler added."""
        return {name: ns / 1e9 / (self.overhead or 1.0) for name, ns in self.classes.items()}

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
        entry: whose move it was.
        parent: the configuration it was measured against.
        searched: it is the best value of a knob's search, not an entry switched on.
        move: of the entry, where it is one of several leaves.
    """

    step: dict[str, Any]
    change: Change
    takes_back: Change
    entry: Optimisation
    parent: Path
    searched: bool
    move: Move | None = None

    @property
    def numerics(self) -> Numerics:
        """The gate that it had to pass."""
        return self.entry.numerics if self.move is None else self.move.numerics

    @property
    def summary(self) -> str:
        """What it does, in one line."""
        return self.entry.summary if self.move is None else self.move.summary


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


def mean_step_seconds(trial: Mapping[str, Any], side: str) -> float:
    """Mean over all measured steps of a side's blocks, in seconds: what a step of a long run costs."""
    blocks = [block for block in trial["blocks"] if block["side"] == side]
    total = math.fsum(block["mean_step_s"] * block["steps"] for block in blocks)
    return total / math.fsum(block["steps"] for block in blocks)


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
        **_plain_steps(document.get("overhead") or {}),
    }


def plain_steps_of(run: Path) -> dict[str, Any]:
    """``mean_plain_step_s`` and ``plain_steps`` of a profile's run, by its own events.

    For results that were kept before these two were among them. Both are None where the run does not say: it is gone,
    or damaged.
    """
    try:
        events = [one for one in open_run(run).events() if one.get("what") == "profile_overhead"]
    except RunError:
        events = []
    return _plain_steps(events[-1] if events else {})


def _plain_steps(calibration: Mapping[str, Any]) -> dict[str, Any]:
    mean, number = calibration.get("mean_step_s_plain"), calibration.get("num_plain")
    return {
        "mean_plain_step_s": None if mean is None else float(mean),
        "plain_steps": None if number is None else int(number),
    }


def _overhead(mean: MeanStep, calibration: Mapping[str, Any]) -> float | None:
    """Mean profiled step, as the account has it, over the mean of the same run's steps without the profiler."""
    plain_s = calibration.get("mean_step_s_plain")
    return mean.window_ns / 1e9 / float(plain_s) if plain_s else None


def saved(
    baseline: Profile,
    final: Profile,
    *,
    parent_step_s: float,
    final_step_s: float,
    steps: int,
    world_size: int,
    final_share: float = 1.0,
    states: Sequence[ProfileState],
    withheld: str | None,
) -> dict[str, Any]:
    """What the kept changes save: measured in the final trial, and by the time that went from the account's classes.

    The account's sum is over all classes of all kept changes, whose accounts follow each other: what one class won and
    another lost by it is in the sum. ``deviation`` is its relative distance from the measured seconds.

    Args:
        baseline, final: profiles.
        parent_step_s, final_step_s: mean steps of the baseline and of the final configuration in the same trial. They
            are means, as the account's classes are: a median leaves out what few slow steps cost.
        steps: of the whole run.
        world_size: devices.
        final_share: tokens of a step of the baseline over those of a step of the final configuration, whose seconds
            count by that share: a step of a larger batch does the work of several.
        states: of the two profiles, the baseline's first.
        withheld: why the account says nothing of what was saved; None: it does.
    """
    measured = parent_step_s - final_step_s * final_share
    by_account: dict[str, Any] = dict.fromkeys(
        ("account_seconds_per_step", "account_chance_seconds", "deviation", "classes")
    )
    if withheld is None:
        before = baseline.plain_s
        after = {name: seconds * final_share for name, seconds in final.plain_s.items()}
        classes = {
            name: before.get(name, 0.0) - after.get(name, 0.0) for name in dict.fromkeys([*before, *after])
        }
        seconds = math.fsum(classes.values())
        by_account = {
            "account_seconds_per_step": seconds,
            "account_chance_seconds": _chance_seconds(states, (1.0, final_share)),
            "deviation": seconds / measured - 1 if measured else None,
            "classes": {name: value for name, value in classes.items() if value},
        }
    return {
        "seconds_per_step": measured,
        **by_account,
        "device_hours_per_run": measured * steps * world_size / 3600,
        "device_hours_per_million_steps": measured * 1e6 * world_size / 3600,
        "rule": _SAVED_RULE if final_share == 1.0 else f"{_SAVED_RULE}; {_as_many_tokens(final_share)}",
        "withheld": withheld,
    }


_SAVED_RULE = (
    "seconds_per_step: baseline less final, means over the steps of their blocks; account: every class of the mean "
    "profiled step, baseline less final, each over the mean profiled step by the mean step of the same run without "
    "the profiler; withheld where those steps lie outside the prediction interval of the trial's blocks; chance: half "
    "widths of both intervals, as the root of the sum of their squares"
)


def _as_many_tokens(final_share: float) -> str:
    return f"of a final step {final_share:.4g}, which is as many tokens as a step of the baseline"


def _chance_seconds(states: Sequence[ProfileState], shares: Sequence[float]) -> float:
    """How far two profiles of the trial's machine may move the account's sum, in seconds.

    Args:
        shares: by which the steps of each count in that sum.
    """
    return math.hypot(
        *(
            share * (state.expected.high_s - state.expected.low_s) / 2
            for state, share in zip(states, shares, strict=True)
            if state.expected is not None
        )
    )


def final_toml(final: RunConfig, kept: Sequence[Kept]) -> str:
    """The final configuration as TOML, with a comment on each change above its leaf."""
    notes: dict[str, list[str]] = {}
    for one in kept:
        step, measured, gate = one.step, one.step["measured"], one.step["gate"]
        for leaf in one.change.leaves:
            was = as_override(leaf, one.takes_back.leaves[leaf]).partition("=")[2]
            notes.setdefault(leaf, []).append(
                f"was {was}: {one.summary}; treats {', '.join(step['treats'])}; {measured['ratio']:.3f}x "
                f"[{measured['low']:.3f}, {measured['high']:.3f}] the speed of its parent; gate {gate['tier']}: "
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
