"""Causes that single traces tell: each in a small trace that has it and in one that has it not."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_diagnosis import MS, account, config_with

from drivetrain.catalogue.time_models import TimeFacts
from drivetrain.diagnose import Facts, Finding, diagnose
from drivetrain.diagnose.trace_figures import TraceFigures, trace_figures
from drivetrain.measure.account import Account
from drivetrain.trace.classify import classify
from drivetrain.trace.read import read_trace

GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
SGEMM = "ampere_sgemm_128x64_nn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)"
BF16, FP32 = "c10::BFloat16", "float"

Event = dict[str, Any]


def event(category: str, name: str, start: float, duration: float, **arguments: Any) -> Event:
    """Times in us; what runs on the device is on its stream 7."""
    on_device = category == "kernel"
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0 if on_device else 1,
        "tid": 7 if on_device else 100,
        "ts": start,
        "dur": duration,
        "args": {"device": 0, "stream": 7, **arguments} if on_device else arguments,
    }


def work(
    name: str,
    kernel: str,
    number: int,
    at: float,
    runs_at: float,
    takes: float,
    *operands: Sequence[int],
    dtype: str = BF16,
) -> list[Event]:
    """An operator of 4 us with the launch of its kernel in it."""
    shapes = {"Input Dims": [list(one) for one in operands], "Input type": [dtype for _ in operands]}
    return [
        event("cpu_op", name, at, 4, **{"External id": number}, **shapes),
        event("cuda_runtime", "cudaLaunchKernel", at + 1, 1, correlation=number, **{"External id": number}),
        event("kernel", kernel, runs_at, takes, correlation=number),
    ]


def steps(count: int, length: float = 1000.0) -> list[Event]:
    return [event("user_annotation", f"ProfilerStep#{step}", step * length, length) for step in range(count)]


def figures(folder: Path, events: Sequence[Mapping[str, Any]]) -> TraceFigures:
    path = folder / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": 0, "traceEvents": list(events)}))
    trace = read_trace(path)
    return trace_figures(trace, classify(trace))


def findings(
    cause: str, trace: TraceFigures, classes: Mapping[str, int], *, made: Account | None = None, **more: Any
) -> list[Finding]:
    diagnosis = diagnose(Facts(made or account(classes), "traces", trace=trace, **more))
    return [one for one in diagnosis.findings if one.cause == cause]


# ---- host -----------------------------------------------------------------------------------------------------------


def test_a_device_that_waits_for_launches_is_found_with_the_operators_waited_for(tmp_path: Path) -> None:
    dry, fed = steps(2), steps(2)
    for number in range(10):
        at = number * 200.0
        dry += work("aten::add", ADD, number + 1, at, at + 3, 20.0)
        fed += work("aten::add", ADD, number + 1, number * 5.0, 10 + number * 190.0, 190.0)
    trace = figures(tmp_path, dry)
    # Nine waits of 182 - 1 us to the end of the next launch, in two steps.
    assert trace.launches.ns_per_step == pytest.approx(9 * 179_000 / 2, rel=0.02)
    classes = {"compute.matmul": 60 * MS, "host.launch": 40 * MS}
    (found,) = findings("host.launch_bound", trace, {"compute.elementwise": 100_000, "host.launch": 900_000})
    assert found.cost_ns == pytest.approx(trace.launches.ns_per_step)
    assert found.part_of == "host", "launches and Python together"
    assert found.evidence[0].names == ("aten::add",)
    assert found.remedies[0].note is not None, "nobody knows what these traces were set to"
    assert not findings("host.launch_bound", figures(tmp_path, fed), classes)


def test_logging_is_found_in_python_functions_with_the_line_that_calls_it(tmp_path: Path) -> None:
    events = steps(2)
    for step in range(2):
        at = step * 1000.0
        events += [
            event("python_function", "train.py(40): step", at, 900),
            event("python_function", "logging/__init__.py(1500): info", at + 100, 300),
            event("python_function", "<built-in function print>", at + 200, 100),
            *work("aten::mm", GEMM, step + 1, at + 500, at + 510, 100),
        ]
    trace = figures(tmp_path, events)
    assert trace.logging.ns_per_step == 300_000, "what one logs inside another is not counted twice"
    (found,) = findings("host.logging", trace, {"compute.matmul": 500_000, "host.python": 500_000})
    assert found.subject == "train.py(40): step"
    assert found.evidence[0].place == "train.py(40): step"
    quiet = figures(
        tmp_path, [one for one in events if "logging" not in one["name"] and "print" not in one["name"]]
    )
    assert quiet.has_python
    assert not findings("host.logging", quiet, {"compute.matmul": 500_000, "host.python": 500_000})


def test_a_loop_with_a_bar_a_decorator_and_a_thread_that_writes_are_no_logging(tmp_path: Path) -> None:
    events = steps(2)
    for step in range(2):
        at = step * 1000.0
        events += [
            event("python_function", "train.py(40): step", at, 900),
            # The loader works within the bar's loop.
            event("python_function", "tqdm/std.py(1160): __iter__", at + 10, 400),
            event("python_function", "torch/utils/data/dataloader.py(700): __next__", at + 20, 380),
            *work("aten::mm", GEMM, step + 1, at + 500, at + 510, 100),
        ]
    writer = event("python_function", "tensorboard/summary/writer/event_file_writer.py(200): run", 0, 700)
    decorated = event("python_function", "loguru/_logger.py(1297): catch_wrapper", 0, 2000)
    whole = event("python_function", "wandb/sdk/wandb_run.py(300): anything", 0, 2000)
    trace = figures(tmp_path, [*events, {**writer, "tid": 999}, decorated, whole])
    assert trace.has_python
    assert trace.logging.ns_per_step == 0
    own = event("python_function", "tqdm/std.py(1400): display", 900, 50)
    assert figures(tmp_path, [*events, own]).logging.ns_per_step == 25_000


def test_a_trace_without_python_functions_leaves_logging_open(tmp_path: Path) -> None:
    trace = figures(tmp_path, [*steps(2), *work("aten::mm", GEMM, 1, 0, 10, 100)])
    reasons = {one.rule: one.reason for one in diagnose(Facts(account(), "traces", trace=trace)).not_asked}
    assert "with_stack=True" in reasons["log_frames"]


# ---- kernels --------------------------------------------------------------------------------------------------------


def test_products_of_odd_shape_cost_what_they_take_above_the_best_rate(tmp_path: Path) -> None:
    good, odd = ((4096, 4096), (4096, 4096)), ((4096, 4096), (4096, 4099))
    events = [
        *steps(1, 1000.0),
        *work("aten::mm", GEMM, 1, 0, 10, 100, *good),
        *work("aten::mm", GEMM, 2, 5, 110, 400, *odd),
    ]
    trace = figures(tmp_path, events)
    classes = {"compute.matmul": 500_000}
    (found,) = findings("kernels.bad_shapes", trace, classes)
    assert found.cost_ns == pytest.approx(400_000 - 100_000 * 4099 / 4096)
    assert found.confidence == "low"
    assert "4104 would be" in found.evidence[0].text
    # At what the device sustains the odd one is still slower; a slow device is not the shape's fault.
    rate = 2 * 4096 * 4096 * 4099 / 300e-6
    (known,) = findings("kernels.bad_shapes", trace, classes, achievable_flops=rate)
    assert (known.cost_ns, known.confidence) == (pytest.approx(100_000), "medium")
    assert not findings("kernels.bad_shapes", trace, classes, achievable_flops=rate / 2)
    fine = figures(tmp_path, [*steps(1), *work("aten::mm", GEMM, 1, 0, 10, 100, *good)])
    assert not findings("kernels.bad_shapes", fine, classes)
    # What is sustained in fp32 is no measure of a product in bf16, nor the other way round: the trace's own best is.
    (other,) = findings("kernels.bad_shapes", trace, classes, achievable_flops=rate, achievable_dtype="fp32")
    assert (other.cost_ns, other.confidence) == (found.cost_ns, "low")
    (like,) = findings("kernels.bad_shapes", trace, classes, achievable_flops=rate, achievable_dtype="fp16")
    assert like.cost_ns == known.cost_ns


def test_small_operators_beside_each_other_are_found_with_their_names(tmp_path: Path) -> None:
    size = (1024, 1024)
    many = steps(1)
    for number, name in enumerate(("aten::mul", "aten::add", "aten::mul")):
        many += work(name, ADD, number + 1, number * 5.0, 20 + number * 50.0, 50, size, size)
    trace = figures(tmp_path, many)
    classes = {"compute.elementwise": 150_000}
    (found,) = findings("kernels.unfused_operators", trace, classes)
    assert found.cost_ns == 50_000
    assert found.evidence[0].names == ("aten::add",)
    assert {"compile", "fusion_level"} == {one.name for one in found.remedies}
    apart = [*steps(1), *work("aten::mul", ADD, 1, 0, 20, 50, size, size)]
    assert not findings("kernels.unfused_operators", figures(tmp_path, apart), classes)


def test_products_in_fp32_cost_what_16_bits_would_save_by_the_peaks(tmp_path: Path) -> None:
    square = ((512, 512), (512, 512))
    wide = figures(tmp_path, [*steps(1), *work("aten::mm", SGEMM, 1, 0, 10, 100, *square, dtype=FP32)])
    classes = {"compute.matmul": 100_000}
    (found,) = findings("kernels.wrong_precision", wide, classes, device="A100-SXM-80GB")
    # The table has no fp32 of it: at least what the units of 19 bits would need.
    assert found.cost_ns == pytest.approx(100_000 * (1 - 156 / 312))
    assert found.remedies[0].name == "bf16"
    # The cost is what is saved at least: all of the products bounds it.
    half = {"compute.matmul": 100_000, "idle": 100_000}
    (bounded,) = findings("kernels.wrong_precision", wide, half, device="A100-SXM-80GB")
    assert bounded.remedies[0].ratio == pytest.approx(2.0)
    (unknown,) = findings("kernels.wrong_precision", wide, classes)
    assert unknown.cost_ns is None
    assert "--device" in unknown.unknown["cost_ns"]
    narrow = figures(tmp_path, [*steps(1), *work("aten::mm", GEMM, 1, 0, 10, 100, *square)])
    assert not findings("kernels.wrong_precision", narrow, classes, device="A100-SXM-80GB")


def test_products_in_fp32_on_a_cpu_are_a_fault_where_it_was_measured_to_be_faster_in_16_bits(
    tmp_path: Path,
) -> None:
    shapes = {"Input Dims": [[512, 512], [512, 512]], "Input type": [FP32, FP32]}
    wide = figures(tmp_path, [*steps(1), event("cpu_op", "aten::mm", 10, 100, **shapes)])
    classes = {"compute.matmul": 100_000}
    made = account(classes, peak=False)

    def measured(**flops: float) -> dict[str, TimeFacts]:
        return {"time": TimeFacts(made, config_with(), matmul_flops=flops)}

    (found,) = findings("kernels.wrong_precision", wide, classes, **measured(fp32=1e11, bf16=4e11))
    assert found.cost_ns == pytest.approx(75_000)
    assert not findings("kernels.wrong_precision", wide, classes)
    for flops in ({}, {"fp32": 1e11}, {"bf16": 4e11}, {"fp32": 1e11, "bf16": 5e10}):
        assert not findings("kernels.wrong_precision", wide, classes, **measured(**flops))


# ---- memory, shapes --------------------------------------------------------------------------------------------------


def test_an_allocator_that_goes_to_the_device_in_later_steps_is_fragmented(tmp_path: Path) -> None:
    def with_calls(*at: float) -> TraceFigures:
        calls = [event("cuda_runtime", "cudaMalloc", start, 200) for start in at]
        return figures(tmp_path, [*steps(3), *calls, *work("aten::mm", GEMM, 1, 5, 10, 100)])

    classes = {"compute.matmul": 600_000, "host.sync": 400_000}
    (found,) = findings("memory.fragmentation", with_calls(1100, 2100, 2500), classes)
    assert found.cost_ns == pytest.approx(300_000)
    assert found.evidence[0].names == ("cudaMalloc",)
    beside = {"compute.matmul": 900_000, "host.sync": 100_000}
    (part,) = findings("memory.fragmentation", with_calls(1100, 2100, 2500), beside)
    assert part.cost_ns == 100_000, "the device computed on during the rest"
    assert not findings("memory.fragmentation", with_calls(1100, 2100, 2500), {"compute.matmul": 1_000_000})
    assert not findings("memory.fragmentation", with_calls(100, 400), classes), "what the first step needs"


def test_without_steps_no_call_of_the_allocator_is_one_too_many(tmp_path: Path) -> None:
    events = [event("cuda_runtime", "cudaMalloc", 50, 200), *work("aten::mm", GEMM, 1, 5, 10, 100)]
    trace = figures(tmp_path, events)
    assert (trace.num_steps, trace.allocating.ns_per_step) == (0, 0.0)


def batches(*rows: int) -> list[Event]:
    """A step a number of rows, each with one product of that many."""
    events = steps(len(rows))
    for step, count in enumerate(rows):
        at = step * 1000.0
        events += work("aten::mm", GEMM, step + 1, at + 5, at + 20, 100, (count, 256), (256, 256))
    return events


def test_one_shorter_batch_is_told_from_shapes_that_always_change(tmp_path: Path) -> None:
    classes = {"compute.matmul": 1000 * MS}
    (short,) = findings(
        "shapes.short_last_batch", figures(tmp_path, batches(512, 512, 512, 512, 96)), classes
    )
    assert short.evidence[0].steps == (4,)
    assert "96 x 256 x 256 where others have 512 x 256 x 256" in short.evidence[0].text
    assert (short.cost_ns, short.kind) == (None, "loss")
    (varying,) = findings("shapes.dynamic", figures(tmp_path, batches(512, 512, 480, 500, 512)), classes)
    assert varying.evidence[0].steps == (2, 3)
    compiled = {"in_use": frozenset({"compile"})}
    several = figures(tmp_path, batches(512, 512, 480, 500, 512))
    assert [one.kind for one in findings("shapes.dynamic", several, classes, **compiled)] == ["setting"]
    assert findings("shapes.dynamic", figures(tmp_path, batches(512, 512, 512, 512, 1024)), classes)
    same = figures(tmp_path, batches(512, 512, 512, 512, 512))
    assert same.shapes is not None
    for cause in ("shapes.short_last_batch", "shapes.dynamic"):
        assert not findings(cause, same, classes)


def test_steps_that_kernels_alone_tell_do_not_tell_whose_operators_are_whose(tmp_path: Path) -> None:
    # The host is two kernels ahead, so that the last step's first operator was called in the step before.
    events: list[Event] = []
    kinds = (("aten::mm", GEMM, 512), ("aten::add", ADD, 64), ("aten::softmax", "softmax_kernel", 64))
    for step in range(6):
        for place, (name, kernel, rows) in enumerate((*kinds, ("aten::mm", SGEMM, 256))):
            number = 4 * step + place + 1
            at = number * 100.0
            events += work(name, kernel, number, at, at + 205, 90, (rows, 256), (256, 256))
    trace = figures(tmp_path, events)
    assert trace.num_steps > 3
    assert trace.shapes is None


# ---- communication ---------------------------------------------------------------------------------------------------


def with_overlap(hidden_ms: int, tensor_ms: int = 0) -> Account:
    from dataclasses import replace

    classes = {"compute.matmul": 60 * MS, "communication.dp.transfer": 40 * MS}
    made = account({**classes, "communication.tp.transfer": tensor_ms * MS} if tensor_ms else classes)
    (rank,) = made.ranks
    told = [
        replace(
            step,
            window=replace(
                step.window,
                communication_ns=(40 + hidden_ms + tensor_ms) * MS,
                overlapped_communication_ns=hidden_ms * MS,
            ),
        )
        for step in rank.steps
    ]
    return replace(made, ranks=(replace(rank, steps=tuple(told)),))


def test_communication_beside_which_nothing_is_computed_is_serial() -> None:
    (found,) = findings("communication.serial", TraceFigures(), {}, made=with_overlap(1))
    # No more than half of 60 ms of computation is there to hide under.
    assert found.cost_ns == 30 * MS
    assert "ddp_bucket" in {one.name for one in found.remedies}
    assert not findings("communication.serial", TraceFigures(), {}, made=with_overlap(10))
    beside = with_overlap(10, tensor_ms=400)
    assert not findings("communication.serial", TraceFigures(), {}, made=beside), (
        "of gradients a fifth is hidden"
    )
    assert findings("communication.serial", TraceFigures(), {}, made=with_overlap(1, tensor_ms=400))
