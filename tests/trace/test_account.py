"""The account of one trace: priorities, windows, withheld figures; against a sweep nanosecond by nanosecond."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from event_tables import Row, kernel, trace_of_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.config import ModelConfig, load_config
from drivetrain.errors import DataError, DrivetrainError
from drivetrain.measure.account import CLASSES, COMPUTE_CLASSES, COPY_CLASSES, HOST_CAUSES, Window
from drivetrain.measure.flops import model_flops
from drivetrain.measure.peaks import Peak
from drivetrain.trace.account import account_of
from drivetrain.trace.classify import CLASSES as KINDS
from drivetrain.trace.classify import classify
from drivetrain.trace.health import Finding
from drivetrain.trace.name_table import NameTable
from drivetrain.trace.table import Category, Trace

TABLE = NameTable.load()
GEMM = "ampere_sgemm_128x64_nn"
ATTENTION = "flash_fwd_kernel"
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def whole(*rows: Row, **more: object) -> Window:
    return account_of([trace_of_rows(rows, **more)]).ranks[0].whole  # type: ignore[arg-type]


def host(name: str, start: int, duration: int, category: Category = Category.ANNOTATION) -> Row:
    return Row(category, name, start, duration)


def test_compute_comes_before_communication_before_copies_before_causes() -> None:
    """All four from time 0, each lasting longer than the one before."""
    found = whole(
        kernel(GEMM, 0, 10),
        kernel(ALL_REDUCE, 0, 25, stream=8),
        replace(kernel("Memcpy HtoD (Pinned -> Device)", 0, 45, stream=9), category=Category.MEMCPY),
        host("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 70),
        host("aten::add", 0, 90, Category.CPU_OP),
        host("ProfilerStep#1", 0, 100),
        kernel(NORM, 99, 1),
    )
    assert dict(found.classes) == {
        "compute.matmul": 10,
        "compute.norm": 1,
        "communication.unknown.unsplit": 15,
        "copy.h2d": 20,
        "data.loader": 25,
        "host.launch": 20,
        "idle": 9,
    }
    assert (found.window_ns, found.busy_ns, found.idle_ns) == (100, 46, 54)
    assert (found.communication_ns, found.overlapped_communication_ns) == (25, 10)
    assert (found.copy_ns, found.exposed_copy_ns) == (45, 20)


def test_causes_take_time_in_their_order() -> None:
    """data > maintenance > sync > gc > launch > python, all from time 10 on, each lasting longer."""
    rows = [
        kernel(GEMM, 0, 10),
        host("drivetrain/fetch", 10, 10),
        host("drivetrain/checkpoint", 10, 20),
        host("drivetrain/evaluation", 10, 30),
        host("cudaDeviceSynchronize", 10, 40, Category.RUNTIME),
        host("drivetrain/gc", 10, 50),
        host("aten::mm", 10, 60, Category.CPU_OP),
        host("drivetrain/forward", 10, 70),
        host("ProfilerStep#1", 0, 100),
        kernel(GEMM, 90, 10),
    ]
    causes = ["data.loader", "maintenance.checkpoint", "maintenance.evaluation", "host.sync", "host.gc"]
    causes += ["host.launch", "host.python", "idle"]
    found = whole(*rows)
    assert dict(found.classes) == {"compute.matmul": 20, **dict.fromkeys(causes, 10)}


def test_threads_that_do_not_train_are_no_cause() -> None:
    """A loader's thread is busy all the time; the training thread waits for nothing."""
    found = whole(
        kernel(GEMM, 0, 10),
        kernel(GEMM, 90, 10),
        host("ProfilerStep#1", 0, 100),
        Row(Category.CPU_OP, "aten::pin_memory", 0, 100, thread="pin memory"),
    )
    assert dict(found.classes) == {"compute.matmul": 20, "idle": 80}


def test_a_thread_that_only_calls_the_runtime_does_not_train() -> None:
    """The watchdog of a communication library asks for events all the time."""
    watchdog = Row(Category.RUNTIME, "cudaEventSynchronize", 20, 60, thread="watchdog", correlation=5)
    launches = Row(Category.RUNTIME, "cudaLaunchKernel", 0, 1, correlation=1)
    found = whole(kernel(GEMM, 0, 10, correlation=1), kernel(GEMM, 90, 10), launches, watchdog)
    assert dict(found.classes) == {"compute.matmul": 20, "idle": 80}


def test_idleness_without_host_records_is_unexplained() -> None:
    found = whole(kernel(GEMM, 0, 10), kernel(GEMM, 90, 10))
    assert found.unexplained_ns == 80
    assert found.idle_ns == 80
    assert dict(found.classes) == {"compute.matmul": 20}


def test_a_withheld_figure_is_null_and_its_time_unexplained() -> None:
    finding = Finding("graph_replay_incomplete", "warning", "kernels are missing", 3, ("idle_ns",))
    rows = (kernel(GEMM, 0, 10), kernel(GEMM, 90, 10), host("aten::mm", 0, 100, Category.CPU_OP))
    found = whole(*rows, health=(finding,))
    assert found.idle_ns is None
    assert found.busy_ns is None, "the window less the busy time would give it away"
    assert found.compute_ns == 20
    assert found.unexplained_ns == 80
    assert dict(found.classes) == {"compute.matmul": 20}


@pytest.mark.parametrize("key", ["communication_ns", "compute_ns", "copy_ns", "classes", "busy_ns"])
def test_the_classes_close_whatever_is_withheld(key: str) -> None:
    finding = Finding("some", "warning", "", 1, (key,))
    found = whole(kernel(GEMM, 0, 10), kernel(ALL_REDUCE, 5, 20), kernel(NORM, 40, 5), health=(finding,))
    assert sum(found.classes.values()) + found.unexplained_ns == found.window_ns
    if key != "classes":
        assert found.to_document()[key] is None


def test_kernels_behind_the_break_of_a_file_make_idleness_untrustworthy() -> None:
    launches = [Row(Category.RUNTIME, "cudaLaunchKernel", 10 * i, 1, correlation=i) for i in range(5)]
    rows = [*launches, *(kernel(GEMM, 10 * i + 5, 5, correlation=i) for i in range(2))]
    account = account_of([trace_of_rows(rows, partial=True)])
    assert account.ranks[0].whole.idle_ns is None
    assert "kernels_lost" in {finding.id for finding in account.health}
    all_there = [*launches, *(kernel(GEMM, 10 * i + 5, 5, correlation=i) for i in range(5))]
    assert account_of([trace_of_rows(all_there, partial=True)]).ranks[0].whole.idle_ns == 20


def test_a_trace_whose_kernels_are_missing_is_of_the_host_and_withholds_nothing() -> None:
    finding = Finding("no_kernels", "error", "only copies", 2, ("busy_ns", "idle_ns", "classes"))
    copy = replace(kernel("Memcpy HtoD (Pinned -> Device)", 0, 5), category=Category.MEMCPY)
    rows = [copy, host("aten::mm", 0, 40, Category.CPU_OP), host("ProfilerStep#1", 0, 100)]
    account = account_of([trace_of_rows(rows, health=(finding,))])
    assert account.ranks[0].view == "host"
    assert account.ranks[0].whole.busy_ns == 40
    assert {one.id: one.affects for one in account.health}["no_kernels"] == ()
    assert any(one.id == "host_view" and one.severity == "warning" for one in account.health)


def test_withheld_steps_are_left_out() -> None:
    finding = Finding("some", "warning", "", 1, ("steps",))
    rows = (kernel(GEMM, 0, 10), host("ProfilerStep#1", 0, 100))
    assert account_of([trace_of_rows(rows, health=(finding,))]).ranks[0].steps == ()


def stepped() -> Trace:
    """Three steps of 100 ns, each with 40 ns of matrix products, the first with 20 more."""
    rows = [kernel(GEMM, 60, 20, correlation=99)]
    rows.append(Row(Category.RUNTIME, "cudaLaunchKernel", 2, 1, correlation=99))
    for i in range(3):
        rows.append(host(f"ProfilerStep#{i + 5}", 100 * i, 100))
        rows.append(Row(Category.RUNTIME, "cudaLaunchKernel", 100 * i + 1, 1, correlation=i + 1))
        rows.append(kernel(GEMM, 100 * i + 10, 40, correlation=i + 1))
    return trace_of_rows(rows)


def test_steps_by_device_work_and_by_host_ranges() -> None:
    by_device = account_of([stepped()]).ranks[0].steps
    assert [(step.start_ns, step.end_ns, step.first) for step in by_device] == [
        (10, 110, True),
        (110, 210, False),
        (210, 300, False),
    ]
    by_host = account_of([stepped()], step_window="cpu").ranks[0].steps
    assert [(step.start_ns, step.end_ns) for step in by_host] == [(0, 100), (100, 200), (200, 300)]
    assert [step.window.compute_ns for step in by_host] == [60, 40, 40]


def model() -> ModelConfig:
    return load_config("llama-2m").config.model


def test_the_waterfall_is_of_the_steady_steps_and_by_our_flop_counter() -> None:
    tokens = 4 * model().seq_length
    counted = model_flops(model(), tokens=tokens, sum_squared_lengths=tokens * model().seq_length).total
    peak = Peak(counted * 1e9 / 25, "made up: the step's FLOPs in 25 ns")
    account = account_of([stepped()], model=model(), tokens_per_step=tokens, peak=peak, achievable=peak)
    drawn = account.waterfall
    assert drawn is not None
    # Steps 6 and 7 last 100 and 90 ns.
    assert drawn.mfu == pytest.approx(100 * 2 * 25 / 190, abs=1e-5)
    assert drawn.window.startswith("steps 6 to 7 (the first recorded step left out)")
    assert sum(bar.points for bar in drawn.bars) == 100.0
    assert drawn.problems == ()


def test_flops_are_shared_by_all_devices_of_the_job() -> None:
    tokens = 4 * model().seq_length
    peak = Peak(1e15, "made up")
    one = account_of([stepped()], model=model(), tokens_per_step=tokens, peak=peak).waterfall
    four = account_of(
        [replace(stepped(), world_size=4)], model=model(), tokens_per_step=tokens, peak=peak
    ).waterfall
    assert one is not None
    assert four is not None
    assert one.mfu == pytest.approx(4 * (four.mfu or 0), rel=1e-3)


def test_impossible_flops_are_a_health_finding() -> None:
    account = account_of([stepped()], model=model(), tokens_per_step=10**6, peak=Peak(1e12, "far too low"))
    assert any(finding.id == "waterfall" and finding.severity == "error" for finding in account.health)


def test_without_flops_or_peak_the_waterfall_says_why_there_is_no_mfu() -> None:
    plain = account_of([stepped()]).waterfall
    assert plain is not None
    assert plain.mfu is None
    assert "model FLOPs" in (plain.reason or "")
    unknown_peak = account_of([stepped()], model=model(), tokens_per_step=512).waterfall
    assert "peak" in ((unknown_peak and unknown_peak.reason) or "")


def test_a_model_without_tokens_is_refused() -> None:
    with pytest.raises(DrivetrainError, match="tokens per step"):
        account_of([stepped()], model=model())


def test_no_trace_and_no_event_are_refused() -> None:
    with pytest.raises(DataError, match="no trace"):
        account_of([])
    with pytest.raises(DataError, match="no event"):
        account_of([trace_of_rows([])])


def test_traces_are_let_go_one_by_one() -> None:
    """Memory is that of one trace, however many ranks there are."""
    alive: list[weakref.ref[Trace]] = []
    most = 0

    def traces() -> Iterator[Trace]:
        nonlocal most
        for rank in range(4):
            gc.collect()
            most = max(most, sum(reference() is not None for reference in alive))
            trace = replace(stepped(), rank=rank)
            alive.append(weakref.ref(trace))
            yield trace
            del trace

    account_of(traces())
    assert most <= 1


# ---- against a sweep --------------------------------------------------------------------------------------------

DEVICE_NAMES = (GEMM, ATTENTION, NORM, ALL_REDUCE, "triton_poi_fused_add_0", "no rule knows this one")
HOST_NAMES = (
    "aten::mm",
    "enumerate(DataLoader)#_Iter.__next__",
    "drivetrain/fetch",
    "drivetrain/checkpoint",
    "drivetrain/forward",
    "cudaStreamSynchronize",
    "aten::item",
    "ProfilerStep#3",
    "ProfilerStep#4",
    "gc.collect",
)


def device_rows() -> st.SearchStrategy[Row]:
    categories = st.sampled_from([Category.KERNEL, Category.KERNEL, Category.MEMCPY, Category.MEMSET])
    return st.builds(
        lambda name, start, duration, stream, category, correlation: replace(
            kernel(name, start, duration, stream=stream, correlation=correlation), category=category
        ),
        st.sampled_from(DEVICE_NAMES),
        st.integers(0, 80),
        st.integers(0, 30),
        st.integers(0, 2),
        categories,
        st.integers(-1, 5),
    )


def host_rows() -> st.SearchStrategy[Row]:
    return st.builds(
        Row,
        st.sampled_from([Category.CPU_OP, Category.RUNTIME, Category.ANNOTATION, Category.PYTHON]),
        st.sampled_from(HOST_NAMES),
        st.integers(0, 80),
        st.integers(0, 40),
        thread=st.sampled_from(["main", "other"]),
        correlation=st.integers(-1, 5),
    )


def sweep(trace: Trace, window: tuple[int, int]) -> dict[str, int]:
    """The split of a window of a device view, one nanosecond after the other."""
    events, classes = trace.events, classify(trace)
    covering: dict[int, set[str]] = {}
    on_device = events.is_device_work()
    main = main_rows(trace)
    for i in range(len(events)):
        name = events.names[events.name[i]]
        found: set[str] = set()
        if on_device[i]:
            kind = KINDS[classes.kind[i]]
            found.add("recompute" if classes.recompute[i] else kind)
        elif main[i]:
            found |= causes_of(name, Category(int(events.category[i])))
        for instant in range(int(events.start_ns[i]), int(events.end_ns[i])):
            covering.setdefault(instant, set()).update(found)
    order = [*COMPUTE_CLASSES, "communication", *COPY_CLASSES, "unclassified", *HOST_CAUSES]
    split: dict[str, int] = {}
    for instant in range(*window):
        here = covering.get(instant, set())
        taken = next((name for name in order if name in here), "idle")
        split[taken] = split.get(taken, 0) + 1
    return split


def causes_of(name: str, category: Category) -> set[str]:
    found = {TABLE.label("cause", name) or ""} - {"", "copy.h2d"}
    if category in (Category.CPU_OP, Category.RUNTIME) and not name.startswith("ProfilerStep"):
        found.add("host.launch")
    if category in (Category.ANNOTATION, Category.PYTHON) and not name.startswith("ProfilerStep"):
        found.add("host.python")
    return found


def main_rows(trace: Trace) -> list[bool]:
    """Rows of threads that train: they launch, or record steps, loading or phases of our loop."""
    events = trace.events
    threads: set[int] = set()
    operators: set[int] = set()
    kernels = set(events.correlation[events.category == Category.KERNEL].tolist()) - {-1}
    for i in range(len(events)):
        if events.is_device_work()[i]:
            continue
        name, category = events.names[events.name[i]], Category(int(events.category[i]))
        if name.startswith(("ProfilerStep", "drivetrain/", "enumerate(")) or (
            category == Category.RUNTIME and events.correlation[i] in kernels
        ):
            threads.add(int(events.thread[i]))
        if category == Category.CPU_OP:
            operators.add(int(events.thread[i]))
    return [int(thread) in (threads or operators) for thread in events.thread]


@settings(max_examples=150, deadline=None)
@given(st.lists(device_rows(), min_size=1, max_size=8), st.lists(host_rows(), max_size=8))
def test_any_trace_closes_and_equals_the_sweep(devices: list[Row], hosts: list[Row]) -> None:
    trace = trace_of_rows([*devices, *hosts])
    rank = account_of([trace], step_window="cpu").ranks[0]
    explained = any(row.category in (Category.CPU_OP, Category.RUNTIME) for row in hosts)
    windows = [(rank.whole, min(r.start for r in devices), max(r.start + r.duration for r in devices))]
    windows += [(step.window, step.start_ns, step.end_ns) for step in rank.steps]
    for window, start, end in windows:
        expected = sweep(trace, (start, end))
        if not explained:
            assert window.unexplained_ns == expected.pop("idle", 0)
        found: dict[str, int] = {}
        for name, value in window.classes.items():
            group = "communication" if name.startswith("communication.") else name
            found[group] = found.get(group, 0) + value
        assert found == expected
        assert window.window_ns == end - start


@settings(max_examples=150, deadline=None)
@given(st.lists(device_rows() | host_rows(), min_size=1, max_size=12), st.sampled_from(["device", "cpu"]))
def test_no_trace_is_ever_above_100_percent(rows: list[Row], step_window: str) -> None:
    account = account_of([trace_of_rows(rows)], step_window=step_window)  # type: ignore[arg-type]
    rank = account.ranks[0]
    for window in (rank.whole, *(step.window for step in rank.steps)):
        assert window.busy_ns is not None
        assert 0 <= window.busy_ns <= window.window_ns
        assert window.idle_ns == window.window_ns - window.busy_ns
        assert sum(window.classes.values()) + window.unexplained_ns == window.window_ns
        parts = (window.compute_ns, window.exposed_communication_ns, window.exposed_copy_ns)
        assert sum(part or 0 for part in parts) + window.classes.get("unclassified", 0) == window.busy_ns
        assert set(window.classes) <= set(CLASSES)
    if account.waterfall is not None:
        assert sum(bar.points for bar in account.waterfall.bars) == 100.0


def test_random_millions_of_nanoseconds_add_up() -> None:
    """Absolute times of the epoch, where a float would lose the nanoseconds."""
    random = np.random.default_rng(1)
    base = 1_790_857_026_000_000_000
    rows = [
        kernel(DEVICE_NAMES[i % 6], base + int(start), int(duration), stream=i % 3)
        for i, (start, duration) in enumerate(random.integers(1, 10**6, (500, 2)))
    ]
    found = whole(*rows)
    assert sum(found.classes.values()) + found.unexplained_ns == found.window_ns
    assert found.window_ns == max(row.start + row.duration for row in rows) - min(row.start for row in rows)
