"""Forward work repeated in the backward pass is told from the backward itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_events import (
    AUTOGRAD_THREAD,
    SHARED_TRACES,
    annotation,
    kernel,
    launch,
    operator,
    python_function,
    shared_trace,
    trace_of,
)
from numpy.typing import NDArray

from drivetrain.trace.classify import classify
from drivetrain.trace.table import Category, EventTable, Trace

CHECKPOINTED = "tracelens/tests/traces/mi300/resnet_act_checkpoint.json.gz"
NODE = "autograd::engine::evaluate_function: {}"


def _repeated(trace: Trace) -> set[str]:
    found = classify(trace).recompute
    return {trace.events.names[index] for index in trace.events.name[found]}


def _launched(name: str, number: int, at: float, *, thread: int = AUTOGRAD_THREAD) -> list[dict[str, Any]]:
    """A kernel and, in the middle of its operator, its launch."""
    return [
        launch(at, correlation=number, external_id=number, thread=thread),
        kernel(name, 1000.0 + at, 5.0, correlation=number),
    ]


def _backward(name: str, start: float, duration: float) -> list[dict[str, Any]]:
    return [
        operator(NODE.format(name), start, duration, external_id=900 + int(start), thread=AUTOGRAD_THREAD),
        operator(name, start + 1, duration - 2, external_id=901 + int(start), thread=AUTOGRAD_THREAD),
    ]


def test_forward_operators_inside_a_backward_node_mark_the_work_before_the_derivative(tmp_path: Path) -> None:
    events = [
        operator("aten::linear", 10, 20, external_id=1, thread=100),
        *_launched("forward_gemm", 1, 15, thread=100),
        *_backward("MulBackward0", 100, 100),
        operator("aten::clone", 105, 5, external_id=2, thread=AUTOGRAD_THREAD),
        *_launched("repeated_copy_kernel", 2, 106),
        operator("aten::linear", 115, 20, external_id=3, thread=AUTOGRAD_THREAD),
        *_launched("repeated_gemm", 3, 120),
        operator("aten::mul", 160, 10, external_id=4, thread=AUTOGRAD_THREAD),
        *_launched("derivative_kernel", 4, 165),
        *_backward("AddmmBackward0", 300, 50),
        operator("aten::mm", 310, 10, external_id=5, thread=AUTOGRAD_THREAD),
        *_launched("backward_gemm", 5, 315),
    ]
    assert _repeated(trace_of(tmp_path, events)) == {"repeated_copy_kernel", "repeated_gemm"}


def test_reentrant_checkpointing_repeats_all_but_its_inner_backward(tmp_path: Path) -> None:
    events = [
        *_backward("CheckpointFunctionBackward", 100, 200),
        operator("aten::mm", 110, 10, external_id=1, thread=AUTOGRAD_THREAD),
        *_launched("repeated_gemm", 1, 115),
        *_backward("MmBackward0", 200, 50),
        operator("aten::mm", 210, 10, external_id=2, thread=AUTOGRAD_THREAD),
        *_launched("backward_gemm", 2, 215),
    ]
    assert _repeated(trace_of(tmp_path, events)) == {"repeated_gemm"}


@pytest.mark.parametrize(
    "mark",
    [
        python_function("torch/utils/checkpoint.py(1111): unpack_hook", 100, 50, thread=AUTOGRAD_THREAD),
        annotation("recompute", 100, 50, thread=AUTOGRAD_THREAD),
    ],
)
def test_frames_of_the_checkpoint_module_and_ranges_of_a_trainer_mark_it(
    tmp_path: Path, mark: Mapping[str, Any]
) -> None:
    events = [
        mark,
        operator("aten::mm", 110, 10, external_id=1, thread=AUTOGRAD_THREAD),
        *_launched("repeated_gemm", 1, 115),
        operator("aten::mm", 160, 10, external_id=2, thread=AUTOGRAD_THREAD),
        *_launched("backward_gemm", 2, 165),
    ]
    assert _repeated(trace_of(tmp_path, events)) == {"repeated_gemm"}


def test_the_same_operators_on_another_thread_are_not_repeated(tmp_path: Path) -> None:
    events = [
        *_backward("MulBackward0", 100, 100),
        operator("aten::linear", 120, 20, external_id=3, thread=100),
        *_launched("forward_gemm", 3, 125, thread=100),
    ]
    assert _repeated(trace_of(tmp_path, events)) == set()


def test_communication_prefetched_during_repetition_is_no_repeated_compute(tmp_path: Path) -> None:
    events = [
        *_backward("MulBackward0", 100, 100),
        *_launched("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1, 110),
        operator("aten::linear", 115, 20, external_id=3, thread=AUTOGRAD_THREAD),
        *_launched("repeated_gemm", 3, 120),
    ]
    assert _repeated(trace_of(tmp_path, events)) == {"repeated_gemm"}


def test_without_a_device_the_repeated_operators_are_marked(tmp_path: Path) -> None:
    events = [
        *_backward("MulBackward0", 100, 100),
        operator("aten::linear", 115, 20, external_id=3, thread=AUTOGRAD_THREAD),
        operator("aten::addmm", 117, 15, external_id=4, thread=AUTOGRAD_THREAD),
        operator("aten::mul", 160, 10, external_id=5, thread=AUTOGRAD_THREAD),
    ]
    trace = trace_of(tmp_path, events)
    found = classify(trace)
    assert found.host_view
    repeated = {trace.events.names[index] for index in trace.events.name[found.recompute]}
    assert {"aten::linear", "aten::addmm"} <= repeated
    assert "aten::mul" not in repeated


@pytest.mark.skipif(not SHARED_TRACES.is_dir(), reason="the shared traces are not here")
@pytest.mark.parametrize("stacks", [True, False], ids=["with_stacks", "operators_only"])
def test_a_checkpointed_training_run_agrees_with_the_sequence_numbers_of_autograd(stacks: bool) -> None:
    """Independent truth: an operator inside a backward node records a sequence number of thread 0 only if it builds a
    graph, which the backward pass itself does not."""
    trace = shared_trace(CHECKPOINTED)
    events = trace.events
    if not stacks:
        kept = np.flatnonzero(events.category != np.uint8(Category.PYTHON))
        trace = Trace(
            **{**vars(trace), "events": events.select(kept)},
        )
        events = trace.events
    operators = np.flatnonzero(events.category == np.uint8(Category.CPU_OP))
    names = [events.names[index] for index in events.name[operators]]
    builds = np.array(
        [
            "Sequence number" in arguments and int(arguments.get("Fwd thread id", 0)) == 0
            for arguments in trace.arguments(operators)
        ]
    )
    node = np.array([name.startswith("autograd::engine::evaluate_function") for name in names])
    repeated = _inside(events, operators[builds & ~node], operators[node])
    runtime = np.flatnonzero(events.category == np.uint8(Category.RUNTIME))
    launches = np.unique(events.correlation[_inside(events, runtime, repeated)])
    found = classify(trace)
    is_kernel = events.category == np.uint8(Category.KERNEL)
    expected = is_kernel & np.isin(events.correlation, launches) & found.is_compute()
    assert expected.sum() == 591
    assert np.array_equal(found.recompute, expected)


def _inside(events: EventTable, rows: NDArray[np.int64], outer: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those rows that start inside a record of ``outer`` on their thread, by trying each."""
    inside = np.zeros(len(rows), np.bool_)
    for row in outer:
        same = (events.process[rows] == events.process[row]) & (events.thread[rows] == events.thread[row])
        start = events.start_ns[rows]
        inside |= same & (events.start_ns[row] <= start) & (start <= events.end_ns[row])
    return rows[inside]
