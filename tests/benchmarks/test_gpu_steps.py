"""The part ``step`` of ``benchmarks/gpu.py``: MFU and its peaks, what served, and what fits. No device and no time."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from played_gpu import Scripted, context_in, rows_of

from drivetrain.engine.model.batch import check_batch
from drivetrain.measure.flops import model_flops
from drivetrain.measure.parameters import parameter_count
from drivetrain.measure.peaks import Peak
from gpu_parts import step_part
from gpu_parts.context import Context


@pytest.fixture
def tiny_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_part, "_SHAPE", step_part._TINY_SHAPE)
    monkeypatch.setattr(step_part, "_MICRO_BATCHES", (2, 1))
    monkeypatch.setattr(step_part, "VARIANTS", step_part.VARIANTS[:1])
    monkeypatch.setattr(step_part, "document_lengths", lambda length, _: [length - 5, 5])
    entry = SimpleNamespace(value=4e12, source="measured sustained matrix product")
    monkeypatch.setattr(step_part, "measure_matmul", lambda *_, **__: entry)


@pytest.mark.usefixtures("tiny_steps")
def test_mfu_is_told_under_each_peak_with_its_rule(tmp_path: Path) -> None:
    context = context_in(tmp_path, Scripted(periods=[0.25, 0.5, 1.0]), peak=1e12)
    step_part.run(context)
    (row,) = rows_of(context, backend="engine")
    model = step_part._config(context, step_part._TINY_SHAPE, 2, ()).model
    flops = model_flops(model, tokens=64, sum_squared_lengths=2 * 32**2).total
    assert row["figures"]["model_flops"] == flops
    assert row["figures"]["tokens_per_s"] == pytest.approx(64 / 0.5)
    assert [(one["mfu"], one["peak_source"]) for one in row["figures"]["mfu"]] == [
        (pytest.approx(flops / (0.5 * 1e12)), "supplied by the user"),
        (pytest.approx(flops / (0.5 * 4e12)), "measured sustained matrix product"),
    ]
    assert all(one["flops_rule"] for one in row["figures"]["mfu"])
    facts = json.loads(context.record.path.read_text())["facts"]
    assert [one["peak_source"] for one in facts["peaks"]] == [
        "supplied by the user",
        "measured sustained matrix product",
    ]


@pytest.mark.usefixtures("tiny_steps")
def test_without_a_peak_there_is_no_mfu_and_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_part, "measure_matmul", fails_to_measure)
    context = context_in(tmp_path)
    step_part.run(context)
    (row,) = rows_of(context, what="step, fusion.level=off")
    assert row["figures"]["mfu"] == []
    assert "no MFU: no peak" in row["said"]
    facts = json.loads(context.record.path.read_text())["facts"]
    assert "no data-sheet peak" in facts["no_mfu_because"]
    assert rows_of(context, what="matrix product, sustained", verdict="failed")


def fails_to_measure(*_: Any, **__: Any) -> Any:
    raise RuntimeError("out of everything")


@pytest.mark.usefixtures("tiny_steps")
def test_operators_that_served_the_step_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = step_part.Variant("served", ("fusion.rms_norm=eager", "fusion.layer_norm=eager"), packed=True)
    monkeypatch.setattr(step_part, "VARIANTS", (served,))
    context = context_in(tmp_path)
    step_part.run(context)
    (row,) = rows_of(context, backend="engine")
    assert row["figures"]["served"] == {"rms_norm/eager": 2 * 5}
    # Asked for and without effect: a Llama has none.
    assert any("layer_norm" in finding for finding in row["figures"]["findings"])
    # Half of the square of each document and no more.
    model = step_part._config(context, step_part._TINY_SHAPE, 2, ()).model
    flops = model_flops(model, tokens=64, sum_squared_lengths=2 * (27**2 + 5**2)).total
    assert row["figures"]["model_flops"] == flops


@pytest.mark.usefixtures("tiny_steps")
def test_the_first_micro_batch_that_fits_is_taken_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_part, "_MICRO_BATCHES", (8, 4, 2, 1))
    monkeypatch.setattr(
        step_part, "VARIANTS", [dataclasses.replace(step_part.VARIANTS[0], name=name) for name in "ab"]
    )
    stepped = step_part._stepped
    tried: list[int] = []

    def limited(context: Context, config: Any, *rest: Any) -> Any:
        tried.append(config.training.micro_batch_size)
        if tried[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return stepped(context, config, *rest)

    monkeypatch.setattr(step_part, "_stepped", limited)
    context = context_in(tmp_path)
    step_part.run(context)
    assert tried == [8, 4, 2, 2]
    assert [row["figures"]["micro_batch_size"] for row in rows_of(context, backend="engine")] == [2, 2]
    said = json.loads(context.record.path.read_text())["left_out"]
    assert said[0] == "step, a, micro-batch 8: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert not rows_of(context, verdict="failed")


def test_batches_of_documents_are_what_the_engine_takes() -> None:
    batch = step_part.batch_of_lengths([[5, 3, 8], [16]], 11)
    check_batch(batch, 11)
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 16, 32]
    assert batch.position_ids[0].tolist() == [*range(5), *range(3), *range(8)]
    assert batch.num_valid_tokens == 32 - 4
    assert batch.sum_squared_lengths == 25 + 9 + 64 + 256
    assert batch.labels[0, :4].equal(batch.token_ids[0, 1:5])


def test_the_model_has_about_a_billion_parameters_and_every_variant_is_a_configuration(
    tmp_path: Path,
) -> None:
    context = context_in(tmp_path)
    for variant in step_part.VARIANTS:
        config = step_part._config(context, step_part._SHAPE, 8, variant.overrides)
        assert variant.compiles == config.fusion.compile
        assert parameter_count(config.model).total == 1_100_048_384


def test_a_dry_step_compiles_nothing() -> None:
    dry = step_part.dry_variants()
    assert {one.packed for one in dry} == {True, False}
    for variant in dry:
        assert all(override.endswith("=eager") for override in variant.overrides)
    assert {one.name for one in dry} < {one.name for one in step_part.VARIANTS}


def test_mfu_is_flops_over_time_and_peak() -> None:
    (one,) = step_part.mfu_lines(300, 2.0, [Peak(1000.0, "given")])
    assert one["mfu"] == pytest.approx(0.15)
