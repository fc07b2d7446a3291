"""The published run that is nearest to a job, and what is different about it.

``published.csv`` holds facts that others have published, each with its source. MFU of runs with a full configuration
was counted again from their times by our own rule; what the sources' cases state stays as it was stated, and says so.

Distance is a sum over what is known of the job: ``|ln(ours / theirs)|`` of parameters, half of it of devices and of the
sequence length, 1 for another device, ten times the difference of the shares of a step that communication and waiting
for data take; for states of a case also ten times that of MFU. What a row does not tell counts as 2: more than a factor
of seven in size.
"""

import csv
import functools
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from drivetrain.config import num_microbatches
from drivetrain.config.layout import layout_of, stage_plan
from drivetrain.config.stages import ZERO_BUBBLE
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.rules.pipeline_filling import bubble_share
from drivetrain.measure.parameters import parameter_count

__all__ = ["Difference", "Nearest", "PublishedRun", "nearest_published", "published_runs"]

_UNTOLD = 2.0
_WEIGHTS = {"parameters_b": 1.0, "devices": 0.5, "seq_length": 0.5}
_SHARES = ("communication_share", "data_share")
_SETTINGS = (
    "device",
    "devices",
    "parameters_b",
    "seq_length",
    "tp",
    "pp",
    "stages_per_rank",
    "dp",
    "zero_stage",
    "micro_batch_size",
    "global_batch_size",
    "recompute",
    "dtype",
)
_OF_BUBBLE = frozenset({"pp", "stages_per_rank", "dp", "micro_batch_size", "global_batch_size"})
_WORDS = frozenset({"device", "recompute", "dtype"})
_FRACTIONS = frozenset({"parameters_b", *_SHARES})


@dataclass(frozen=True)
class PublishedRun:
    """One row.

    Attributes:
        name: model and machine, or the case and its state.
        source: repository and file, paper and table, or the tag of a case.
        settings: of ``_SETTINGS``, those that are known. Parameters in 1e9.
        shares: of ``communication_share`` and ``data_share``, those that are known; 0 to 1.
        mfu: in percent; None where the row has none.
        mfu_rule: how it was counted.
        change: what made the row's state of the one before it, for rows of one case; empty for the first.
        case: tag that rows of one case share; empty elsewhere.
    """

    name: str
    source: str
    settings: dict[str, Any]
    shares: dict[str, float]
    mfu: float | None
    mfu_rule: str
    change: str
    case: str


@dataclass(frozen=True)
class Difference:
    """What is not the same.

    Attributes:
        what: setting or share.
        ours, theirs: values; None: unknown.
        mfu_points: of the gap, what it explains; None: nothing says how much.
        rule: how the points were computed; empty without.
    """

    what: str
    ours: Any
    theirs: Any
    mfu_points: float | None = None
    rule: str = ""

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "what": self.what,
            "ours": self.ours,
            "theirs": self.theirs,
            "mfu_points": self.mfu_points,
            "rule": self.rule or None,
        }


@dataclass(frozen=True)
class Nearest:
    """The nearest row, seen from a job.

    Attributes:
        run: the row.
        distance: see above.
        compared: what is known on both sides and went into the distance.
        mfu: ours in percent; None unknown.
        why_no_gap: why MFU cannot be compared; None: it can.
        differences: those that explain points first.
        comparable: whether it is nearer than a row that tells nothing would be, by two figures or more.
        then: the next state of the same case, which says what helped there; None where there is none.
    """

    run: PublishedRun
    distance: float
    compared: tuple[str, ...]
    mfu: float | None
    why_no_gap: str | None
    differences: tuple[Difference, ...]
    comparable: bool
    then: PublishedRun | None

    @property
    def gap(self) -> float | None:
        """MFU points that the row has more than we."""
        return None if self.why_no_gap is not None else (self.run.mfu or 0.0) - (self.mfu or 0.0)

    @property
    def explained(self) -> float:
        """MFU points that the differences account for, by their rules."""
        return sum(one.mfu_points or 0.0 for one in self.differences)

    def to_document(self) -> dict[str, Any]:
        """What ``nearest_published`` of ``diagnose --json`` holds."""
        return {
            "name": self.run.name,
            "source": self.run.source,
            "distance": self.distance,
            "comparable": self.comparable,
            "compared": list(self.compared),
            "settings": self.run.settings,
            "shares": self.run.shares,
            "mfu": self.run.mfu,
            "mfu_rule": self.run.mfu_rule or None,
            "mfu_ours": self.mfu,
            "gap_points": self.gap,
            "gap_reason": self.why_no_gap,
            "explained_points": self.explained,
            "differences": [one.to_document() for one in self.differences],
            "then": None
            if self.then is None
            else {"change": self.then.change, "mfu": self.then.mfu, "shares": self.then.shares},
        }


_NOTHING = PublishedRun("", "", {}, {}, None, "", "", "nothing")
"""A row that tells nothing."""


@functools.cache
def published_runs() -> tuple[PublishedRun, ...]:
    """All rows, in the order of the file."""
    text = (files("drivetrain.diagnose") / "published.csv").read_text(encoding="utf-8")
    return tuple(_row(row) for row in csv.DictReader(io.StringIO(text)))


def _row(row: dict[str, str]) -> PublishedRun:
    def value(name: str) -> Any:
        return row[name] if name in _WORDS else float(row[name]) if name in _FRACTIONS else int(row[name])

    return PublishedRun(
        name=row["name"],
        source=row["source"],
        settings={name: value(name) for name in _SETTINGS if row[name]},
        shares={name: float(row[name]) for name in _SHARES if row[name]},
        mfu=float(row["mfu_percent"]) if row["mfu_percent"] else None,
        mfu_rule=row["mfu_rule"],
        change=row["change"],
        case=row["tag"],
    )


def nearest_published(facts: Facts) -> Nearest:
    """The row with the least distance; of equal ones the first."""
    settings, shares = _settings(facts), _shares(facts)
    rows = published_runs()
    drawn = facts.account.waterfall
    mfu = None if drawn is None else drawn.mfu
    position = min(range(len(rows)), key=lambda index: _distance(settings, shares, mfu, rows[index])[0])
    run = rows[position]
    distance, compared = _distance(settings, shares, mfu, run)
    why = None
    if mfu is None:
        why = facts.no_points.get("points", "this job has no MFU")
    elif run.mfu is None:
        why = "the row states no MFU"
    following = rows[position + 1] if position + 1 < len(rows) else None
    return Nearest(
        run=run,
        distance=distance,
        compared=compared,
        mfu=mfu,
        why_no_gap=why,
        differences=tuple(_differences(settings, shares, run)),
        comparable=len(compared) > 1 and distance < _distance(settings, shares, mfu, _NOTHING)[0],
        then=following if following is not None and run.case and following.case == run.case else None,
    )


def _settings(facts: Facts) -> dict[str, Any]:
    """Of the job, under the names of the table; what is unknown is absent."""
    found: dict[str, Any] = {}
    if facts.device is not None:
        found["device"] = facts.device
    config, launch = facts.config, facts.launch
    if config is None or launch is None:
        found["devices"] = facts.account.world_size or len(facts.account.ranks)
        return found
    layout = layout_of(config, launch.world_size)
    granularity = config.memory.recompute_granularity
    stages = stage_plan(config).num_stages // layout.pp
    if config.parallelism.pipeline_schedule not in ZERO_BUBBLE or layout.pp == 1:
        found["bubble"] = bubble_share(layout.pp, num_microbatches(config, launch.world_size), stages)
    return found | {
        "devices": launch.world_size,
        "parameters_b": parameter_count(config.model).total / 1e9,
        "seq_length": config.model.seq_length,
        "tp": layout.tp,
        "pp": layout.pp,
        "stages_per_rank": stages,
        "dp": layout.dp,
        "zero_stage": config.parallelism.zero_stage,
        "micro_batch_size": config.training.micro_batch_size,
        "global_batch_size": config.training.global_batch_size,
        "recompute": granularity,
        "dtype": config.precision.params_dtype,
    }


def _shares(facts: Facts) -> dict[str, float]:
    return {
        "communication_share": facts.share_of(facts.group_ns("communication")),
        "data_share": facts.share_of(facts.group_ns("data")),
    }


def _distance(
    settings: dict[str, Any], shares: dict[str, float], mfu: float | None, run: PublishedRun
) -> tuple[float, tuple[str, ...]]:
    far: float = 0.0
    compared: list[str] = []
    if run.case and mfu is not None:
        # A case is met in one of its states. Of a whole run the difference in MFU is what is asked for.
        far += _UNTOLD if run.mfu is None else 10 * abs(mfu - run.mfu) / 100
        compared += [] if run.mfu is None else ["mfu"]
    for name, weight in _WEIGHTS.items():
        if name in settings and name in run.settings:
            far += weight * abs(math.log(settings[name] / run.settings[name]))
            compared.append(name)
        elif name in settings:
            far += _UNTOLD
    if "device" in settings:
        told = "device" in run.settings
        far += float(settings["device"] != run.settings["device"]) if told else _UNTOLD
        compared += ["device"] if told else []
    for name, share in shares.items():
        if name in run.shares:
            far += 10 * abs(share - run.shares[name])
            compared.append(name)
        else:
            far += _UNTOLD
    return far, tuple(compared)


def _differences(
    settings: dict[str, Any], shares: dict[str, float], run: PublishedRun
) -> Iterator[Difference]:
    told: list[Difference] = []
    for name, share in shares.items():
        if name in run.shares:
            points = 100 * (share - run.shares[name])
            told.append(
                Difference(name, share, run.shares[name], points, "difference of the shares of a step")
            )
    theirs = run.settings
    # A row whose schedule halves backward, or is unknown, tells no stages a rank.
    if "bubble" in settings and theirs.keys() >= _OF_BUBBLE:
        count = max(1, theirs["global_batch_size"] // (theirs["micro_batch_size"] * theirs["dp"]))
        bubble = bubble_share(theirs["pp"], count, theirs["stages_per_rank"])
        if bubble != settings["bubble"]:
            points = 100 * (settings["bubble"] - bubble)
            told.append(
                Difference(
                    "bubble", settings["bubble"], bubble, points, "(p - 1)/(v m + p - 1) on both sides"
                )
            )
    yield from sorted(told, key=lambda one: -abs(one.mfu_points or 0.0))
    for name in _SETTINGS:
        if name in settings and name in theirs and settings[name] != theirs[name]:
            yield Difference(name, settings[name], theirs[name])
