"""Garbage collections are ranges of a trace while they are recorded, and of the account's class for them."""

import gc

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from drivetrain.engine.recorded_collections import RecordedCollections
from drivetrain.trace.name_table import NameTable


def test_collections_between_begin_and_end_are_ranges_of_the_class_for_them() -> None:
    collections, callbacks = RecordedCollections(), list(gc.callbacks)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        gc.collect(0)
        collections.begin()
        gc.collect(0)
        gc.collect(0)
        collections.end()
        gc.collect(0)
    assert gc.callbacks == callbacks
    names = [event.name for event in profiler.events()]
    found = {name for name in names if NameTable.load().label("cause", name) == "host.gc"}
    assert [names.count(name) for name in found] == [2]


def test_what_was_never_begun_ends_without_a_word() -> None:
    callbacks = list(gc.callbacks)
    RecordedCollections().end()
    assert gc.callbacks == callbacks


@pytest.mark.parametrize("name", ["Python GC", "python gc", "drivetrain/gc", "<built-in function collect>"])
def test_the_records_of_torch_and_ours_are_known_as_collections(name: str) -> None:
    assert NameTable.load().label("cause", name) == "host.gc"


def test_a_collection_while_torch_traces_is_no_part_of_the_graph() -> None:
    def doubled(values: torch.Tensor) -> torch.Tensor:
        gc.collect(0)
        return values * 2

    collections = RecordedCollections()
    with profile(activities=[ProfilerActivity.CPU]):
        collections.begin()
        try:
            traced = make_fx(doubled, tracing_mode="fake")(torch.ones(2))
        finally:
            collections.end()
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.aten.mul.Tensor]
