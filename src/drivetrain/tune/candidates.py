"""What the ladder tries next: the entries that treat the largest class of the account, the cheapest first."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.archive.account_file import UNEXPLAINED, newest_account
from drivetrain.catalogue import Knob, LearningRateRule, Move, Numerics, Optimisation, Setting
from drivetrain.catalogue.rules import all_rules
from drivetrain.config import LaunchFacts, RunConfig, violations
from drivetrain.errors import ConfigurationError
from drivetrain.measure.account import Account, RankAccount, StepAccount, Window
from drivetrain.tune.gate import TIERS
from drivetrain.tune.moves import Change, changed

__all__ = ["Candidate", "Survey", "account_of", "illegal", "survey"]

LEAST_SHARE = 0.01
"""Classes below this share of the step are not treated: their whole time is less than the least effect."""


@dataclass(frozen=True)
class Candidate:
    """A move that the ladder may try.

    Attributes:
        entry: of the catalogue.
        treats: classes of the account that hold time now and that it treats, the largest first.
        change: what switches it on; None for a search of ``knob``, and for a move whose size is yet to be found.
        knob: what is searched.
        move: of several leaves, of which one size is tried.
    """

    entry: Optimisation
    treats: tuple[str, ...]
    change: Change | None
    knob: Knob | None = None
    move: Move | None = None

    @property
    def key(self) -> str:
        """What tells it from every other candidate."""
        if self.move is not None:
            return f"{self.entry.name}:{self.move.name}"
        return self.entry.name if self.knob is None else f"{self.entry.name}:{self.knob.field}"

    @property
    def numerics(self) -> Numerics:
        """The gate that it must pass."""
        return self.entry.numerics if self.move is None else self.move.numerics


@dataclass(frozen=True)
class Survey:
    """Candidates, the one to be tried next first, and why entries that treat something are none."""

    candidates: tuple[Candidate, ...]
    rejected: Mapping[str, str] = field(default_factory=dict)


def _treated(what: Optimisation | Move, classes: Mapping[str, float]) -> list[str]:
    return [
        name
        for name in classes
        if any(name == treat or name.startswith(f"{treat}.") for treat in what.treats)
    ]


def _cost(candidate: Candidate) -> tuple[int, int, bool, str]:
    """Cheapest first: the gate's tier (it takes most of the time), one trial before a search, what needs nothing of
    the machine before what does (a compiler takes its time)."""
    entry = candidate.entry
    return (
        TIERS.index(candidate.numerics),
        0 if candidate.knob is None else 1,
        entry.capability is not None,
        candidate.key,
    )


def survey(
    classes: Mapping[str, float],
    config: RunConfig,
    facts: LaunchFacts,
    *,
    entries: Iterable[Optimisation],
    tried: Collection[str] = (),
    batch_rule: LearningRateRule | None = None,
    missing: Callable[[str], str | None] = lambda _capability: None,
    active: Callable[[str], bool] = lambda _entry: True,
) -> Survey:
    """What can be tried of ``entries`` on ``config``, whose mean step has ``classes`` (ns).

    Args:
        tried: keys of candidates that had their turn.
        batch_rule: how the learning rate follows a larger global batch; None: none may be larger.
        missing: capability → None, or why this machine lacks it.
        active: whether an entry that is requested is in effect; knobs of others decide nothing.
    """
    whole = sum(classes.values())
    ordered = dict(sorted(classes.items(), key=lambda item: (-item[1], item[0])))
    ordered.pop(UNEXPLAINED, None)
    rejected: dict[str, str] = {}
    pool: list[Candidate] = []

    def share_of(treats: Iterable[str]) -> float:
        return sum(ordered[name] for name in treats) / whole if whole else 0.0

    for entry in entries:
        for move in entry.moves:
            treats = _treated(move, ordered)
            candidate = Candidate(entry, tuple(treats), None, move=move)
            if candidate.key in tried or share_of(treats) < LEAST_SHARE:
                continue
            why = move.refused(config, Setting(facts, batch_rule))
            if why is None:
                pool.append(candidate)
            else:
                rejected[candidate.key] = why
        treats = _treated(entry, ordered)
        share = share_of(treats)
        if share < LEAST_SHARE:
            if entry.name not in tried and not entry.requested(config):
                what = f"{share:.1%} of the step" if treats else "nothing in this account"
                rejected[entry.name] = f"it treats {what}"
            continue
        if entry.requested(config) and active(entry.name):
            pool += [
                Candidate(entry, tuple(treats), None, knob)
                for knob in entry.knobs
                if f"{entry.name}:{knob.field}" not in tried
            ]
        if entry.name in tried:
            continue
        change, why = _switch_on(entry, config, facts, missing)
        if change is not None:
            pool.append(Candidate(entry, tuple(treats), change))
        elif why is not None:
            rejected[entry.name] = why
    found: list[Candidate] = []
    for name in ordered:
        here = [one for one in pool if name in one.treats and one not in found]
        found += sorted(here, key=_cost)
    return Survey(tuple(found), rejected)


def _switch_on(
    entry: Optimisation,
    config: RunConfig,
    facts: LaunchFacts,
    missing: Callable[[str], str | None],
) -> tuple[Change | None, str | None]:
    """The change that switches ``entry`` on, or why there is none; (None, None) where it is on."""
    leaves = entry.on(config, facts)
    if leaves is None:
        return None, None if entry.requested(config) else entry.applies(config, facts)
    lacking = missing(entry.capability) if entry.capability is not None else None
    if lacking is not None:
        return None, f"this machine lacks {entry.capability}: {lacking}"
    change = Change(dict(leaves), entry.name)
    why = illegal(config, change, facts)
    if why is not None:
        return None, why
    return change, None


def illegal(config: RunConfig, change: Change, facts: LaunchFacts) -> str | None:
    """Why ``config`` after ``change`` may not be run; None where it may."""
    try:
        after = changed(config, change)
    except ConfigurationError as error:
        return str(error)
    broken = violations(after, facts, all_rules())
    return "; ".join(map(str, broken)) if broken else None


def account_of(run: Path) -> Account | None:
    """The account of the newest window of a run, as its file holds it: ranks, steps and classes; None: no account.

    Raises:
        RunError: the file is damaged.
    """
    entry = newest_account(run)
    if entry is None:
        return None
    ranks = tuple(
        RankAccount(
            rank=int(rank["rank"]),
            view="host",
            whole=Window(**rank["whole"]),
            steps=tuple(
                StepAccount(
                    step=int(step["step"]),
                    window=Window(**{key: value for key, value in step.items() if key != "step"}),
                    start_ns=0,
                    end_ns=int(step["window_ns"]),
                    first=number == 0,
                )
                for number, step in enumerate(rank["steps"])
            ),
        )
        for rank in entry["account"]["ranks"]
    )
    return Account((), ranks, name_table=str(entry.get("name_table") or ""))
