"""Work in an operator's region, and in the backward nodes made there, is the operator's, whatever its names say."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kineto_events import AUTOGRAD_THREAD, MAIN_THREAD, annotation, kernel, launch, operator, trace_of

from drivetrain.report.kernel_text import kernel_text
from drivetrain.trace.account import account_of
from drivetrain.trace.classify import CLASSES, classify
from drivetrain.trace.kernels import matrix_products
from drivetrain.trace.operator_regions import REGION, OperatorTotal, operator_totals, region_rows
from drivetrain.trace.sequence import BackwardNodes
from drivetrain.trace.steps import find_steps
from drivetrain.trace.table import Trace

NODE = "autograd::engine::evaluate_function: {}"
GENERATED = "triton_poi_fused_add_mul_{}"
GEMM = "ampere_sgemm_128x128_{}"


def region(name: str, backend: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
    return annotation(f"drivetrain/operator/{name}/{backend}", start, duration, **more)


def numbered(name: str, start: float, duration: float, sequence: int, **more: Any) -> dict[str, Any]:
    return operator(name, start, duration, **{"Sequence number": sequence, **more})


def node(name: str, start: float, duration: float, sequence: int, thread: int = MAIN_THREAD) -> list[Any]:
    """A backward node's evaluation and the node itself, which carries the number too."""
    return [
        numbered(NODE.format(name), start, duration, sequence, thread=thread),
        numbered(name, start, duration, sequence, thread=thread),
    ]


def kinds_of(trace: Trace) -> dict[str, str]:
    found = classify(trace)
    return {
        trace.events.names[name]: CLASSES[kind]
        for name, kind in zip(trace.events.name, found.kind, strict=True)
        if kind
    }


def totals_of(trace: Trace) -> tuple[OperatorTotal, ...]:
    found = classify(trace)
    return operator_totals(trace.events, found.kind, host_view=found.host_view)


def launched(at: float, number: int, name: str, thread: int = MAIN_THREAD) -> list[Any]:
    """An operator that launches a kernel of 5 us on the device, 1,000 us later."""
    return [
        operator(f"op_{number}", at, 3, external_id=number, thread=thread),
        launch(at + 1, correlation=number, external_id=number, thread=thread),
        kernel(name, at + 1000, 5, correlation=number),
    ]


OF_OPERATORS = {
    "rms_norm": "norm",
    "layer_norm": "norm",
    "add_rms_norm": "norm",
    "add_layer_norm": "norm",
    "rotary": "elementwise",
    "bias_dropout_add": "elementwise",
    "glu": "activation",
    "attention": "attention",
    "linear_cross_entropy": "loss",
    "qkv_product": "matmul",
    "gate_up_product": "matmul",
    "linear": "matmul",
    "grouped_product": "matmul",
    "adamw": "optimizer",
    "gradient_clip": "optimizer",
}


@pytest.mark.parametrize(("name", "kind"), OF_OPERATORS.items())
def test_a_generated_kernel_is_of_the_operator_whose_region_launched_it(
    tmp_path: Path, name: str, kind: str
) -> None:
    events = [
        region(name, "inductor", 100, 50),
        *launched(110, 1, GENERATED.format(1)),
        *launched(120, 2, GEMM.format("nn")),
        *launched(200, 3, GENERATED.format(3)),
        *launched(210, 4, GEMM.format("tn")),
    ]
    kinds = kinds_of(trace_of(tmp_path, events))
    assert kinds[GENERATED.format(1)] == f"compute.{kind}"
    # A product within stays one, but where attention is made of it, or the optimizer.
    whole = kind in ("attention", "optimizer")
    assert kinds[GEMM.format("nn")] == (f"compute.{kind}" if whole else "compute.matmul")
    assert kinds[GENERATED.format(3)] == "compute.elementwise"
    assert kinds[GEMM.format("tn")] == "compute.matmul"


def test_the_backward_nodes_made_in_a_region_are_the_operators(tmp_path: Path) -> None:
    """Numbers 5 and 6 are made in the region, 7 behind it; a node of another thread's kernel tells by its number."""
    thread = AUTOGRAD_THREAD
    events = [
        numbered("aten::mul", 90, 5, 4),
        region("rms_norm", "eager", 100, 50),
        numbered("aten::pow", 110, 5, 5),
        numbered("aten::mul", 120, 5, 6),
        numbered("aten::add", 160, 5, 7),
        *node("AddBackward0", 300, 20, 7, thread),
        *launched(305, 1, GENERATED.format("behind"), thread),
        *node("MulBackward0", 330, 20, 6, thread),
        *launched(335, 2, GENERATED.format("last"), thread),
        *node("PowBackward0", 360, 20, 5, thread),
        *launched(365, 3, GENERATED.format("first"), thread),
        *node("MulBackward0", 390, 20, 4, thread),
        *launched(395, 4, GENERATED.format("before"), thread),
    ]
    trace = trace_of(tmp_path, events)
    kinds = kinds_of(trace)
    assert {name.removeprefix(GENERATED.format("")): kind for name, kind in kinds.items()} == {
        "behind": "compute.elementwise",
        "last": "compute.norm",
        "first": "compute.norm",
        "before": "compute.elementwise",
    }
    (total,) = totals_of(trace)
    assert (total.operator, total.backend, total.calls) == ("rms_norm", "eager", 1)
    assert (total.forward_ns, total.forward_records) == (0, 0)
    assert (total.backward_ns, total.backward_records) == (10_000, 2)
    assert total.kinds == {"compute.norm": 10_000}


def test_a_node_made_by_the_last_call_of_a_thread_belongs_to_its_region(tmp_path: Path) -> None:
    events = [
        region("glu", "eager", 100, 50),
        numbered("aten::mul", 110, 5, 3),
        *node("MulBackward0", 200, 20, 3),
        operator("aten::mul", 205, 5),
        *node("SumBackward0", 230, 20, 4),
        region("glu", "eager", 300, 50),
        operator("aten::mul", 310, 5),
    ]
    trace = trace_of(tmp_path, events)
    nodes = BackwardNodes.made_in(trace.events, region_rows(trace.events))
    assert [trace.events.names[trace.events.name[row]] for row in nodes.rows] == [NODE.format("MulBackward0")]


def test_a_region_that_made_no_node_takes_none(tmp_path: Path) -> None:
    """Evaluation without gradients has no numbers; views of what wants none have the next one's, and make none."""
    events = [
        region("rotary", "eager", 100, 50),
        operator("aten::mul", 110, 5),
        region("rotary", "eager", 200, 50),
        numbered("aten::to", 210, 5, 3),
        numbered("aten::exp", 260, 5, 3),
        numbered("aten::sum", 270, 5, 4),
        *node("ExpBackward0", 300, 20, 3),
    ]
    trace = trace_of(tmp_path, events)
    assert len(BackwardNodes.made_in(trace.events, region_rows(trace.events)).rows) == 0


def test_threads_that_count_alike_are_told_apart_by_time(tmp_path: Path) -> None:
    """A forward pass repeated on an autograd thread counts anew: the node belongs to the last range before it."""
    thread = AUTOGRAD_THREAD
    events = [
        region("rms_norm", "eager", 100, 20),
        numbered("aten::mul", 110, 5, 3),
        numbered("aten::add", 130, 5, 4),
        *node("MulBackward0", 150, 20, 3, thread),
        *launched(155, 2, GENERATED.format("first"), thread),
        region("glu", "eager", 200, 20, thread=thread),
        numbered("aten::mul", 210, 5, 3, thread=thread),
        numbered("aten::add", 230, 5, 4, thread=thread),
        *node("MulBackward0", 300, 20, 3, thread),
        *launched(305, 1, GENERATED.format("repeated"), thread),
    ]
    trace = trace_of(tmp_path, events)
    assert kinds_of(trace)[GENERATED.format("repeated")] == "compute.activation"
    assert kinds_of(trace)[GENERATED.format("first")] == "compute.norm"
    assert {one.operator: one.backward_records for one in totals_of(trace)} == {"rms_norm": 1, "glu": 1}


def test_a_call_that_is_repeated_in_its_own_backward_node_counts_as_a_call(tmp_path: Path) -> None:
    events = [
        region("glu", "eager", 100, 20),
        numbered("aten::mul", 110, 5, 3),
        numbered("aten::add", 130, 5, 4),
        *node("MulBackward0", 200, 100, 3),
        region("glu", "eager", 210, 20),
        *launched(212, 1, GENERATED.format("repeated")),
        *launched(250, 2, GENERATED.format("derivative")),
    ]
    (total,) = totals_of(trace_of(tmp_path, events))
    assert (total.calls, total.forward_records, total.backward_records) == (2, 1, 1)


def test_without_a_device_the_operators_within_are_the_work(tmp_path: Path) -> None:
    """Compiled graphs say nothing of themselves but that they ran."""
    graph = "## Call CompiledFxGraph f{} ##"
    events = [
        annotation("ProfilerStep#4", 0, 1000),
        annotation("drivetrain/forward", 50, 400),
        region("rms_norm", "inductor", 100, 50),
        numbered("TorchDynamo Cache Lookup", 102, 3, 8),
        annotation(graph.format(1), 110, 20),
        region("linear_cross_entropy", "chunked", 200, 50),
        numbered("aten::mm", 210, 10, 9),
        numbered("aten::exp", 225, 10, 9),
        numbered("aten::mul", 300, 10, 10),
        annotation("drivetrain/backward", 500, 400),
        *node("CompiledFunctionBackward", 600, 100, 8),
        operator("aten::view", 605, 2),
        annotation(graph.format(2), 610, 20),
        annotation(graph.format(3), 800, 20),
    ]
    trace = trace_of(tmp_path, events)
    kinds = kinds_of(trace)
    assert kinds[graph.format(1)] == kinds[graph.format(2)] == "compute.norm"
    assert kinds[graph.format(3)] == "compute.other"
    assert kinds["aten::mm"] == "compute.matmul"
    assert kinds["aten::exp"] == "compute.loss"
    assert kinds["aten::mul"] == "compute.elementwise"
    # Looking up which compiled code fits is the host's, not compute.
    assert "TorchDynamo Cache Lookup" not in kinds
    loss, norm = sorted(totals_of(trace), key=lambda total: total.operator)
    assert (norm.forward_ns, norm.backward_ns, norm.kinds) == (20_000, 22_000, {"compute.norm": 42_000})
    assert loss.kinds == {"compute.matmul": 10_000, "compute.loss": 10_000}


def _step(regions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        annotation("ProfilerStep#4", 0, 1000),
        annotation("drivetrain/fetch", 10, 30),
        annotation("drivetrain/forward", 50, 400),
        operator("aten::mm", 110, 30),
        operator("aten::silu", 160, 30),
        annotation("drivetrain/backward", 500, 400),
        operator("aten::sum", 600, 30),
        annotation("drivetrain/optimizer", 910, 80),
        operator("aten::_fused_adamw_", 920, 30),
        *regions,
    ]


def test_regions_disturb_neither_the_steps_nor_the_spans_of_the_loop(tmp_path: Path) -> None:
    """They lie in a span; nothing but classes may be other with them than without."""
    regions = [
        region("linear", "eager", 105, 40),
        region("glu", "eager", 150, 45),
        region("adamw", "fused", 915, 40),
    ]
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    marked, plain = (
        trace_of(tmp_path / name, _step(events)) for name, events in (("with", regions), ("without", []))
    )
    assert find_steps(marked.events) == find_steps(plain.events)
    ours, theirs = account_of([marked]), account_of([plain])
    assert ours.ranks[0].steps == theirs.ranks[0].steps
    assert ours.ranks[0].whole == theirs.ranks[0].whole
    assert ours.health == theirs.health
    assert theirs.ranks[0].whole.classes["data.loader"] == 30_000


def test_the_list_of_kernels_names_operators_with_their_backends(tmp_path: Path) -> None:
    events = [
        region("rms_norm", "triton", 100, 20),
        *launched(105, 1, GENERATED.format(1)),
        region("rms_norm", "triton", 130, 20),
        *launched(135, 2, GENERATED.format(2)),
        region("glu", "eager", 160, 20),
    ]
    trace = trace_of(tmp_path, events)
    found = classify(trace)
    text = kernel_text(
        (),
        matrix_products(trace, found),
        (),
        (),
        operators=totals_of(trace),
        count=5,
        ceiling=None,
    )
    title, norm, unit = text.splitlines()
    assert title.startswith("operators by backend")
    assert norm.split()[:5] == ["0.010", "ms", "2x", "rms_norm/triton", "forward"]
    assert norm.endswith("1.0 records a call: compute.norm 100%")
    assert unit.endswith("no work was recorded in them")


def test_a_trace_without_regions_has_no_operators(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, _step([]))
    assert totals_of(trace) == ()
    assert REGION.match("drivetrain/operator") is None
