"""Top kernels, matrix products by shape, small operators between fusible neighbours, launch-bound stretches."""

from pathlib import Path
from typing import Any

import pytest
from kineto_events import SHARED_TRACES, kernel, launch, operator, shared_trace, trace_of

from drivetrain.trace.classify import classify
from drivetrain.trace.kernels import MatrixProduct, matrix_products, small_operators, top_kernels
from drivetrain.trace.launch_bound import launch_bound_stretches
from drivetrain.trace.operator_shapes import Product, Tensor, output_of, product_of, tensors_of

ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)"
GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
BF16, FP32 = "c10::BFloat16", "float"
needs_shared = pytest.mark.skipif(not SHARED_TRACES.is_dir(), reason="the shared traces are not here")


def _shapes(*tensors: tuple[list[int], str]) -> dict[str, Any]:
    return {"Input Dims": [dims for dims, _ in tensors], "Input type": [word for _, word in tensors]}


def _run(
    name: str,
    kernel_name: str,
    number: int,
    *,
    at: float,
    runs_at: float,
    takes: float,
    **arguments: Any,
) -> list[dict[str, Any]]:
    """An operator 10 us long, its launch in the middle, and its kernel."""
    return [
        operator(name, at, 10, external_id=number, **arguments),
        launch(at + 5, correlation=number, external_id=number),
        kernel(kernel_name, runs_at, takes, correlation=number),
    ]


# ---- top kernels ------------------------------------------------------------------------------------------------


def test_kernels_of_one_name_are_added_up_with_the_launch_of_the_longest(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        [
            kernel(GEMM, 0, 10, grid=[4, 4, 1], **{"est. achieved occupancy %": 10}),
            kernel(GEMM, 10, 30, grid=[8, 2, 1], **{"est. achieved occupancy %": 25}),
            kernel(ADD, 50, 60, grid=[1000, 1, 1]),
        ],
        deviceProperties=[{"id": 0, "name": "NVIDIA A100", "numSms": 108}],
    )
    found = top_kernels(trace, classify(trace))
    assert [(total.name, total.kind, total.count, total.total_ns) for total in found] == [
        (ADD, "compute.elementwise", 1, 60_000),
        (GEMM, "compute.matmul", 2, 40_000),
    ]
    assert [total.share for total in found] == [0.6, 0.4]
    add, gemm = found
    assert (gemm.blocks, gemm.multiprocessors, gemm.occupancy, gemm.longest_ns) == (16, 108, 0.25, 30_000)
    assert gemm.leaves_multiprocessors_idle
    assert not add.leaves_multiprocessors_idle
    assert add.occupancy is None
    assert len(top_kernels(trace, classify(trace), count=1)) == 1


def test_a_trace_without_kernels_has_no_top(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [operator("aten::mm", 0, 10)])
    assert top_kernels(trace, classify(trace)) == ()
    assert launch_bound_stretches(trace) == ()
    assert small_operators(trace, classify(trace)) == ()


# ---- shapes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensors", "expected"),
    [
        ("aten::mm", [([8, 16], BF16), ([16, 32], BF16)], (1, 8, 32, 16)),
        ("aten::addmm", [([32], BF16), ([8, 16], BF16), ([16, 32], BF16)], (1, 8, 32, 16)),
        ("aten::bmm", [([3, 8, 16], BF16), ([3, 16, 32], BF16)], (3, 8, 32, 16)),
        ("aten::baddbmm", [([3, 8, 32], BF16), ([3, 8, 16], BF16), ([3, 16, 32], BF16)], (3, 8, 32, 16)),
        ("aten::linear", [([2, 4, 16], BF16), ([32, 16], BF16), ([32], BF16)], (1, 8, 32, 16)),
        ("aten::matmul", [([2, 4, 16], BF16), ([16, 32], BF16)], (1, 8, 32, 16)),
        ("aten::mm", [([8, 16], BF16), ([17, 32], BF16)], None),
        ("aten::mm", [([8, 16], BF16)], None),
        ("aten::mm", [([0, 16], BF16), ([16, 32], BF16)], None),
        ("aten::add", [([8, 16], BF16), ([8, 16], BF16)], None),
    ],
)
def test_a_product_is_read_from_the_shapes_of_its_factors(
    name: str, tensors: list[tuple[list[int], str]], expected: tuple[int, ...] | None
) -> None:
    product = product_of(name, tensors_of(_shapes(*tensors)))
    assert (product and (product.batch, product.m, product.n, product.k)) == expected
    if product is not None:
        assert product.operations == 2 * product.batch * product.m * product.n * product.k
        assert product.dtype == "bf16"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"Input Dims": "gone", "Input type": []},
        {"Input Dims": [[1]], "Input type": []},
        {
            "Input Dims": [[[2, 3], [4, 5]], [-1], ["a"], []],
            "Input type": ["TensorList", "float", "float", "Scalar"],
        },
    ],
)
def test_arguments_without_usable_shapes_give_no_tensors(arguments: dict[str, Any]) -> None:
    assert all(tensor is None for tensor in tensors_of(arguments))


def test_element_wise_results_broadcast() -> None:
    tensors = tensors_of(_shapes(([4, 1, 8], BF16), ([3, 1], FP32), ([], "double")))
    assert output_of("aten::add", tensors) == Tensor((4, 3, 8), "bf16", 2)
    assert output_of("aten::copy_", tensors_of(_shapes(([4], FP32), ([4], BF16)))) == Tensor((4,), "fp32", 4)
    assert output_of("aten::add", tensors_of(_shapes(([4], FP32), ([5], FP32)))) is None
    assert output_of("aten::add", ()) is None


# ---- matrix products --------------------------------------------------------------------------------------------


def test_products_of_one_shape_are_added_up_and_give_the_achieved_rate(tmp_path: Path) -> None:
    shapes = _shapes(([1024, 512], BF16), ([512, 2048], BF16))
    events = [
        *_run("aten::mm", GEMM, 1, at=0, runs_at=100, takes=10, **shapes),
        *_run("aten::mm", GEMM, 2, at=20, runs_at=120, takes=30, **shapes),
        kernel("void splitKreduce_kernel<float>(int)", 150, 10, correlation=2),
        *_run("aten::mm", GEMM, 3, at=40, runs_at=200, takes=50),
    ]
    trace = trace_of(tmp_path, events)
    found = matrix_products(trace, classify(trace))
    assert (found.covered_ns, found.matmul_ns) == (50_000, 100_000)
    (shape,) = found.shapes
    assert (shape.count, shape.total_ns) == (2, 50_000)
    assert shape.flops_per_second == pytest.approx(2 * 2 * 1024 * 512 * 2048 / 50e-6)
    assert shape.shape_notes == ()


@pytest.mark.parametrize(
    ("m", "n", "k", "said"),
    [
        (512, 50257, 768, "n = 50257: rows are not aligned to 16 bytes; 50264 would be"),
        (512, 1024, 100, "k = 100: rows are not aligned to 16 bytes; 104 would be"),
        (1, 4096, 4096, "m = 1: a tile of the device is at least 64 wide"),
        (4096, 4096, 32, "k = 32: few products"),
    ],
)
def test_shapes_that_keep_tensor_cores_from_running_full_are_named(m: int, n: int, k: int, said: str) -> None:
    notes = MatrixProduct("aten::mm", Product(1, m, n, k, "bf16", 2), 1, 1000).shape_notes
    assert len(notes) == 1
    assert notes[0].startswith(said)


def test_without_shapes_nothing_is_covered(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [kernel(GEMM, 0, 10)])
    found = matrix_products(trace, classify(trace))
    assert (found.shapes, found.covered_ns, found.matmul_ns) == ((), 0, 10_000)


@needs_shared
def test_a_forward_pass_on_an_h100_runs_its_products_below_the_peak() -> None:
    trace = shared_trace("tracelens/tests/traces/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz")
    found = matrix_products(trace, classify(trace))
    assert found.covered_ns > 0.6 * found.matmul_ns
    best = found.shapes[0]
    assert (best.product.m, best.product.n, best.product.k) == (16 * 559, 2816, 1024)
    assert 0.3 * 989e12 < (best.flops_per_second or 0) < 989e12


@needs_shared
def test_products_of_a_host_only_run_are_found_too() -> None:
    trace = shared_trace("torch213-cpu-gloo/ddp_rank0.json.gz")
    found = matrix_products(trace, classify(trace))
    assert found.covered_ns == found.matmul_ns > 0


# ---- small operators --------------------------------------------------------------------------------------------


def _three(
    middle: str, *, sizes: tuple[int, int, int] = (1000, 1000, 1000), takes: float = 5
) -> list[dict[str, Any]]:
    names, times = ("aten::mul", middle, "aten::add"), (10.0, takes, 10.0)
    events: list[dict[str, Any]] = []
    for i, (name, size, time) in enumerate(zip(names, sizes, times, strict=True)):
        tensors = _shapes(([size], BF16), ([size], BF16))
        events += _run(name, ADD, i + 1, at=20.0 * i, runs_at=100.0 + 20 * i, takes=time, **tensors)
    return events


def test_a_small_operator_between_fusible_neighbours_is_found_with_its_traffic(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, _three("aten::masked_fill"))
    (found,) = small_operators(trace, classify(trace))
    assert (found.before, found.operator, found.after) == ("aten::mul", "aten::masked_fill", "aten::add")
    assert (found.count, found.kernel_ns, found.saved_bytes) == (1, 5_000, 2 * 2000 + 2 * 2000)


@pytest.mark.parametrize(
    "events",
    [
        _three("aten::masked_fill", sizes=(1000, 999, 1000)),
        _three("aten::masked_fill", takes=25),
        [*_three("aten::masked_fill"), kernel(GEMM, 131, 1)],
        [event for event in _three("aten::masked_fill") if event["cat"] != "cpu_op"],
    ],
    ids=["sizes_differ", "not_small", "no_neighbours", "no_operators"],
)
def test_what_is_not_connected_neighbouring_or_small_is_not_found(tmp_path: Path, events: list[Any]) -> None:
    trace = trace_of(tmp_path, events)
    assert small_operators(trace, classify(trace)) == ()


# ---- launch-bound stretches -------------------------------------------------------------------------------------


def test_a_device_that_waits_for_launches_is_found_with_the_operators(tmp_path: Path) -> None:
    events = [
        *_run("aten::mul", ADD, 1, at=0, runs_at=10, takes=5),
        *_run("aten::slow", ADD, 2, at=100, runs_at=108, takes=5),
        *_run("aten::mul", ADD, 3, at=120, runs_at=130, takes=50),
        *_run("aten::mul", ADD, 4, at=131, runs_at=180, takes=5),
        *_run("aten::mul", ADD, 5, at=141, runs_at=185, takes=5),
        *_run("aten::mul", ADD, 6, at=151, runs_at=190, takes=5),
        *_run("aten::late", ADD, 7, at=300, runs_at=310, takes=5),
    ]
    stretches = launch_bound_stretches(trace_of(tmp_path, events))
    late, early = stretches
    assert (late.start_ns, late.end_ns, late.records) == (195_000, 315_000, 1)
    assert late.waiting_ns == 111_000
    assert late.operators == (("aten::late", 111_000),)
    assert (early.start_ns, early.end_ns, early.records) == (15_000, 180_000, 2)
    assert early.operators == (("aten::slow", 91_000), ("aten::mul", 13_000))
    assert early.waiting_ns == 104_000


def test_a_queue_that_never_runs_dry_is_not_launch_bound(tmp_path: Path) -> None:
    events = [
        event
        for i in range(5)
        for event in _run("aten::mul", ADD, i, at=10 * i, runs_at=100 + 50 * i, takes=50)
    ]
    assert launch_bound_stretches(trace_of(tmp_path, events)) == ()


def test_a_gap_after_the_launch_is_not_waiting_for_it(tmp_path: Path) -> None:
    """The kernel was launched while the device was busy; what held it up after that was no launch."""
    events = [
        *_run("aten::mul", ADD, 1, at=0, runs_at=10, takes=50),
        *_run("aten::mul", ADD, 2, at=20, runs_at=90, takes=5),
    ]
    assert launch_bound_stretches(trace_of(tmp_path, events)) == ()


@needs_shared
def test_an_eager_decode_is_one_long_launch_bound_stretch() -> None:
    trace = shared_trace("tracelens/tests/traces/b200/eager_trace.json.gz")
    stretch = launch_bound_stretches(trace)[0]
    assert stretch.waiting_ns > 0.8 * (stretch.end_ns - stretch.start_ns)
    assert stretch.operators[0][0] in ("aten::addmm", "vllm::moe_forward")


def test_an_occupancy_of_0_is_the_profiler_s_word_for_unknown(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [kernel(GEMM, 0, 10, grid=[4, 4, 1], **{"est. achieved occupancy %": 0})])
    (gemm,) = top_kernels(trace, classify(trace))
    assert gemm.occupancy is None
