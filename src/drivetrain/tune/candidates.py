"""What the ladder tries next: the entries that treat the largest class of the account, the cheapest first."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from drivetrain.archive.account_file import UNEXPLAINED, newest_account
from drivetrain.catalogue import Knob, LearningRateRule, Move, Numerics, Optimisation, Setting
from drivetrain.catalogue.rules import all_rules
from drivetrain.config import LaunchFacts, RunConfig, violations
from drivetrain.errors import ConfigurationError
from drivetrain.measure.account import Account, RankAccount, StepAccount, Window
from drivetrain.tune.gate import TIERS
from drivetrain.tune.layouts import LayoutProposal
from drivetrain.tune.moves import Change, changed

__all__ = ["Candidate", "Survey", "account_of", "illegal", "survey"]

LEAST_SHARE = 0.01
"""Classes below this share of the step are not treated: their whole time is less than the least effect."""


@dataclass(frozen=True)
class Candidate:
    """A move that the ladder may try.

    Attributes:
        entry: of the catalogue; None for a layout, which is no optimisation.
        treats: classes of the account that hold time now and that it treats, the largest first; categories of memory
            where memory is the goal.
        change: what switches it on; None for a search of ``knob``, and for a move whose size is yet to be found.
        knob: what is searched.
        partner: the knob that is searched together with ``knob``, and its entry.
        move: of several leaves, of which one size is tried.
        layout: of the processes.
    """

    entry: Optimisation | None
    treats: tuple[str, ...]
    change: Change | None
    knob: Knob | None = None
    partner: tuple[Optimisation, Knob] | None = None
    move: Move | None = None
    layout: LayoutProposal | None = None

    def __post_init__(self) -> None:
        assert (self.entry is None) == (self.layout is not None)
        assert self.partner is None or self.knob is not None

    @property
    def name(self) -> str | None:
        """Of its entry."""
        return None if self.entry is None else self.entry.name

    @property
    def key(self) -> str:
        """What tells it from every other candidate."""
        return self.keys[0]

    @property
    def keys(self) -> tuple[str, ...]:
        """Its own key, and those of what has had its turn with it."""
        if self.layout is not None:
            return (f"layout:{self.layout.name}",)
        assert self.entry is not None
        if self.move is not None:
            return (f"{self.entry.name}:{self.move.name}",)
        if self.knob is None:
            return (self.entry.name,)
        own = _knob_key(self.entry, self.knob)
        if self.partner is None:
            return (own,)
        other = _knob_key(*self.partner)
        return (f"{own} with {other}", own, other)

    @property
    def alone(self) -> "tuple[Candidate, ...]":
        """The two searches, one after the other, that a search of two knobs together stands for."""
        assert self.partner is not None
        entry, knob = self.partner
        return replace(self, partner=None), replace(self, entry=entry, knob=knob, partner=None)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the entries that have to be in effect."""
        owners = [self.entry, None if self.partner is None else self.partner[0]]
        return tuple(dict.fromkeys(one.name for one in owners if one is not None))

    @property
    def move_name(self) -> str | None:
        """Of several leaves."""
        if self.layout is not None:
            return "layout"
        return None if self.move is None else self.move.name

    def must_be_active(self, config: RunConfig) -> str | None:
        """The entry whose record has to say in a trial of ``config`` that it is in effect; None: none has to."""
        # A larger batch alone asks nothing of the entry whose move it is, nor does a knob's first value.
        if self.entry is None or not self.entry.requested(config):
            return None
        return self.entry.name

    @property
    def summary(self) -> str:
        """What it does, in one line."""
        if self.layout is not None:
            return self.layout.summary
        assert self.entry is not None
        return self.entry.summary if self.move is None else self.move.summary

    @property
    def numerics(self) -> Numerics:
        """The gate that it must pass."""
        if self.layout is not None:
            return self.layout.numerics
        assert self.entry is not None
        if self.move is not None:
            return self.move.numerics
        owners = [self.entry] if self.partner is None else [self.entry, self.partner[0]]
        return max((one.numerics for one in owners), key=TIERS.index)


def _knob_key(entry: Optimisation, knob: Knob) -> str:
    return f"{entry.name}:{knob.field}"


@dataclass(frozen=True)
class Survey:
    """Candidates, the one to be tried next first, and why entries that treat something are none."""

    candidates: tuple[Candidate, ...]
    rejected: Mapping[str, str] = field(default_factory=dict)


def _cost(candidate: Candidate) -> tuple[int, int, bool, float, str]:
    """Cheapest first: the gate's tier (it takes most of the time), one trial before a search, what needs nothing of
    the machine before what does (a compiler takes its time); layouts in the order in which they are proposed."""
    entry, layout = candidate.entry, candidate.layout
    return (
        TIERS.index(candidate.numerics),
        0 if candidate.knob is None else 1,
        entry is not None and entry.capability is not None,
        0 if layout is None else layout.place,
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
    of_memory: bool = False,
    layouts: Iterable[LayoutProposal] = (),
) -> Survey:
    """What can be tried of ``entries`` and ``layouts`` on ``config``, whose mean step has ``classes`` (ns).

    Args:
        tried: keys of candidates that had their turn.
        batch_rule: how the learning rate follows a larger global batch; None: none may be larger.
        missing: capability → None, or why this machine lacks it.
        active: whether an entry that is requested is in effect; knobs of others decide nothing.
        of_memory: ``classes`` are bytes by category of memory, and what relieves them is sought. Moves that fill memory
            are then none.
    """
    weights = _Weights.of(classes, of_memory=of_memory)
    rejected: dict[str, str] = {}
    pool: list[Candidate] = []

    def offer(candidate: Candidate, why: str | None) -> None:
        if candidate.key in tried or not weights.is_enough(candidate.treats):
            return
        if why is None:
            pool.append(candidate)
        else:
            rejected[candidate.key] = why

    for entry in entries:
        for move in () if of_memory else entry.moves:
            candidate = Candidate(entry, weights.treated(move.treats), None, move=move)
            offer(candidate, move.refused(config, Setting(facts, batch_rule)))
        requested = entry.requested(config)
        for knob in entry.knobs if requested and active(entry.name) else ():
            treats = weights.treated(_treats_of(entry, knob, of_memory))
            offer(Candidate(entry, treats, None, knob), knob.refused(config, facts))
        treats = weights.treated(entry.relieves if of_memory else entry.treats)
        if entry.name in tried:
            continue
        if not weights.is_enough(treats):
            if not requested and (treats or not of_memory):
                rejected[entry.name] = f"it treats {weights.in_words(treats)}"
            continue
        change, why = _switch_on(entry, config, facts, missing)
        if change is not None:
            pool.append(Candidate(entry, treats, change))
        elif why is not None:
            rejected[entry.name] = why
    for layout in layouts:
        treats = weights.treated(layout.relieves if of_memory else layout.treats)
        offer(Candidate(None, treats, Change(layout.leaves, "layout"), layout=layout), None)
    pool = _together(pool)
    found: list[Candidate] = []
    for name in weights.ordered:
        here = [one for one in pool if name in one.treats and one not in found]
        found += sorted(here, key=_cost)
    return Survey(tuple(found), rejected)


@dataclass(frozen=True)
class _Weights:
    """Classes of a step, or categories of its memory, the largest first, of a ``whole``."""

    ordered: Mapping[str, float]
    whole: float
    of_memory: bool

    @classmethod
    def of(cls, classes: Mapping[str, float], *, of_memory: bool) -> "_Weights":
        ordered = dict(sorted(classes.items(), key=lambda item: (-item[1], item[0])))
        ordered.pop(UNEXPLAINED, None)
        return cls(ordered, sum(classes.values()), of_memory)

    def treated(self, treats: Collection[str]) -> tuple[str, ...]:
        """Those that ``treats`` names, or that lie in a group it names."""
        return tuple(
            name
            for name in self.ordered
            if any(name == treat or name.startswith(f"{treat}.") for treat in treats)
        )

    def _share(self, names: Iterable[str]) -> float:
        return sum(self.ordered[name] for name in names) / self.whole if self.whole else 0.0

    def is_enough(self, names: Collection[str]) -> bool:
        return bool(names) and self._share(names) >= LEAST_SHARE

    def in_words(self, names: Collection[str]) -> str:
        """How little they are."""
        if not names:
            return "nothing in this account"
        return f"{self._share(names):.1%} of the {'bytes' if self.of_memory else 'step'}"


def _treats_of(entry: Optimisation, knob: Knob, of_memory: bool) -> Collection[str]:
    if not of_memory:
        return entry.treats if knob.treats is None else knob.treats
    return ("activations", "temporaries") if knob.moves_memory else ()


def _together(pool: Sequence[Candidate]) -> list[Candidate]:
    """Searches of knobs of which one declares that it interacts with the other, as one search."""
    searches = {one.knob.field: one for one in pool if one.knob is not None}
    paired: dict[str, Candidate] = {}
    gone: set[str] = set()
    for one in searches.values():
        assert one.entry is not None
        for first, second in one.entry.interacts_with:
            here, there = searches.get(first), searches.get(second)
            if here is None or there is None or here.knob is not one.knob or {first, second} & gone:
                continue
            assert there.entry is not None
            assert there.knob is not None
            treats = tuple(dict.fromkeys((*here.treats, *there.treats)))
            paired[first] = replace(here, treats=treats, partner=(there.entry, there.knob))
            gone |= {first, second}
    kept = [paired.get(one.knob.field, one) if one.knob is not None else one for one in pool]
    return [one for one in kept if one.knob is None or one.partner is not None or one.knob.field not in gone]


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
