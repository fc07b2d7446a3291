"""Which operators a generated kernel holds, by its name."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_events import kernel, operator, trace_of

from drivetrain.report.kernel_text import kernel_text
from drivetrain.trace.classify import classify
from drivetrain.trace.generated import GeneratedKernel, generated_kernels, operators_in
from drivetrain.trace.kernels import MatrixProducts


@pytest.mark.parametrize(
    ("name", "operators"),
    [
        ("triton_poi_fused_add_0", ["add"]),
        (
            "triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_3",
            ["_to_copy", "add", "mean", "mul", "pow", "rsqrt"],
        ),
        (
            "triton_red_fused_native_layer_norm_native_layer_norm_backward_12",
            [
                "native_layer_norm",
                "native_layer_norm_backward",
            ],
        ),
        ("triton_poi_fused_mul_silu_silu_backward_1", ["mul", "silu", "silu_backward"]),
        ("graph_0_cpp_fused__log_softmax_nll_loss_forward_3", ["_log_softmax", "nll_loss_forward"]),
        ("cpp_fused_mul_silu_4", ["mul", "silu"]),
        ("triton_poi_fused_add_mul_0_0d1d2d3de", ["add", "mul"]),
        ("triton_tem_fused_mm_0", ["mm"]),
        ("triton_poi_fused__odd_add_1", ["_odd", "add"]),
        ("triton_poi_fused_0", []),
        ("triton_softmax_kernel", []),
        ("ampere_sgemm_128x128_nn", []),
        ("aten::_fused_adamw_", []),
    ],
)
def test_names_of_inductor_tell_their_operators(name: str, operators: list[str]) -> None:
    assert list(operators_in(name)) == operators


def test_names_that_the_trace_has_are_known() -> None:
    name = "triton_poi_fused_add_my_odd_operator_mul_0"
    assert operators_in(name) == ("add", "my", "odd", "operator", "mul")
    assert operators_in(name, {"my_odd_operator"}) == ("add", "my_odd_operator", "mul")


_WORDS = st.sampled_from(
    ["add", "mul", "pow", "rsqrt", "_to_copy", "silu_backward", "native_layer_norm", "_softmax"]
)


@given(
    st.lists(_WORDS, min_size=1, max_size=10),
    st.integers(0, 999),
    st.sampled_from(["triton_poi", "graph_3_cpp"]),
)
def test_what_inductor_joins_is_taken_apart_again(words: list[str], number: int, begin: str) -> None:
    assert operators_in(f"{begin}_fused_{'_'.join(words)}_{number}") == tuple(words)


@given(st.text())
def test_any_name_is_read(name: str) -> None:
    assert all(operators_in(name))


def test_generated_kernels_of_a_device_and_of_the_host_are_listed(tmp_path: Path) -> None:
    device = trace_of(
        tmp_path,
        [
            kernel("triton_poi_fused_add_0", 0, 5),
            kernel("triton_poi_fused_add_0", 10, 5),
            kernel("triton_per_fused_mean_pow_rsqrt_1", 20, 30),
            kernel("ampere_sgemm_128x128_nn", 60, 5),
        ],
    )
    found = generated_kernels(device.events, classify(device).kind)
    assert [(one.name, one.operators, one.count, one.total_ns) for one in found] == [
        ("triton_per_fused_mean_pow_rsqrt_1", ("mean", "pow", "rsqrt"), 1, 30_000),
        ("triton_poi_fused_add_0", ("add",), 2, 10_000),
    ]
    host = trace_of(tmp_path, [operator("graph_1_cpp_fused_mul_silu_4", 0, 7), operator("aten::mm", 10, 5)])
    (one,) = generated_kernels(host.events, classify(host).kind)
    assert one == GeneratedKernel(
        "graph_1_cpp_fused_mul_silu_4", "compute.activation", ("mul", "silu"), 1, 7_000
    )


def test_the_text_lists_them_with_their_operators() -> None:
    one = GeneratedKernel("triton_poi_fused_add_mul_0", "compute.elementwise", ("add", "mul"), 3, 2_000_000)
    lines = kernel_text(
        (), MatrixProducts((), 0, 0), (), (), generated=[one], count=2, ceiling=None
    ).splitlines()
    assert lines[1].split() == [
        "2.000",
        "ms",
        "3x",
        "compute.elementwise",
        "triton_poi_fused_add_mul_0:",
        "add,",
        "mul",
    ]
