"""What a trace shows of how the work was done: names, dtypes of matrix products, attention, payloads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from event_tables import Row, trace_of_rows
from event_tables import kernel as kernel_row
from kineto_events import SHARED_TRACES, annotation, kernel, launch, operator, shared_trace, trace_of

from drivetrain.measure.optimisation import Count, HostMemory, Observation
from drivetrain.trace.classify import classify
from drivetrain.trace.observe import dtype_of_kernel, observe
from drivetrain.trace.read import read_trace
from drivetrain.trace.table import Category, Trace

needs_shared = pytest.mark.skipif(not SHARED_TRACES.is_dir(), reason="the shared traces are not here")


def seen_in(trace: Trace) -> Observation:
    return observe(trace, classify(trace))


def shapes(*types: str) -> dict[str, Any]:
    return {"Input Dims": [[8, 8] for _ in types], "Input type": list(types)}


def run(
    name: str, kernel_name: str, number: int, at: float, takes: float, **arguments: Any
) -> list[dict[str, Any]]:
    """An operator 10 us long, its launch, and its kernel, 100 us later."""
    return [
        operator(name, at, 10, external_id=number, **arguments),
        launch(at + 5, correlation=number, external_id=number),
        kernel(kernel_name, at + 100, takes, correlation=number),
    ]


# ---- dtypes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "bf16"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "bf16"),
        ("nvjet_tst_144x128_64x6_2x1_v_bz_bias_TNN", "bf16"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", "fp16"),
        ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn", "fp16"),
        ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", "fp16"),
        ("volta_h884gemm_256x128_ldg8_nn", "fp16"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_16x4_nt_align1>(Params)", "tf32"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma", "tf32"),
        ("ampere_sgemm_128x64_nn", "fp32"),
        ("void gemmSN_NN_kernel<float, 256, 4, 2, 8, 4, 4, false, cublasGemvTensorStridedBatched>", "fp32"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(Params)", "fp32"),
        ("volta_dgemm_128x64_nt", "fp64"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT16x16x256_MI16x16x1_SN_LDSB1", "bf16"),
        ("Cijk_Ailk_Bljk_HHS_BH_MT32x32x64_MI16x16x16x1_SN", "fp16"),
        ("Cijk_Ailk_Bljk_SB_MT64x64x16_SN", "fp32"),
        ("void deep_gemm::fp8_gemm_kernel<4096u, 7168u>(__nv_bfloat16*)", "fp8"),
        ("bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2", "unknown"),
        ("_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS8_S8_EE", None),
        ("triton_tem_fused_mm_3", None),
    ],
)
def test_the_name_of_a_kernel_tells_the_dtype_of_its_factors(name: str, dtype: str | None) -> None:
    assert dtype_of_kernel(name) == dtype


def test_a_kernel_that_does_not_tell_its_dtype_has_that_of_its_operator(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        [
            *run("aten::mm", "triton_tem_fused_mm_3", 1, 0, 30, **shapes("c10::BFloat16", "c10::BFloat16")),
            # The operator says fp32; only the kernel knows that it ran as TF32.
            *run(
                "aten::mm",
                "cutlass_80_tensorop_s1688gemm_128x128_16x4_nt",
                2,
                200,
                20,
                **shapes("float", "float"),
            ),
            *run("aten::mm", "triton_tem_fused_mm_4", 3, 400, 10),
        ],
    )
    seen = seen_in(trace)
    assert seen.matmul_dtypes == {
        "bf16": Count(1, 30_000),
        "tf32": Count(1, 20_000),
        "unknown": Count(1, 10_000),
    }
    assert not seen.missing & {"operators", "kernels", "shapes"}


def test_without_shapes_an_operator_s_dtype_is_unknown_and_shapes_are_missing(tmp_path: Path) -> None:
    seen = seen_in(trace_of(tmp_path, [operator("aten::mm", 0, 10), operator("aten::add", 10, 10)]))
    assert seen.matmul_dtypes == {"unknown": Count(1, 10_000)}
    assert seen.missing == {"kernels", "ranges", "shapes", "collectives"}


def test_the_bias_of_addmm_does_not_decide_its_dtype(tmp_path: Path) -> None:
    types = shapes("float", "c10::BFloat16", "c10::BFloat16")
    assert set(seen_in(trace_of(tmp_path, [operator("aten::addmm", 0, 10, **types)])).matmul_dtypes) == {
        "bf16"
    }


# ---- attention --------------------------------------------------------------------------------------------------

FLASH = (
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>(Params)"
)
EFFICIENT = "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)"
CUDNN = (
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_128x128x128_4x1x1_cga1x1x1_kernel0_0"
)
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, true>(float*)"


@pytest.mark.parametrize(
    ("operator_name", "kernel_name", "implementation"),
    [
        ("aten::_flash_attention_forward", FLASH, "flash"),
        ("aten::_efficient_attention_forward", EFFICIENT, "efficient"),
        ("aten::_scaled_dot_product_cudnn_attention", CUDNN, "cudnn"),
        # One Triton kernel of ROCm serves both: the operator decides.
        ("aten::_efficient_attention_forward", "attn_fwd", "efficient"),
        ("aten::_flash_attention_forward", "attn_fwd", "flash"),
        ("FlexAttention", "triton_tem_fused_flex_attention_0", "flex"),
        ("aten::_softmax", SOFTMAX, "eager"),
    ],
)
def test_attention_is_told_by_operator_and_kernel(
    tmp_path: Path, operator_name: str, kernel_name: str, implementation: str
) -> None:
    seen = seen_in(trace_of(tmp_path, run(operator_name, kernel_name, 1, 0, 30)))
    assert seen.attention == {implementation: Count(1, 30_000)}


def test_a_softmax_within_math_attention_is_math_and_so_is_its_backward(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        [
            operator("aten::_scaled_dot_product_attention_math", 0, 100, external_id=9),
            *run("aten::_softmax", SOFTMAX, 1, 20, 30),
            *run("aten::_softmax_backward_data", SOFTMAX.replace("forward", "backward"), 2, 300, 40),
        ],
    )
    assert seen_in(trace).attention == {"math": Count(2, 70_000)}


# ---- steps, names and payloads ----------------------------------------------------------------------------------


def test_kernels_count_for_the_step_that_launched_them(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        [
            *run("aten::mm", "ampere_sgemm_128x64_nn", 1, 0, 10),  # before the steps, though it runs in them
            annotation("ProfilerStep#3", 50, 100),
            annotation("ProfilerStep#4", 150, 100),
            *run("aten::mm", "ampere_sgemm_128x64_nn", 2, 160, 10),
            *run(
                "aten::mm", "ampere_sgemm_128x64_nn", 3, 230, 10
            ),  # launched in the last step, runs after it
            *run("aten::mm", "ampere_sgemm_128x64_nn", 4, 300, 10),
        ],
    )
    seen = seen_in(trace)
    assert seen.num_steps == 2
    assert seen.kernels == {"ampere_sgemm_128x64_nn": Count(2, 20_000)}
    assert seen.operators == {"aten::mm": Count(2, 20_000)}
    assert "ranges" in seen.missing  # step marks alone are the profiler's own


def test_payloads_of_collectives_are_in_order_of_time() -> None:
    rows = [
        Row(Category.ANNOTATION, "gloo:all_reduce", at, 5, bytes=size)
        for at, size in ((0, 300), (10, 100), (20, -1), (30, 200))
    ]
    seen = seen_in(trace_of_rows([*rows, Row(Category.CPU_OP, "aten::mm", 0, 40)]))
    assert seen.collective_bytes == {"all_reduce": (300, 100, 200)}
    assert seen.ranges == {"gloo:all_reduce": Count(4, 20)}
    assert "collectives" not in seen.missing


def test_a_trace_of_kernels_alone_misses_operators_ranges_and_shapes() -> None:
    seen = seen_in(trace_of_rows([kernel_row("ampere_sgemm_128x64_nn", 0, 10)]))
    assert seen.num_steps == 0
    assert seen.matmul_dtypes == {"fp32": Count(1, 10)}
    assert seen.missing == {"operators", "ranges", "shapes"}


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        (
            {"host_memory": {"keeps_freed": True, "reason": None, "page_faults_per_step": 7}},
            HostMemory(True, None, 7.0),
        ),
        ({"host_memory": {"keeps_freed": None, "reason": "unseen"}}, HostMemory(None, "unseen")),
        # Another trainer may write what it likes there.
        (
            {"host_memory": {"keeps_freed": "yes", "reason": 3, "page_faults_per_step": True}},
            HostMemory(None),
        ),
        ({"host_memory": "kept"}, None),
        ({}, None),
        ("a word", None),
    ],
)
def test_host_memory_is_what_the_run_wrote_beside_its_records(
    tmp_path: Path, written: Any, seen: HostMemory | None
) -> None:
    assert seen_in(trace_of(tmp_path, [operator("aten::mm", 0, 9)], drivetrain=written)).host_memory == seen


# ---- real traces ------------------------------------------------------------------------------------------------


@needs_shared
@pytest.mark.parametrize(
    ("path", "dtypes", "attention"),
    [
        ("tracelens/tests/traces/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz", {"bf16"}, "flash"),
        ("tracelens/tests/traces/inference/vllm_decode_full/graph_execution.json.gz", {"bf16"}, "flash"),
        ("torch213-cpu-gloo/ddp_rank0.json.gz", {"fp32"}, "flash"),
        ("tracelens/tests/traces/mi300/ddp_resnet18_no_pool/train_resnet18.json.gz", {"bf16"}, None),
    ],
)
def test_real_traces_show_their_dtype_and_attention(
    path: str, dtypes: set[str], attention: str | None
) -> None:
    seen = seen_in(shared_trace(path))
    largest = max(seen.matmul_dtypes.items(), key=lambda item: item[1].calls)[0]
    assert {largest} == dtypes
    assert (
        max(seen.attention.items(), key=lambda item: item[1].ns)[0] if seen.attention else None
    ) == attention


@needs_shared
def test_every_matmul_of_a_real_trace_is_counted_once() -> None:
    trace = shared_trace("torch213-cpu-gloo/ddp_rank0.json.gz")
    seen = seen_in(trace)
    multiplied = sum(
        count.calls
        for name, count in seen.operators.items()
        if name in ("aten::mm", "aten::addmm", "aten::bmm")
    )
    assert sum(count.calls for count in seen.matmul_dtypes.values()) == multiplied
    assert len(seen.collective_bytes["all_reduce"]) == 12


# ---- a profile made here ----------------------------------------------------------------------------------------


@pytest.fixture
def profiled(tmp_path: Path) -> Callable[..., Observation]:
    """Profile three steps of a tiny model on the CPU."""
    torch = pytest.importorskip("torch", reason="a profile is made with torch")

    def profile(*, bf16: bool = False, fused: bool = False, compiled: bool = False) -> Observation:
        dtype = torch.bfloat16 if bf16 else torch.float32
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        call = torch.compile(model, backend="aot_eager") if compiled else model
        heads = torch.randn(1, 2, 8, 4, dtype=dtype, requires_grad=True)

        def step() -> None:
            attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            (call(torch.randn(4, 8, dtype=dtype)).sum() + attended.sum()).backward()
            optimizer.step()

        step()  # A compiler's own work is not a step's.
        path = tmp_path / f"profile-{bf16}-{fused}-{compiled}.json"
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as recorded:
            for _ in range(3):
                step()
        recorded.export_chrome_trace(str(path))
        return seen_in(read_trace(path, cache=False))

    return profile


def test_a_bf16_profile_shows_bf16_and_a_plain_one_fp32(profiled: Callable[..., Observation]) -> None:
    assert set(profiled(bf16=True).matmul_dtypes) == {"bf16"}
    assert set(profiled(bf16=False).matmul_dtypes) == {"fp32"}


def test_a_profile_shows_the_attention_of_the_cpu(profiled: Callable[..., Observation]) -> None:
    assert set(profiled().attention) == {"flash"}


def test_a_profile_shows_whether_the_update_was_fused(profiled: Callable[..., Observation]) -> None:
    assert "aten::_fused_adamw_" in profiled(fused=True).operators
    assert "aten::_fused_adamw_" not in profiled(fused=False).operators


def test_a_profile_shows_whether_the_model_was_compiled(profiled: Callable[..., Observation]) -> None:
    def regions(seen: Observation) -> list[str]:
        return [name for name in seen.operators if name.startswith("Torch-Compiled Region")]

    assert regions(profiled(compiled=True))
    assert not regions(profiled(compiled=False))
