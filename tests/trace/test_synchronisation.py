"""Where the host waits for the device: the operator, the Python line, and what it costs the device."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_tables import Row, table_of
from hypothesis import given
from hypothesis import strategies as st
from kineto_events import (
    AUTOGRAD_THREAD,
    SHARED_TRACES,
    annotation,
    device_copy,
    kernel,
    launch,
    operator,
    python_function,
    shared_trace,
    trace_of,
)

from drivetrain.report.kernel_text import synchronisation_lines
from drivetrain.trace.classify import classify
from drivetrain.trace.enclosing import Enclosing
from drivetrain.trace.host_context import thread_keys
from drivetrain.trace.read import read_trace
from drivetrain.trace.synchronisation import SynchronisationPoint, Synchronisations, synchronisations
from drivetrain.trace.table import Category, Trace

needs_shared = pytest.mark.skipif(not SHARED_TRACES.is_dir(), reason="the shared traces are not here")
GEMM = "ampere_sgemm_128x64_nn"


def waits_in(trace: Trace) -> Synchronisations:
    return synchronisations(trace, classify(trace))


def runtime(name: str, start: float, duration: float, *, thread: int = 100) -> dict[str, Any]:
    call = launch(start, correlation=0, thread=thread)
    return {**call, "name": name, "dur": duration}


def work(number: int, launched: float, start: float, duration: float) -> list[dict[str, Any]]:
    """A kernel and its launch."""
    return [launch(launched, correlation=number), kernel(GEMM, start, duration, correlation=number)]


def item(at: float, wait: float) -> list[dict[str, Any]]:
    """A scalar read back: the operators and the call in them that waits for ``wait`` microseconds."""
    return [
        operator("aten::item", at, wait + 4),
        operator("aten::_local_scalar_dense", at + 1, wait + 2),
        runtime("cudaStreamSynchronize", at + 2, wait),
    ]


def only(found: Synchronisations) -> SynchronisationPoint:
    (point,) = found.points
    return point


# ---- cost -------------------------------------------------------------------------------------------------------


def test_a_wait_costs_what_the_device_stands_still_until_its_next_work(tmp_path: Path) -> None:
    # The device runs until 100; the call returns at 102, and the next kernel begins at 130.
    events = [*work(1, 0, 10, 90), *item(20, 80), *work(2, 120, 130, 10)]
    point = only(waits_in(trace_of(tmp_path, events)))
    assert (point.waited_ns, point.idle_ns, point.restart_ns) == (80_000, 2_000, 28_000)
    assert point.device_ns == 30_000


def test_a_wait_that_took_no_time_has_caused_no_idleness(tmp_path: Path) -> None:
    # Nothing is queued: the call returns at once, and the device waits for the host in any case.
    events = [*work(1, 0, 10, 10), *item(40, 3), *work(2, 500, 510, 10)]
    point = only(waits_in(trace_of(tmp_path, events)))
    assert (point.idle_ns, point.restart_ns) == (3_000, 0)


def test_idle_time_after_one_wait_ends_at_the_next(tmp_path: Path) -> None:
    events = [*work(1, 0, 5, 95), *item(10, 90), *item(110, 5), *work(2, 200, 300, 10)]
    found = waits_in(trace_of(tmp_path, events))
    assert sum(point.device_ns for point in found.points) <= 200_000
    first = only(found)
    assert first.calls == 2
    # 2 us in the first call, 10 until the second, 5 in the second, which can have caused no more.
    assert (first.idle_ns, first.restart_ns) == (2_000 + 5_000, 10_000)


def test_a_wait_at_the_end_of_the_trace_has_no_restart(tmp_path: Path) -> None:
    point = only(waits_in(trace_of(tmp_path, [*work(1, 0, 10, 90), *item(20, 80)])))
    assert point.restart_ns == 0


# ---- what waits -------------------------------------------------------------------------------------------------


def test_a_scalar_that_was_on_the_host_waits_for_nothing(tmp_path: Path) -> None:
    read = [operator("aten::item", 20, 6), operator("aten::_local_scalar_dense", 21, 4)]
    assert waits_in(trace_of(tmp_path, [*work(1, 0, 10, 90), *read])).points == ()


def test_a_scalar_copied_without_a_recorded_wait_counts(tmp_path: Path) -> None:
    read = [
        operator("aten::item", 20, 84),
        operator("aten::_local_scalar_dense", 21, 82),
        runtime("cudaMemcpyAsync", 22, 80),
        device_copy("Memcpy DtoH (Device -> Pageable)", 100, 1),
    ]
    point = only(waits_in(trace_of(tmp_path, [*work(1, 0, 10, 90), *read])))
    assert (point.call, point.operators) == ("aten::_local_scalar_dense", ("aten::item",))


@pytest.mark.parametrize("name", ["cudaDeviceSynchronize", "hipStreamSynchronize", "cudaMemcpy", "cudaFree"])
def test_calls_that_wait_are_known_by_name(tmp_path: Path, name: str) -> None:
    assert only(waits_in(trace_of(tmp_path, [*work(1, 0, 10, 90), runtime(name, 20, 80)]))).call == name


def test_asynchronous_copies_and_launches_do_not_wait(tmp_path: Path) -> None:
    assert (
        waits_in(trace_of(tmp_path, [*work(1, 0, 10, 90), runtime("cudaMemcpyAsync", 20, 80)])).points == ()
    )


def test_threads_that_do_not_train_are_left_out(tmp_path: Path) -> None:
    events = [*work(1, 0, 10, 90), runtime("cudaEventSynchronize", 20, 80, thread=777)]
    assert waits_in(trace_of(tmp_path, events)).points == ()


def test_waits_outside_the_steps_are_left_out(tmp_path: Path) -> None:
    events = [annotation("ProfilerStep#4", 0, 150), *work(1, 1, 10, 90), *item(20, 80), *item(200, 10)]
    found = waits_in(trace_of(tmp_path, events))
    assert found.num_steps == 1
    assert only(found).calls == 1


# ---- places -----------------------------------------------------------------------------------------------------


def frames(*names_: str) -> list[dict[str, Any]]:
    """Python frames, one in the other, outermost first."""
    return [python_function(name, depth * 0.5, 400 - depth) for depth, name in enumerate(names_)]


def test_the_innermost_frame_of_the_training_code_is_named(tmp_path: Path) -> None:
    stack = frames(
        "<string>(1): <module>",
        "train.py(10): main",
        "model.py(33): forward",
        "torch/nn/modules/module.py(1501): _call_impl",
        "/usr/lib/site-packages/torch/_tensor.py(90): __bool__",
        "nn.Module: Router_0",
        "<built-in method item of Tensor object at 0x7f>",
    )
    events = [*stack, annotation("## router ##", 15, 100), *work(1, 5, 10, 90), *item(20, 80)]
    found = waits_in(trace_of(tmp_path, events))
    point = only(found)
    assert point.frame == "model.py(33): forward"
    assert not point.frame_is_callers
    assert point.range == "## router ##"
    assert point.operators == ("aten::item", "aten::_local_scalar_dense")
    assert found.hint is None


def test_a_wait_in_the_backward_pass_has_the_frame_that_called_it(tmp_path: Path) -> None:
    inside = [
        operator("autograd::engine::evaluate_function: IndexBackward0", 19, 90, thread=AUTOGRAD_THREAD),
        operator("IndexBackward0", 19.5, 89, thread=AUTOGRAD_THREAD),
        operator("aten::nonzero", 20, 84, thread=AUTOGRAD_THREAD),
        runtime("cudaStreamSynchronize", 22, 80, thread=AUTOGRAD_THREAD),
    ]
    events = [*frames("train.py(10): main", "torch/_tensor.py(500): backward"), *work(1, 5, 10, 90), *inside]
    point = only(waits_in(trace_of(tmp_path, events)))
    assert (point.frame, point.frame_is_callers) == ("train.py(10): main", True)
    assert point.operators == ("aten::nonzero",)


def test_the_same_call_from_two_lines_is_two_points_the_costlier_first(tmp_path: Path) -> None:
    events = [
        python_function("train.py(10): log", 15, 100),
        *work(1, 0, 5, 95),
        *item(20, 80),
        python_function("train.py(20): clip", 195, 100),
        *work(2, 150, 180, 40),
        *item(200, 70),
        *work(3, 300, 320, 10),
    ]
    found = waits_in(trace_of(tmp_path, events))
    assert [(point.frame, point.device_ns) for point in found.points] == [
        ("train.py(10): log", 80_000),
        ("train.py(20): clip", 70_000),
    ]


def test_without_python_functions_there_is_a_hint_how_to_get_the_line(tmp_path: Path) -> None:
    found = waits_in(trace_of(tmp_path, [*work(1, 0, 10, 90), *item(20, 80)]))
    assert only(found).frame is None
    assert found.hint is not None
    text = "\n".join(synchronisation_lines(found, 5))
    assert "aten::item > aten::_local_scalar_dense > cudaStreamSynchronize" in text
    assert "with_stack=True" in text


# ---- a profile made here, and real traces -----------------------------------------------------------------------


def log_the_loss(value: Any) -> float:
    return float(value.item())


@pytest.mark.parametrize("with_stack", [True, False])
def test_item_in_a_profile_made_here_is_found_with_its_line(tmp_path: Path, with_stack: bool) -> None:
    torch = pytest.importorskip("torch", reason="a profile is made with torch")
    path = tmp_path / "profile.json"
    weight = torch.ones(4, 4)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], with_stack=with_stack
    ) as recorded:
        for step in range(3):
            # Steps by name: of so short a recording they would be guessed, and what lies outside is not counted.
            with torch.profiler.record_function(f"ProfilerStep#{step}"):
                log_the_loss((weight @ weight).sum())
    recorded.export_chrome_trace(str(path))
    found = waits_in(read_trace(path, cache=False))
    point = only(found)
    assert (point.call, point.calls, point.idle_ns) == ("aten::item", 3, None)
    assert not found.has_device
    if with_stack:
        assert point.frame is not None
        assert "test_synchronisation.py" in point.frame
        assert point.frame.endswith(": log_the_loss")
        assert found.hint is None
    else:
        assert point.frame is None
        assert found.hint is not None


@needs_shared
def test_a_real_trace_names_the_line_of_its_data_dependent_branch() -> None:
    found = waits_in(shared_trace("tracelens/tests/traces/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz"))
    (branch,) = [point for point in found.points if "aten::is_nonzero" in point.operators]
    assert branch.frame == "transformers/modeling_attn_mask_utils.py(243): _ignore_causal_mask_sdpa"
    assert branch.call == "cudaStreamSynchronize"


@needs_shared
def test_frees_that_starve_the_device_are_found_in_a_real_trace() -> None:
    found = waits_in(shared_trace("tracelens/tests/traces/mi300/ddp_resnet18_no_pool/train_resnet18.json.gz"))
    assert found.points[0].call == "hipFree"
    assert all(point.device_ns <= point.waited_ns for point in found.points)
    assert any(point.frame and "train_single_gpu.py" in point.frame for point in found.points)


# ---- what encloses a moment -------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.sampled_from("ab")), max_size=600),
    st.integers(0, 60),
    st.integers(0, 20),
)
def test_enclosing_records_are_those_a_plain_search_finds(
    spans: Sequence[tuple[int, int, str]], at: int, length: int
) -> None:
    rows = [Row(Category.CPU_OP, "op", start, duration, thread=thread) for start, duration, thread in spans]
    events = table_of(rows)
    everything = np.arange(len(events))
    keys = thread_keys(events)
    index = Enclosing(events, everything)
    assert set(index.threads) == set(keys.tolist())
    for key in [*index.threads, 99]:
        plain = [
            row
            for row in everything.tolist()
            if keys[row] == key and events.start_ns[row] <= at and events.end_ns[row] >= at + length
        ]
        assert index.around(key, at, at + length).tolist() == plain
