"""What a profile shows of operators: each has a class of the account, and its work is found with its backward pass."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from drivetrain.engine.ops import glu, rms_norm
from drivetrain.engine.ops.discovery import operators
from drivetrain.engine.ops.selection import REGION, Selection
from drivetrain.trace.classify import classify
from drivetrain.trace.name_table import NameTable
from drivetrain.trace.operator_regions import operator_totals
from drivetrain.trace.read import read_trace


def test_every_operator_has_a_class_by_its_region() -> None:
    contexts = NameTable.load().contexts
    for operator in operators():
        name = f"{REGION}{operator.name}/eager"
        found = [context for context in contexts if context.pattern.search(name)]
        assert len(found) == 1, f"names/1/operators.toml has {len(found)} contexts for {name}"
        assert "annotation" in found[0].categories


def test_a_profile_shows_the_calls_of_each_operator_and_their_backward_passes(tmp_path: Path) -> None:
    selection = Selection(requested={"rms_norm": "eager", "glu": "eager"})
    x = torch.randn(4, 16, 32, requires_grad=True)
    weight = torch.ones(32, requires_grad=True)
    path = tmp_path / "trace.json"
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            y = selection.call(rms_norm.OPERATOR, x=x, weight=weight)
            assert isinstance(y, torch.Tensor)
            z = selection.call(glu.OPERATOR, gate=y, up=y)
            assert isinstance(z, torch.Tensor)
            z.sin().sum().backward()
    profiler.export_chrome_trace(str(path))
    trace = read_trace(path, cache=False)
    found = classify(trace)
    totals = {
        one.operator: one for one in operator_totals(trace.events, found.kind, host_view=found.host_view)
    }
    assert {(one.operator, one.backend, one.calls) for one in totals.values()} == {
        ("rms_norm", "eager", 3),
        ("glu", "eager", 3),
    }
    assert set(totals["rms_norm"].kinds) == {"compute.norm"}
    assert set(totals["glu"].kinds) == {"compute.activation"}
    for one in totals.values():
        assert one.forward_records >= 3
        assert one.backward_records >= 3
    # What lies outside regions has no operator: the sine and its derivative.
    names = [trace.events.names[name] for name in trace.events.name[found.is_compute()]]
    everything = sum(one.forward_records + one.backward_records for one in totals.values())
    assert {"aten::sin", "aten::cos"} <= set(names)
    assert everything < len(names)
