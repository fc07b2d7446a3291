"""Categories of memory from plain records of allocations."""

from collections.abc import Sequence
from typing import Any

from drivetrain.measure.memory import (
    CATEGORIES,
    MemoryByCategory,
    Timeline,
    deviations,
    dominant,
    timeline_of,
)
from drivetrain.measure.memory_events import (
    Allocation,
    HeldBlock,
    Mark,
    Message,
    Recorded,
    Span,
    memory_of_step,
)

STEP = (5, Span(100, 1000, "step"))
PHASES = (Span(110, 300, "forward"), Span(300, 600, "backward"), Span(600, 900, "optimizer"))
NODES = (Span(310, 400, "node"), Span(400, 590, "node"))


def recorded(allocations: Sequence[Allocation], **fields: Any) -> Recorded:
    given: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "marks": (),
        "phases": PHASES,
        "nodes": NODES,
        "messages": (),
        "held": (),
        "steps": (STEP,),
        **fields,
    }
    return Recorded(allocations=allocations, **given)


def test_what_forward_allocates_and_backward_finds_is_an_activation() -> None:
    found = memory_of_step(
        recorded(
            [
                Allocation(120, 1, 10),
                Allocation(130, 2, 7),
                Allocation(140, 2, -7),
                Allocation(350, 3, 5),
                Allocation(360, 1, -10),
                Allocation(370, 3, -5),
            ]
        )
    )
    assert found.own_peaks["activations"] == 10
    assert found.own_peaks["temporaries"] == 7
    assert (found.peak_bytes, found.phase) == (17, "forward")
    assert found.at_peak["activations"] == 10


def test_a_marked_gradient_is_one_from_its_allocation_on() -> None:
    found = memory_of_step(
        recorded(
            [Allocation(320, 4, 100), Allocation(700, 4, -100)],
            marks=[Mark(410, "gradient", address=4, nbytes=100)],
        )
    )
    assert found.own_peaks["gradients"] == 100
    assert found.own_peaks["temporaries"] == 0


def test_a_gradient_that_was_there_before_is_counted_from_the_beginning() -> None:
    found = memory_of_step(
        recorded([Allocation(120, 1, 3)], marks=[Mark(410, "gradient", address=9, nbytes=50)])
    )
    assert found.own_peaks["gradients"] == 50
    assert found.timeline.live["gradients"][0] == 50


def test_held_blocks_belong_to_their_owner_and_count_once() -> None:
    held = [HeldBlock("parameters", 7, 40), HeldBlock("optimizer", 8, 80), HeldBlock("parameters", 7, 40)]
    found = memory_of_step(recorded([Allocation(120, 1, 3)], held=held))
    assert found.own_peaks["parameters"] == 40
    assert found.own_peaks["optimizer"] == 80


def test_a_block_that_another_thread_has_freed_ends_when_its_place_is_taken() -> None:
    found = memory_of_step(
        recorded([Allocation(320, 1, 30), Allocation(330, 1, 20), Allocation(340, 1, -20)])
    )
    assert found.own_peaks["temporaries"] == 30
    assert found.timeline.live["temporaries"][-1] == 0


def test_the_youngest_block_of_a_messages_size_was_handed_over() -> None:
    found = memory_of_step(
        recorded(
            [
                Allocation(320, 1, 64),
                Allocation(330, 2, 64),
                Allocation(500, 2, -64),
                Allocation(510, 1, -64),
            ],
            messages=[Message(340, 64), Message(341, 9)],
        )
    )
    assert found.own_peaks["communication"] == 64
    assert found.own_peaks["temporaries"] == 64


def test_layers_are_named_by_marks_and_begin_anew_behind_a_backward_pass() -> None:
    second = (Span(620, 640, "forward"), Span(640, 700, "backward"))
    found = memory_of_step(
        recorded(
            [
                *(Allocation(115, 1, 1), Allocation(150, 2, 2), Allocation(200, 3, 4), Allocation(625, 4, 8)),
                *(Allocation(950 + address, address, -1) for address in (1, 2, 3, 4)),
            ],
            marks=[Mark(140, "layer", name="layer 0"), Mark(190, "layer", name="output")],
            phases=(*PHASES[:2], *second),
            nodes=(*NODES, Span(650, 690, "node")),
        )
    )
    assert found.by_layer == {"embedding": 9, "layer 0": 2, "output": 4}


def record(**bytes_of: int) -> MemoryByCategory:
    held: dict[str, int] = {name: bytes_of.get(name, 0) for name in CATEGORIES}
    return MemoryByCategory(
        rank=0,
        world_size=1,
        source="predicted",
        peak_bytes=sum(held.values()),
        at_peak=held,
        own_peaks=held,
        phase="forward",
        peak_after="aten.mm",
        by_layer={},
        timeline=Timeline("ms", (0.0,), ("forward",), {name: (held[name],) for name in CATEGORIES}),
    )


def test_a_deviation_is_relative_to_what_was_measured_and_none_where_nothing_was() -> None:
    found = {
        one.category: one.relative for one in deviations(record(activations=90), record(activations=100))
    }
    assert found["activations"] == -0.1
    assert found["gradients"] is None
    assert found["total"] == -0.1


def test_dominant_categories_hold_a_fifth_of_the_peak() -> None:
    assert dominant(record(activations=60, optimizer=25, gradients=15)) == ("activations", "optimizer")
    assert dominant(record()) == ()


def test_a_timeline_keeps_the_fullest_instant_of_each_stretch() -> None:
    zeros = (0,) * (len(CATEGORIES) - 1)
    instants = [(float(place), "forward", (place % 7, *zeros)) for place in range(100)]
    found = timeline_of("ms", instants, 100.0, most=10)
    assert len(found.places) == 10
    assert set(found.totals) == {6}


def test_a_record_survives_being_written() -> None:
    one = record(activations=60, optimizer=25)
    assert MemoryByCategory.from_document(one.to_document()) == one
