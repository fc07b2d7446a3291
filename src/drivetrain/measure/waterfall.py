"""The waterfall: a window's 100 points of peak, split into MFU and everything that was lost.

For one rank with peak P and achievable matrix product A (FLOP/s of one device), window T, model FLOPs F of a
class and its time t:

* ``100 * F / (P * T)`` is MFU
* ``100 * F * (1/A - 1/P) / T`` is *peak not achievable*
* ``100 * (t - F/A) / T`` is the class's *shortfall*
* compute without model FLOPs: ``100 * t_roof / T`` is *memory-bound work*, where the bytes are known; the rest is
  its shortfall
* every other class is ``100 * t / T``

Added up, F cancels and the times add up to T: the bars are 100 points whatever F, P and A are. The arithmetic is
in fractions. Bars are printed in multiples of 2**-20 points, so that floats add up to exactly 100.0, in any order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from drivetrain.errors import DrivetrainError
from drivetrain.measure.flops import FLOPS_RULE
from drivetrain.measure.peaks import Peak

__all__ = ["FLOP_CLASSES", "Bar", "RankTime", "Waterfall", "WaterfallFlops", "waterfall"]

FLOP_CLASSES = ("compute.matmul", "compute.attention")
"""Classes that hold model FLOPs, unless the caller says otherwise."""

_GRID = 2**20
"""Bars are multiples of one point over this."""

_MOST_POINTS = 10**7
"""An MFU beyond this many points is no figure but a mistake, and its floats would no longer add up exactly."""

BarKind = Literal["mfu", "peak_not_achievable", "peak_and_shortfall", "memory_bound", "shortfall", "class"]


@dataclass(frozen=True)
class Bar:
    """One bar of a waterfall."""

    name: str
    """What a person reads: ``MFU``, ``shortfall of compute.matmul``, ``data.loader``."""
    kind: BarKind
    points: float
    """MFU points, or percent of time; a multiple of 2**-20. Below 0 only with a health finding."""
    class_name: str | None = None
    """The class of the account whose time it is; None where it is not one class."""


@dataclass(frozen=True)
class RankTime:
    """Times of one rank that a waterfall is made of, in ns."""

    rank: int
    window_ns: int
    classes: Mapping[str, int]
    """Class → ns; with `unexplained_ns` they add up to the window."""
    unexplained_ns: int = 0
    roof_ns: Mapping[str, int] | None = None
    """Class → least time of its work by bytes over measured bandwidth; None or absent: bytes unknown."""


@dataclass(frozen=True)
class WaterfallFlops:
    """What turns times into MFU points. FLOPs are model FLOPs of one device in one rank's window."""

    flops: Mapping[str, int | Fraction]
    """Class → model FLOPs. A class that takes no time hands its FLOPs to ``compute.matmul``."""
    peak: Peak
    achievable: Peak | None = None
    """Sustained matrix product; None: unknown, then the first two losses are one bar."""
    effective_share: float | None = None
    """Tokens that carry loss over all tokens; None: unknown."""
    flops_rule: str = FLOPS_RULE
    token_rule: str = "tokens processed, padding included"


@dataclass(frozen=True)
class Waterfall:
    """Bars that add up to exactly 100."""

    unit: Literal["mfu_points", "percent_of_time"]
    bars: tuple[Bar, ...]
    """In order of `measure.account.CLASSES`; bars of nothing are left out."""
    mfu: float | None
    """Points of the first bar; None without FLOPs or peak."""
    effective_mfu: float | None
    """MFU of tokens that carry loss; None where their share is unknown."""
    reason: str | None
    """Why there is no MFU, or why two losses are one bar; None: nothing to say."""
    problems: tuple[str, ...] = ()
    """What cannot be: a negative bar, an MFU above 100. Each is a health finding of the account."""
    peak_source: str | None = None
    achievable_source: str | None = None
    flops_rule: str | None = None
    token_rule: str | None = None
    window: str = ""
    """Which steps of which ranks, in words."""

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "unit": self.unit,
            "window": self.window,
            "mfu": self.mfu,
            "effective_mfu": self.effective_mfu,
            "reason": self.reason,
            "peak_source": self.peak_source,
            "achievable_source": self.achievable_source,
            "flops_rule": self.flops_rule,
            "token_rule": self.token_rule,
            "problems": list(self.problems),
            "bars": [
                {"name": bar.name, "kind": bar.kind, "class": bar.class_name, "points": bar.points}
                for bar in self.bars
            ],
        }


_Key = tuple[str, BarKind, str | None]


def waterfall(
    ranks: Sequence[RankTime],
    flops: WaterfallFlops | None = None,
    *,
    order: Sequence[str] = (),
    window: str = "",
    reason: str = "model FLOPs are unknown: classes in percent of time, no MFU",
) -> Waterfall:
    """Merge ranks (mean of their points) into one waterfall.

    Args:
        ranks: at least one, with a window above 0.
        flops: model FLOPs, peak and achievable rate; None: classes in percent of time only.
        order: order of the classes; those not in it follow.
        window: what the times are of, in words, carried along.
        reason: why there are no FLOPs.

    Raises:
        DrivetrainError: no rank, an empty window, or an achievable rate above the peak.
    """
    if not ranks or any(rank.window_ns <= 0 for rank in ranks):
        raise DrivetrainError("a waterfall needs at least one rank with a window longer than 0 ns")
    if flops is not None and flops.achievable is not None and flops.achievable.value > flops.peak.value:
        raise DrivetrainError(
            f"the achievable rate {flops.achievable.value:.4g} FLOP/s ({flops.achievable.source}) is above the peak "
            f"{flops.peak.value:.4g} ({flops.peak.source}); one of the two is of another device or dtype"
        )
    if flops is not None:
        mfu_points = 100 * max(_model_share(rank, flops) for rank in ranks)
        if mfu_points > _MOST_POINTS:
            beyond = f"MFU is {float(mfu_points):.3g}%: tokens per step, model or peak must be wrong"
            return replace(waterfall(ranks, order=order, window=window, reason=beyond), problems=(beyond,))
    merged: dict[_Key, Fraction] = {}
    for rank in ranks:
        for key, share in _shares(rank, flops).items():
            merged[key] = merged.get(key, Fraction(0)) + share / len(ranks)
    assert sum(merged.values()) == 1
    bars = _bars(_ordered(merged, order))
    if flops is None:
        return Waterfall("percent_of_time", bars, None, None, reason, window=window)
    mfu = next((bar.points for bar in bars if bar.kind == "mfu"), 0.0)
    one_bar = "the achievable rate is unknown: peak not achievable and shortfall are one bar"
    made = Waterfall(
        "mfu_points",
        bars,
        mfu,
        None if flops.effective_share is None else mfu * flops.effective_share,
        one_bar if flops.achievable is None else None,
        peak_source=flops.peak.source,
        achievable_source=None if flops.achievable is None else flops.achievable.source,
        flops_rule=flops.flops_rule,
        token_rule=flops.token_rule,
        window=window,
    )
    return replace(made, problems=_problems(made))


def _shares(rank: RankTime, flops: WaterfallFlops | None) -> dict[_Key, Fraction]:
    """Bars of one rank as shares of its window; they add up to exactly 1."""
    window = Fraction(rank.window_ns)
    held = {} if flops is None else _held_flops(rank, flops)
    shares: dict[_Key, Fraction] = {}
    for name, time in rank.classes.items():
        roof = (rank.roof_ns or {}).get(name)
        if name in held:
            continue
        if flops is not None and roof is not None:
            bound = min(roof, time)
            shares["memory-bound work", "memory_bound", None] = (
                shares.get(("memory-bound work", "memory_bound", None), Fraction(0)) + bound / window
            )
            shares[f"shortfall of {name}", "shortfall", name] = (time - bound) / window
        else:
            shares[name, "class", name] = time / window
    if rank.unexplained_ns:
        shares["unexplained", "class", "unexplained"] = rank.unexplained_ns / window
    if flops is not None:
        _add_flops(shares, rank, flops, held)
    return shares


def _held_flops(rank: RankTime, flops: WaterfallFlops) -> dict[str, Fraction]:
    """Class → FLOPs, each with a class that takes time: an attention made of plain products is matmul."""
    held: dict[str, Fraction] = {}
    for name, count in flops.flops.items():
        home = name if rank.classes.get(name) else FLOP_CLASSES[0]
        held[home] = held.get(home, Fraction(0)) + Fraction(count)
    return held


def _model_share(rank: RankTime, flops: WaterfallFlops) -> Fraction:
    """MFU of one rank, as a share."""
    whole = sum((Fraction(count) for count in flops.flops.values()), Fraction(0))
    return whole * 10**9 / (Fraction(flops.peak.value) * rank.window_ns)


def _add_flops(
    shares: dict[_Key, Fraction], rank: RankTime, flops: WaterfallFlops, held: Mapping[str, Fraction]
) -> None:
    """MFU and the losses of the classes that hold model FLOPs."""
    window = Fraction(rank.window_ns)
    peak = Fraction(flops.peak.value) / 10**9  # FLOPs a ns, exactly
    whole = sum(held.values(), Fraction(0))
    shares["MFU", "mfu", None] = _model_share(rank, flops)
    if flops.achievable is not None:
        achievable = Fraction(flops.achievable.value) / 10**9
        shares["peak not achievable", "peak_not_achievable", None] = (
            whole * (1 / achievable - 1 / peak) / window
        )
        for name, count in held.items():
            lost = rank.classes.get(name, 0) - count / achievable
            shares[f"shortfall of {name}", "shortfall", name] = lost / window
    else:
        time = sum(rank.classes.get(name, 0) for name in held)
        label = "peak not achievable and shortfall"
        shares[label, "peak_and_shortfall", None] = (time - whole / peak) / window


_KIND_ORDER: tuple[BarKind, ...] = ("mfu", "peak_not_achievable", "peak_and_shortfall", "memory_bound")


def _ordered(shares: Mapping[_Key, Fraction], order: Sequence[str]) -> list[tuple[_Key, Fraction]]:
    """MFU and what every rank has in common first, then the classes in their order."""
    places = {name: place for place, name in enumerate(order)}

    def place(item: tuple[_Key, Fraction]) -> tuple[int, int]:
        (_, kind, class_name), _ = item
        if kind in _KIND_ORDER:
            return (0, _KIND_ORDER.index(kind))
        return (1, places.get(class_name or "", len(places)))

    return sorted(((key, share) for key, share in shares.items() if share), key=place)


def _bars(shares: Sequence[tuple[_Key, Fraction]]) -> tuple[Bar, ...]:
    """Round to the grid by largest remainder, so that the bars still add up to exactly 100."""
    wanted = [share * 100 * _GRID for _, share in shares]
    units = [int(value // 1) for value in wanted]
    missing = 100 * _GRID - sum(units)
    assert 0 <= missing <= len(units)
    by_remainder = sorted(range(len(units)), key=lambda i: units[i] - wanted[i])
    for index in by_remainder[:missing]:
        units[index] += 1
    return tuple(
        Bar(name, kind, count / _GRID, class_name)
        for ((name, kind, class_name), _), count in zip(shares, units, strict=True)
    )


def _problems(made: Waterfall) -> tuple[str, ...]:
    found = [
        f"{bar.name} is {bar.points:.3f} points, below 0: fewer FLOPs, another peak or another class is the truth "
        "(check tokens per step, the model and the dtype of the peak)"
        for bar in made.bars
        if bar.points < 0
    ]
    if made.mfu is not None and made.mfu > 100:
        found.insert(0, f"MFU is {made.mfu:.1f}%, above 100: tokens per step, model or peak must be wrong")
    return tuple(found)
