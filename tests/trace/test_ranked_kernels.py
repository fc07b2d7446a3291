"""The kernels with the most time: their rates by recorded shapes, and what stands in for something else."""

from pathlib import Path
from typing import Any

import pytest
from kineto_events import annotation, kernel, launch, operator, trace_of

from drivetrain.trace.account import account_of
from drivetrain.trace.classify import classify
from drivetrain.trace.ranked_kernels import RankedKernel, RankedKernels, ranked_kernels
from drivetrain.trace.table import Trace

ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)"
GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
SOFTMAX = "void at::native::(anonymous namespace)::softmax_warp_forward<float, float>(int)"
BF16, FP32 = "c10::BFloat16", "float"


def shapes(*tensors: tuple[list[int], str]) -> dict[str, Any]:
    return {"Input Dims": [dims for dims, _ in tensors], "Input type": [word for _, word in tensors]}


def run(
    name: str, kernel_name: str, number: int, at: float, takes: float, **arguments: Any
) -> list[dict[str, Any]]:
    """An operator, its launch and its kernel."""
    return [
        operator(name, at, 10, external_id=number, **arguments),
        launch(at + 5, correlation=number, external_id=number),
        kernel(kernel_name, at + 6, takes, correlation=number),
    ]


def ranked(trace: Trace, **more: Any) -> RankedKernels:
    return ranked_kernels(trace, classify(trace), **more)


def only(found: RankedKernels, name: str) -> RankedKernel:
    (one,) = [one for one in found.kernels if one.name == name]
    return one


MM = shapes(([1000, 100], BF16), ([100, 50], BF16))


def test_a_product_has_the_rate_of_its_shapes_and_an_addition_that_of_its_bytes(tmp_path: Path) -> None:
    plus = shapes(([1000, 10], FP32), ([1000, 10], FP32))
    trace = trace_of(
        tmp_path, [*run("aten::mm", GEMM, 1, 0, 10, **MM), *run("aten::add", ADD, 2, 100, 6, **plus)]
    )
    found = ranked(trace)
    gemm, add = only(found, GEMM), only(found, ADD)
    assert gemm.work is not None
    assert (gemm.work.amount, gemm.work.unit, gemm.work.dtype) == (2 * 1000 * 100 * 50, "FLOP", "bf16")
    assert gemm.work.per_second == pytest.approx(1e7 / 10e-6)
    assert add.work is not None
    assert (add.work.amount, add.work.unit) == (3 * 40_000, "B")
    assert (gemm.share, add.share) == (0.625, 0.375)
    assert (found.names, found.total_ns, found.on_device) == (2, 16_000, True)


def test_without_shapes_a_rate_is_unknown_and_the_reason_is_given(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, run("aten::mm", GEMM, 1, 0, 10))
    gemm = only(ranked(trace), GEMM)
    assert gemm.work is None
    assert gemm.unknown == "no shapes were recorded for it"


def test_of_an_operator_with_two_kernels_neither_gets_its_work(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        [
            *run("aten::mm", GEMM, 1, 0, 10, **MM),
            launch(8, correlation=9, external_id=1),
            kernel("splitKreduce_kernel", 20, 3, correlation=9),
        ],
    )
    assert only(ranked(trace), GEMM).work is None


def test_without_a_device_the_operators_of_the_training_thread_are_ranked(tmp_path: Path) -> None:
    loader = annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 100, 50)
    events = [
        annotation("ProfilerStep#1", 0, 1000),
        operator("aten::mm", 0, 40, **MM),
        loader,
        operator("aten::mul", 110, 30, external_id=3),
    ]
    found = ranked(trace_of(tmp_path, events))
    assert [(one.name, one.calls, one.total_ns) for one in found.kernels] == [("aten::mm", 1, 40_000)]
    assert not found.on_device
    assert found.num_steps == 1
    assert found.kernels[0].work is not None


def test_only_the_recorded_steps_count(tmp_path: Path) -> None:
    events = [
        annotation("ProfilerStep#1", 0, 100),
        annotation("ProfilerStep#2", 100, 100),
        *run("aten::mm", GEMM, 1, 10, 10),
        *run("aten::mm", GEMM, 2, 110, 10),
        *run("aten::mm", GEMM, 3, 500, 10),
    ]
    found = ranked(trace_of(tmp_path, events))
    assert (found.num_steps, only(found, GEMM).calls) == (2, 2)


@pytest.mark.parametrize(
    ("absent", "name", "words"),
    [
        (("bf16",), GEMM, None),
        (("fp8",), GEMM, "bf16 in place of fp8"),
        (("compile",), ADD, "an operator of its own in place of compiled code"),
        ((), ADD, None),
        ((), SOFTMAX, None),
        (("flash",), SOFTMAX, "plain attention in place of flash"),
    ],
)
def test_what_stands_in_for_something_expected_is_marked(
    tmp_path: Path, absent: tuple[str, ...], name: str, words: str | None
) -> None:
    trace = trace_of(
        tmp_path,
        [
            *run("aten::mm", GEMM, 1, 0, 10, **MM),
            *run("aten::add", ADD, 2, 100, 6),
            *run("aten::_softmax", SOFTMAX, 3, 200, 6),
        ],
    )
    assert only(ranked(trace, absent=absent), name).fallback == words


def test_pytorchs_plain_attention_is_a_fallback_that_nobody_had_to_expect(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        [
            operator("aten::_scaled_dot_product_attention_math", 190, 40),
            *run("aten::_softmax", SOFTMAX, 3, 200, 6),
        ],
    )
    assert only(ranked(trace), SOFTMAX).fallback == "PyTorch's plain attention in place of a fused one"


def test_an_operator_that_another_backend_served_is_marked_by_its_region(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        [annotation("drivetrain/operator/rms_norm/eager", 90, 40), *run("aten::add", ADD, 2, 100, 6)],
    )
    served = {"rms_norm/eager": "fusion.rms_norm = liger"}
    assert (
        only(ranked(trace, served_otherwise=served), ADD).fallback
        == "eager in place of fusion.rms_norm = liger"
    )
    assert only(ranked(trace), ADD).fallback is None


def test_a_trace_without_work_has_no_kernels(tmp_path: Path) -> None:
    assert ranked(trace_of(tmp_path, [annotation("a range", 0, 10)])).kernels == ()


def test_the_account_says_of_each_group_what_compute_hides(tmp_path: Path) -> None:
    reduce = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"
    trace = trace_of(
        tmp_path,
        [kernel(GEMM, 0, 100), kernel(reduce, 60, 80, stream=20)],
    )
    (rank,) = account_of([trace]).ranks
    assert rank.whole.overlapped_communication_ns == 40_000
    assert sum((rank.whole.hidden_communication_ns or {}).values()) == 40_000
