"""From what an allocator recorded to live bytes by category: arithmetic on plain records, without torch.

A block is known by its address from the moment it is allocated until it is freed. What it is for shows in marks that
the run left between its operators (this address is a gradient), in what was held before the step (parameters, the
optimizer's state), and in when it lives: what forward allocates and a backward pass finds is an activation.

Nothing here is used to predict: that is ``engine/memory/predict.py``.
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from drivetrain.measure.memory import CATEGORIES, MemoryByCategory, timeline_of

__all__ = [
    "Allocation",
    "HeldBlock",
    "Mark",
    "Message",
    "Recorded",
    "Span",
    "memory_of_step",
]

_COMPUTING: Final = ("forward", "pipeline")
"""Spans of the step in which forward passes run."""
_NS_IN_MS: Final = 1e6


@dataclass(frozen=True)
class Allocation:
    """A block was allocated (``nbytes`` above 0) or freed (below)."""

    time_ns: int
    address: int
    nbytes: int


@dataclass(frozen=True)
class Mark:
    """The run said of the block at ``address`` what it is (``gradient``), or which layer begins (``layer``)."""

    time_ns: int
    what: str
    name: str = ""
    address: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Span:
    """A stretch of time: a part of the step (``forward``, ``backward`` ...), or one node of a backward pass."""

    begin_ns: int
    end_ns: int
    name: str


@dataclass(frozen=True)
class Message:
    """A collective was handed a tensor of this size; ``is_sum``: to be summed over the ranks in its place."""

    time_ns: int
    nbytes: int
    is_sum: bool = False


@dataclass(frozen=True)
class HeldBlock:
    """What was there before anything was recorded, and whose it is."""

    category: str
    address: int
    nbytes: int


@dataclass(frozen=True)
class Recorded:
    """All that is known of some steps of one rank.

    Attributes:
        phases: parts of the steps, which do not overlap.
        nodes: of backward passes; they may nest.
        steps: (number, span) of each whole step, in order.
    """

    rank: int
    world_size: int
    allocations: Sequence[Allocation]
    marks: Sequence[Mark]
    phases: Sequence[Span]
    nodes: Sequence[Span]
    messages: Sequence[Message]
    held: Sequence[HeldBlock]
    steps: Sequence[tuple[int, Span]]


@dataclass(eq=False)
class _Block:
    """A block from its allocation to its end; ``begin_ns`` of None: from before, ``end_ns`` of None: to beyond."""

    address: int
    nbytes: int
    begin_ns: int | None
    end_ns: int | None = None
    was_freed: bool = False
    known: set[str] = field(default_factory=set)
    layer: str = ""

    def lives_at(self, time_ns: int) -> bool:
        return (self.begin_ns is None or self.begin_ns <= time_ns) and (
            self.end_ns is None or time_ns < self.end_ns
        )

    @property
    def category(self) -> str:
        return next((name for name in CATEGORIES if name in self.known), "temporaries")


class _Blocks:
    """All blocks, by address and time."""

    def __init__(self, recorded: Recorded) -> None:
        self.all: list[_Block] = []
        self._by_address: dict[int, list[_Block]] = {}
        live: dict[int, _Block] = {}
        for held in recorded.held:
            block = live.get(held.address) or self._new(held.address, held.nbytes, None)
            block.known.add(held.category)
            live[held.address] = block
        for one in sorted(recorded.allocations, key=lambda each: each.time_ns):
            # What another thread freed left no record: its place being taken tells.
            former = live.pop(one.address, None)
            if former is not None:
                former.end_ns = one.time_ns
                former.was_freed = one.nbytes < 0
            if one.nbytes > 0:
                live[one.address] = self._new(one.address, one.nbytes, one.time_ns)

    def _new(self, address: int, nbytes: int, begin_ns: int | None) -> _Block:
        block = _Block(address, nbytes, begin_ns)
        self.all.append(block)
        self._by_address.setdefault(address, []).append(block)
        return block

    def at(self, address: int, time_ns: int) -> _Block | None:
        """The block that is there then."""
        return next((one for one in self._by_address.get(address, ()) if one.lives_at(time_ns)), None)

    def mark(self, mark: Mark, category: str) -> None:
        """Say of the block what it is; one that was never recorded was there before, up to what took its place."""
        block = self.at(mark.address, mark.time_ns)
        if block is None:
            block = self._new(mark.address, mark.nbytes, None)
            later = [
                one.begin_ns
                for one in self._by_address[mark.address]
                if one.begin_ns is not None and one.begin_ns > mark.time_ns
            ]
            block.end_ns = min(later, default=None)
        block.known.add(category)


class _Stretches:
    """Spans that can be asked what lies where."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns))
        self._begins = [span.begin_ns for span in self._spans]
        self._reach: list[int] = []
        for span in self._spans:
            self._reach.append(max(span.end_ns, self._reach[-1] if self._reach else span.end_ns))

    def around(self, time_ns: int) -> Span | None:
        """The innermost span around that time."""
        index = bisect.bisect_right(self._begins, time_ns) - 1
        while index >= 0 and self._reach[index] > time_ns:
            if self._spans[index].end_ns > time_ns:
                return self._spans[index]
            index -= 1
        return None

    def next_after(self, time_ns: int) -> int | None:
        """Where the next span begins."""
        index = bisect.bisect_right(self._begins, time_ns)
        return self._begins[index] if index < len(self._begins) else None


def memory_of_step(
    recorded: Recorded,
    *,
    resident_bytes: int | None = None,
    peak_resident_bytes: int | None = None,
    reserved_bytes: int | None = None,
    fragmentation_bytes: int | None = None,
    not_counted: Sequence[str] = (),
) -> MemoryByCategory:
    """What the newest of the recorded steps held.

    Args:
        resident_bytes, peak_resident_bytes, reserved_bytes, fragmentation_bytes, not_counted: as of
            :class:`MemoryByCategory`.
    """
    assert recorded.steps, "no step was recorded as a whole"
    blocks, nodes, phases = _Blocks(recorded), _Stretches(recorded.nodes), _Stretches(recorded.phases)
    for mark in recorded.marks:
        if mark.what == "gradient":
            blocks.mark(mark, "gradients")
    _find_activations(blocks.all, nodes, phases)
    _find_messages(blocks.all, recorded.messages)
    _name_layers(blocks.all, recorded.marks, nodes)
    _, step = recorded.steps[-1]

    def phase_at(time_ns: int) -> str:
        if nodes.around(time_ns) is not None:
            return "backward"
        found = phases.around(time_ns)
        return "between" if found is None else found.name

    live: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    layers: dict[str, int] = {}
    for block in blocks.all:
        if block.lives_at(step.begin_ns):
            live[block.category] += block.nbytes
            _add_layer(layers, block, block.nbytes)
    own_peaks, at_peak, peak = dict(live), dict(live), sum(live.values())
    by_layer = dict(layers)
    phase, after = "between", "nothing"
    instants: list[tuple[float, str, tuple[int, ...]]] = [(0.0, phase, tuple(live.values()))]
    for time_ns, block, delta in _changes(blocks.all, step):
        category = block.category
        live[category] += delta
        _add_layer(layers, block, delta)
        place, here = (time_ns - step.begin_ns) / _NS_IN_MS, phase_at(time_ns)
        if live[category] > own_peaks[category]:
            own_peaks[category] = live[category]
            if category == "activations":
                by_layer = {name: held for name, held in layers.items() if held}
        if sum(live.values()) > peak:
            peak, at_peak, phase = sum(live.values()), dict(live), here
            after = f"{place:.3f} ms"
        instants.append((place, here, tuple(live.values())))
    return MemoryByCategory(
        rank=recorded.rank,
        world_size=recorded.world_size,
        source="measured",
        peak_bytes=peak,
        at_peak=at_peak,
        own_peaks=own_peaks,
        phase=phase,
        peak_after=after,
        by_layer=by_layer if any(mark.what == "layer" for mark in recorded.marks) else {},
        timeline=timeline_of("ms", instants, (step.end_ns - step.begin_ns) / _NS_IN_MS),
        not_counted=tuple(not_counted),
        resident_bytes=resident_bytes,
        peak_resident_bytes=peak_resident_bytes,
        reserved_bytes=reserved_bytes,
        fragmentation_bytes=fragmentation_bytes,
    )


def _find_activations(blocks: Iterable[_Block], nodes: _Stretches, phases: _Stretches) -> None:
    """Blocks of forward passes that a backward pass finds, and that the training thread frees. What a thread of the
    communication library has freed leaves no record, and only seems to live on."""
    for block in blocks:
        if block.begin_ns is None or nodes.around(block.begin_ns) is not None:
            continue
        phase = phases.around(block.begin_ns)
        if phase is None or phase.name not in _COMPUTING:
            continue
        backward = nodes.next_after(block.begin_ns)
        if backward is not None and block.was_freed and block.lives_at(backward):
            block.known.add("activations")


def _find_messages(blocks: Sequence[_Block], messages: Iterable[Message]) -> None:
    """A collective's record gives no address: of the blocks of its size that live then, the youngest is taken."""
    by_size: dict[int, list[_Block]] = {}
    for block in blocks:
        by_size.setdefault(block.nbytes, []).append(block)
    taken: dict[int, list[_Block]] = {}
    for message in messages:
        others = taken.setdefault(message.time_ns, [])
        alike = [
            one
            for one in by_size.get(message.nbytes, ())
            if one.lives_at(message.time_ns) and one not in others
        ]
        # Buckets of gradients are summed where they lie, and are older than much of their size.
        youngest = max(
            alike,
            key=lambda one: (message.is_sum and "gradients" in one.known, one.begin_ns or 0),
            default=None,
        )
        if youngest is not None:
            youngest.known.add("communication")
            others.append(youngest)


def _name_layers(blocks: Iterable[_Block], marks: Sequence[Mark], nodes: _Stretches) -> None:
    """By the last mark before a block; behind a backward pass the model begins anew."""
    named = sorted((mark for mark in marks if mark.what == "layer"), key=lambda mark: mark.time_ns)
    times = [mark.time_ns for mark in named]
    for block in blocks:
        if block.begin_ns is not None:
            index = bisect.bisect_right(times, block.begin_ns) - 1
            backward = nodes.next_after(times[index]) if index >= 0 else 0
            begun_anew = backward is not None and backward < block.begin_ns
            block.layer = "embedding" if begun_anew else named[index].name


def _add_layer(layers: dict[str, int], block: _Block, delta: int) -> None:
    if block.category == "activations":
        layers[block.layer] = layers.get(block.layer, 0) + delta


def _changes(blocks: Iterable[_Block], step: Span) -> Iterator[tuple[int, _Block, int]]:
    """Beginnings and ends within the step, in the order of time; at one time what ends comes first."""
    found: list[tuple[int, int, _Block]] = []
    for block in blocks:
        for time_ns, delta in ((block.begin_ns, block.nbytes), (block.end_ns, -block.nbytes)):
            if time_ns is not None and step.begin_ns < time_ns < step.end_ns:
                found.append((time_ns, delta, block))
    found.sort(key=lambda change: change[:2])
    for time_ns, delta, block in found:
        yield time_ns, block, delta
