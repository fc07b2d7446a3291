"""Operators in ``benchmarks/gpu.py``: what becomes of times, failures and wrong results. No device and no time."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from played_gpu import CPU, Scripted, context_in, rows_of, with_backends

from drivetrain.engine.ops.attention import Documents, Mask
from drivetrain.engine.ops.discovery import operator_named
from drivetrain.engine.ops.operator import Operator
from gpu_parts import attention_part, bandwidth_part, loss_part
from gpu_parts.context import attempt, is_ours
from gpu_parts.record import PRODUCTS
from gpu_parts.traffic import RULES, traffic_of


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (bandwidth_part, loss_part, attention_part):
        monkeypatch.setattr(part, "SIZES", part.TINY)


def only(monkeypatch: pytest.MonkeyPatch, part: Any, operator: Operator) -> None:
    monkeypatch.setattr(part, "operator_named", lambda _: operator)
    if hasattr(part, "WORKLOADS"):
        monkeypatch.setattr(part, "WORKLOADS", (operator.name,))


# The rule of bytes.


def test_every_memory_bound_operator_has_a_rule_of_its_bytes() -> None:
    assert set(RULES) == {
        *("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "rotary", "glu", "bias_dropout_add")
    }
    for name, rule in RULES.items():
        given = bandwidth_part.given_of(name, bandwidth_part.TINY, torch.ones)
        outputs = {f"output {number}" for number in range(2 if name.startswith("add_") else 1)}
        assert set(rule.reads) <= {*given, *outputs}, name
        assert set(rule.writes) <= set(given), name


@pytest.mark.parametrize(
    ("operator", "forward", "backward"),
    [
        # x is (T, D) and the weight (D,), all of 2 bytes: read x and w, write y; read dy, x and w, write dx and dw.
        ("rms_norm", "2 TD + D", "3 TD + 2 D"),
        ("layer_norm", "2 TD + 2 D", "3 TD + 3 D"),
        # Read x, residual and w, write y and s; read dy, ds, s and w, write one gradient and dw.
        ("add_rms_norm", "4 TD + D", "4 TD + 2 D"),
        ("add_layer_norm", "4 TD + 2 D", "4 TD + 3 D"),
        # Read gate and up, write y; read dy, gate and up, write both gradients.
        ("glu", "3 TF", "5 TF"),
        ("glu, packed", "3 TF", "5 TF"),
        # Read x, residual, bias and one seed of 8 bytes, write y; read dy, write dx and the bias' gradient.
        ("bias_dropout_add", "3 TD + D + 4", "2 TD + D"),
        # Read x, cosines and sines, write y; the same again.
        ("rotary", "2 THK + TK", "2 THK + TK"),
    ],
)
def test_bytes_are_those_that_nobody_can_do_without(operator: str, forward: str, backward: str) -> None:
    sizes = bandwidth_part.TINY
    tokens, hidden, between = sizes["tokens"], sizes["hidden"], sizes["between"]
    values = {
        "TD": tokens * hidden,
        "D": hidden,
        "TF": tokens * between,
        "THK": tokens * sizes["heads"] * sizes["width"],
        "TK": tokens * sizes["width"],
    }

    def elements(rule: str) -> int:
        total = 0
        for term in rule.split(" + "):
            count, _, what = term.rpartition(" ")
            total += int(count or 1) * values[what] if what in values else int(what)
        return total

    given = bandwidth_part.given_of(operator, sizes, lambda *shape: torch.randn(shape).bfloat16())
    name = operator.split(",")[0]
    found = operator_named(name).reference(**given)
    traffic = traffic_of(name, given, (found,) if isinstance(found, torch.Tensor) else found)
    assert traffic.forward == 2 * elements(forward)
    assert traffic.backward == 2 * elements(backward)
    assert traffic.both == traffic.forward + traffic.backward


def test_the_copy_moves_the_bytes_of_the_operator() -> None:
    copied = bandwidth_part.copy_call(CPU, 64)()
    assert copied.numel() * copied.element_size() == 32, "32 read and 32 written"


# Bandwidth.


@pytest.mark.usefixtures("tiny")
def test_a_share_of_a_copy_is_judged_for_our_backend_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, bandwidth_part, with_backends(operator_named("rms_norm"), inductor=..., triton=...))
    # Copy, eager, inductor, triton, and back.
    context = context_in(tmp_path, Scripted([1.0, 4.0, 2.0, 1.1, 1.1, 2.0, 4.0, 1.0]))
    bandwidth_part.run(context)
    for which in ("forward", "forward + backward"):
        rows = {row["backend"]: row for row in rows_of(context, what=f"rms_norm {which}")}
        assert list(rows) == ["copy", "eager", "inductor", "triton"]
        assert rows["triton"]["figures"]["share_of_copy"] == pytest.approx(1 / 1.1)
        assert rows["triton"]["verdict"] == "reached"
        assert "91% of a copy" in rows["triton"]["said"]
        assert {rows[name]["verdict"] for name in ("copy", "eager", "inductor")} == {"information"}
        assert rows["eager"]["figures"]["share_of_copy"] == pytest.approx(0.25)
        assert rows["eager"]["time"]["median_s"] == pytest.approx(4.0)
    moved = [
        rows_of(context, what=f"rms_norm {which}")[0]["figures"]["bytes"]
        for which in ("forward", "forward + backward")
    ]
    tokens, hidden = bandwidth_part.TINY["tokens"], bandwidth_part.TINY["hidden"]
    assert moved == [2 * (2 * tokens * hidden + hidden), 2 * (5 * tokens * hidden + 3 * hidden)]


@pytest.mark.usefixtures("tiny")
def test_less_than_the_target_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, bandwidth_part, with_backends(operator_named("glu"), inductor=...))
    context = context_in(tmp_path, Scripted([1.0, 4.0, 1.2, 1.2, 4.0, 1.0]))
    bandwidth_part.run(context)
    # Without a kernel of our own, what Inductor makes of our formula is ours.
    assert [row["verdict"] for row in rows_of(context, backend="inductor")] == ["missed", "missed"]


@pytest.mark.usefixtures("tiny")
def test_a_backend_that_computes_something_else_is_wrong_and_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = operator_named("rms_norm")
    eager = operator.backend("eager")
    assert eager is not None
    only(
        monkeypatch, bandwidth_part, with_backends(operator, triton=lambda **given: eager.call(**given) * 1.1)
    )
    context = context_in(tmp_path)
    bandwidth_part.run(context)
    (row,) = rows_of(context, backend="triton")
    assert row["verdict"] == "wrong"
    assert row["said"].startswith("WRONG")
    assert rows_of(context, what="rms_norm forward", backend="eager"), "the others are timed"


@pytest.mark.usefixtures("tiny")
def test_not_a_number_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = operator_named("rms_norm")
    eager = operator.backend("eager")
    assert eager is not None
    only(
        monkeypatch,
        bandwidth_part,
        with_backends(operator, triton=lambda **given: eager.call(**given) * torch.nan),
    )
    context = context_in(tmp_path)
    bandwidth_part.run(context)
    assert [row["verdict"] for row in rows_of(context, backend="triton")] == ["wrong"]


def fails(**_: Any) -> Any:
    raise RuntimeError("no image for this device\nand more")


@pytest.mark.usefixtures("tiny")
def test_a_backend_that_fails_is_a_row_and_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, bandwidth_part, with_backends(operator_named("rms_norm"), triton=fails, liger=...))
    context = context_in(tmp_path)
    bandwidth_part.run(context)
    (row,) = rows_of(context, backend="triton")
    assert (row["verdict"], row["said"]) == ("failed", "RuntimeError: no image for this device")
    assert rows_of(context, what="rms_norm forward", backend="liger")


@pytest.mark.usefixtures("tiny")
def test_what_does_not_serve_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = with_backends(operator_named("rms_norm"), liger=...)
    absent = dataclasses.replace(operator.backends[1], supports=lambda _: "liger_kernel is not installed")
    only(monkeypatch, bandwidth_part, dataclasses.replace(operator, backends=(operator.backends[0], absent)))
    context = context_in(tmp_path)
    bandwidth_part.run(context)
    (row,) = rows_of(context, backend="liger")
    assert (row["verdict"], row["said"]) == ("refused", "liger_kernel is not installed")


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    context = context_in(tmp_path, seconds=0)
    bandwidth_part.run(context)
    said = json.loads(context.record.path.read_text())["left_out"]
    assert said == [f"{name}: time was up" for name in bandwidth_part.WORKLOADS]


def test_a_device_that_is_unusable_ends_the_part_with_the_row_written(tmp_path: Path) -> None:
    class Broken(Scripted):
        def settle(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    context = context_in(tmp_path, Broken())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        attempt(context, "rms_norm", "triton", fails)
    assert rows_of(context, verdict="failed")


def test_ours_is_our_code_and_inductor_where_we_have_none() -> None:
    def ours(name: str) -> set[str]:
        operator = operator_named(name)
        return {backend.name for backend in operator.backends if is_ours(operator, backend)}

    assert ours("rms_norm") == {"triton"}
    assert ours("bias_dropout_add") == {"inductor"}
    assert {"triton", "chunked"} <= ours("attention")
    assert not {"eager", "dense", "flex", "flash_attn"} & ours("attention")


@pytest.mark.usefixtures("tiny")
def test_gradients_are_computed_where_backward_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, bandwidth_part, with_backends(operator_named("add_rms_norm")))
    clock = Scripted()
    bandwidth_part.run(context_in(tmp_path, clock))
    rows = (bandwidth_part.TINY["tokens"], bandwidth_part.TINY["hidden"])
    shapes = [[tuple(one.shape) for one in found] for found in clock.results if isinstance(found, tuple)]
    # Norm and sum; with them the gradients of x, residual and weight.
    assert shapes.count([rows, rows]) == shapes.count([rows, rows, rows, rows, rows[1:]]) > 0


# Loss and attention.


@pytest.mark.usefixtures("tiny")
def test_of_the_loss_what_lies_beyond_the_products_is_held_against_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, loss_part, with_backends(operator_named("linear_cross_entropy"), chunked=...))
    # Copy, products, eager, chunked, and back.
    context = context_in(tmp_path, Scripted([1.0, 5.0, 4.9, 7.0, 7.0, 4.9, 5.0, 1.0]))
    loss_part.run(context)
    (chunked,), (eager,), (products,) = (
        rows_of(context, backend=name) for name in ("chunked", "eager", PRODUCTS)
    )
    assert chunked["figures"]["share_of_copy"] == pytest.approx(0.5)
    assert chunked["figures"]["beyond_products_s"] == pytest.approx(2.0)
    assert chunked["figures"]["peak_bytes"] == 7 << 20
    assert chunked["verdict"] == "missed"
    # No share can be told of what took no longer than the products.
    assert "share_of_copy" not in eager["figures"]
    assert "nothing beyond the products" in eager["said"]
    sizes = loss_part.TINY
    assert products["figures"]["flops"] == 6 * sizes["tokens"] * sizes["hidden"] * sizes["vocabulary"]


@pytest.mark.usefixtures("tiny")
def test_attention_is_timed_beside_one_mask_with_the_flops_of_its_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_part, "OPERATOR", with_backends(attention_part.OPERATOR, chunked=...))
    monkeypatch.setattr(attention_part, "document_lengths", lambda *_: [24, 1, 39])
    context = context_in(tmp_path, Scripted([2.0]))
    attention_part.run(context)
    sizes = attention_part.TINY
    for packing, lengths in (("whole sequences", [32, 32]), ("packed documents", [24, 1, 39])):
        forward = 2 * sum(length**2 for length in lengths) * sizes["heads"] * sizes["width"]
        for which, flops in (("forward", forward), ("forward + backward", 3 * forward)):
            rows = rows_of(context, what=f"attention, {packing}, {which}")
            assert {row["backend"] for row in rows} == {"eager", "chunked", attention_part.ONE_MASK}
            assert {row["figures"]["flops"] for row in rows} == {flops}
            assert rows[0]["figures"]["flops_per_s"] == pytest.approx(flops / 2.0)


def test_the_one_mask_that_attention_is_held_against_computes_the_same(tmp_path: Path) -> None:
    lengths, generator = [24, 1, 39], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(64, heads, 16, generator=generator).requires_grad_() for heads in (4, 2, 2))
    mask = Mask(documents=Documents.of_lengths(lengths))
    given = {"q": q, "k": k, "v": v, "mask": mask}
    forward, both = attention_part._one_mask(given, lengths, context_in(tmp_path))
    right = attention_part.OPERATOR.reference(**given)
    assert isinstance(right, torch.Tensor)
    torch.testing.assert_close(forward(), right)
    assert [tuple(one.shape) for one in both()] == [tuple(one.shape) for one in (q, q, k, v)]
