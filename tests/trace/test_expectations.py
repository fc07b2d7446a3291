"""What a job was meant to run, held against its records: silent fallbacks become findings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kineto_events import SHARED_TRACES, annotation, kernel, launch, operator, shared_trace, trace_of

from drivetrain.config import load_config
from drivetrain.errors import DrivetrainError
from drivetrain.trace.classify import classify
from drivetrain.trace.expectations import (
    EXPECTATIONS,
    checked_words,
    expected_findings,
    expected_of,
    merged_findings,
)
from drivetrain.trace.health import Finding
from drivetrain.trace.table import Trace

needs_shared = pytest.mark.skipif(not SHARED_TRACES.is_dir(), reason="the shared traces are not here")

FLASH = (
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>(Params)"
)
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, true>(float*)"
BF16 = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
FP32 = "ampere_sgemm_128x64_nn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)"
FUSED = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<3>,"
    " at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 3, at::native::ADAM_MODE::ADAMW, false>>()"
)


def run(name: str, kernel_name: str, number: int, at: float, takes: float) -> list[dict[str, Any]]:
    """An operator 10 us long, its launch, and its kernel at once."""
    return [
        operator(name, at, 10, external_id=number),
        launch(at + 5, correlation=number, external_id=number),
        kernel(kernel_name, at + 5, takes, correlation=number),
    ]


def findings_of(folder: Path, events: Sequence[dict[str, Any]], *words: str) -> tuple[Finding, ...]:
    """Findings of two steps of 500 us that hold the events."""
    marks = [annotation("ProfilerStep#1", 0, 500), annotation("ProfilerStep#2", 500, 500)]
    return judged(trace_of(folder, [*marks, *events]), *words)


def judged(trace: Trace, *words: str) -> tuple[Finding, ...]:
    return expected_findings(trace, classify(trace), words)


def test_what_was_expected_and_ran_is_no_finding(tmp_path: Path) -> None:
    events = [
        *run("aten::_flash_attention_forward", FLASH, 1, 10, 30),
        *run("aten::mm", BF16, 2, 100, 30),
        annotation("Optimizer.step#AdamW.step", 300, 50),
        *run("aten::_fused_adamw_", FUSED, 3, 310, 30),
        annotation("## Call CompiledFxGraph fabc ##", 200, 20),
    ]
    assert findings_of(tmp_path, events, "flash", "bf16", "fused-optimizer", "compile") == ()


def test_attention_that_fell_back_is_found_with_what_ran_its_time_and_its_share(tmp_path: Path) -> None:
    events = [
        operator("aten::_scaled_dot_product_attention_math", 0, 100, external_id=9),
        *run("aten::_softmax", SOFTMAX, 1, 20, 30),
    ]
    (finding,) = findings_of(tmp_path, events, "flash")
    assert (finding.id, finding.severity) == ("expected_flash_absent", "warning")
    assert "math 0.015 ms a step (100% of attention time)" in finding.message


def test_attention_that_fell_back_for_one_shape_only_is_found_too(tmp_path: Path) -> None:
    events = [
        *run("aten::_flash_attention_forward", FLASH, 1, 10, 60),
        *run("aten::_softmax", SOFTMAX, 2, 100, 20),
    ]
    (finding,) = findings_of(tmp_path, events, "flash")
    assert finding.id == "expected_flash_partly"
    assert "flash 0.030 ms a step (75% of attention time), eager 0.010 ms a step (25%" in finding.message


def test_a_router_s_small_softmax_is_no_fallback_of_attention(tmp_path: Path) -> None:
    events = [
        *run("aten::_flash_attention_forward", FLASH, 1, 10, 100),
        *run("aten::_softmax", SOFTMAX, 2, 200, 2),
    ]
    assert findings_of(tmp_path, events, "flash") == ()


def test_products_in_fp32_where_bf16_was_expected_are_found(tmp_path: Path) -> None:
    (finding,) = findings_of(tmp_path, run("aten::mm", FP32, 1, 10, 40), "bf16")
    assert finding.id == "expected_bf16_absent"
    assert "fp32 0.020 ms a step (100% of matrix-product time)" in finding.message


def test_products_of_unknown_dtype_are_not_called_a_fallback(tmp_path: Path) -> None:
    (finding,) = findings_of(tmp_path, run("aten::mm", "triton_tem_fused_mm_1", 1, 10, 40), "bf16")
    assert (finding.id, finding.severity) == ("expected_bf16_unknown", "note")
    assert "record_shapes was off" in finding.message


def test_an_update_of_single_operators_is_found_with_its_time(tmp_path: Path) -> None:
    events = [
        annotation("Optimizer.step#AdamW.step", 300, 50),
        *run("aten::_foreach_addcdiv_", ADD, 1, 310, 20),
        *run("aten::_foreach_mul_", ADD, 2, 330, 20),
    ]
    (finding,) = findings_of(tmp_path, events, "fused-optimizer")
    assert finding.id == "expected_fused_optimizer_absent"
    assert "2 operators over lists of tensors or kernels and 0.020 ms a step" in finding.message


def test_without_an_update_in_the_window_a_fused_optimizer_is_unknown(tmp_path: Path) -> None:
    (finding,) = findings_of(tmp_path, run("aten::mm", FP32, 1, 10, 40), "fused-optimizer")
    assert finding.id == "expected_fused_optimizer_unknown"


def test_eager_small_operators_where_compiled_code_was_expected_are_found(tmp_path: Path) -> None:
    events = [*run("aten::add", ADD, 1, 10, 30), *run("aten::mm", FP32, 2, 100, 10)]
    (finding,) = findings_of(tmp_path, events, "compile")
    assert finding.id == "expected_compile_absent"
    assert "0.015 ms a step (75% of compute)" in finding.message


def test_generated_kernels_show_compiled_code_without_any_range(tmp_path: Path) -> None:
    assert findings_of(tmp_path, run("triton", "triton_poi_fused_add_0", 1, 10, 30), "compile") == ()


def test_an_unknown_word_names_the_legal_ones() -> None:
    with pytest.raises(DrivetrainError, match=r"did you mean flash\? Legal: flash, bf16, "):
        checked_words(["flsh"])
    assert checked_words(["bf16", "flash", "bf16"]) == ("bf16", "flash")


def test_a_configuration_gives_the_expectation_by_itself() -> None:
    plain = ["precision.params_dtype=fp32", "optimizer.fused=false", "fusion.compile=false"]
    asked = ["precision.params_dtype=bf16", "optimizer.fused=true", "fusion.compile=true"]
    assert expected_of(load_config("llama-2m", plain).config) == ()
    words = expected_of(load_config("llama-2m", asked).config)
    assert words == ("bf16", "fused-optimizer", "compile")
    assert set(words) <= set(EXPECTATIONS)


def test_a_finding_of_every_rank_is_said_once_and_one_of_some_ranks_names_them() -> None:
    every, some = (
        Finding(f"expected_{word}_absent", "warning", "was not seen", 1) for word in ("flash", "bf16")
    )
    merged = merged_findings([(0, [every]), (1, [every, some]), (2, [every, some])])
    assert [(finding.message, finding.count) for finding in merged] == [
        ("every rank, figures of rank 0: was not seen", 3),
        ("ranks 1, 2, figures of rank 1: was not seen", 2),
    ]
    assert merged_findings([(None, [every])]) == (every,)


@needs_shared
@pytest.mark.parametrize(
    ("path", "words", "found"),
    [
        (
            "tracelens/tests/traces/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
            ("flash", "bf16", "compile"),
            {"expected_compile_absent"},
        ),
        (
            "torch213-cpu-gloo/ddp_rank0.json.gz",
            ("flash", "bf16", "fused-optimizer"),
            {"expected_bf16_absent", "expected_fused_optimizer_absent"},
        ),
        ("tracelens/tests/traces/torch_compile_triton/trace.json.gz", ("bf16", "compile"), set()),
    ],
)
def test_real_traces_keep_or_break_expectations(path: str, words: tuple[str, ...], found: set[str]) -> None:
    assert {finding.id for finding in judged(shared_trace(path), *words)} == found
