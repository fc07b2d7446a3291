"""Runs and a ladder as they lie on the disk, made without training, for the tests of reports."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.archive.atomic import write_json
from drivetrain.archive.tunes import save_tune
from drivetrain.archive.writer import RunWriter
from drivetrain.config import config_hash, load_config, to_toml
from drivetrain.measure.account import Account, RankAccount, StepAccount, Window
from drivetrain.measure.optimisation import Evidence, OptimisationRecord
from drivetrain.measure.peaks import Peak
from drivetrain.measure.waterfall import RankTime, WaterfallFlops, waterfall
from drivetrain.trace.health import Finding

PROVENANCE: Mapping[str, Any] = {
    "command": ["drivetrain", "train", "llama-2m", "training.train_iters=40"],
    "working_directory": "/somewhere",
    "git": {
        "commit": "1" * 40,
        "branch": "main",
        "dirty": True,
        "diff_sha256": "d" * 64,
        "untracked": ["notes.txt"],
        "untracked_count": 1,
        "reason": None,
    },
    "packages": {"torch": "2.13.0", "numpy": "2.3.0", "triton": None},
    "python": {"version": "3.11.7", "implementation": "cpython"},
    "platform": {"system": "Linux", "release": "6.1", "machine": "x86_64"},
    "host": "a-host",
    "cpu": {"model": "a processor", "usable_cores": 2},
    "memory_bytes": 16_000_000_000,
    "environment": {"OMP_NUM_THREADS": "2"},
}


def make_run(
    runs_dir: Path,
    name: str = "llama-2m",
    overrides: Sequence[str] = ("training.train_iters=40",),
    **changes: Any,
) -> RunWriter:
    """A run directory with its manifest and configuration, and nothing else."""
    config = load_config("llama-2m", overrides).config
    manifest = {
        "config_hash": config_hash(config),
        "layout": {"data_parallel_size": 1, "world_size": 1},
        "provenance": PROVENANCE,
        "devices": {"type": "cpu", "name": "a processor", "count": 1},
        "dataset": {"fingerprint": "f1f2f3", "prefix": "/corpora/a"},
        "seed": 1234,
        **changes,
    }
    return RunWriter.create(runs_dir, name, config_toml=to_toml(config), manifest=manifest)


def loss_at(step: int) -> float:
    return 2.0 + 6.0 * math.exp(-step / 12) + 0.15 * math.sin(1.7 * step)


def log_steps(
    writer: RunWriter,
    first: int,
    last: int,
    *,
    step_s: float = 0.3,
    loss: Callable[[int], float] = loss_at,
    open_segment: bool = True,
) -> None:
    """Steps as training logs them; the first three are warm-up, the first one compiles."""
    if open_segment:
        writer.open_segment(first)
        writer.event("start" if first == 1 else "resume", step=first - 1, threads=2)
    for step in range(first, last + 1):
        seconds = step_s * (1 + 0.04 * math.sin(step)) * (30 if step == 1 else 1)
        tags = [*(["warmup"] if step < 4 else []), *(["compile"] if step == 1 else [])]
        writer.log_metrics(
            step,
            {
                "train/loss": loss(step),
                "train/loss_ema": loss(step) if math.isfinite(loss(step)) else None,
                "train/grad_norm": 1.0 + 0.5 * math.cos(step) + (9.0 if step == 17 else 0.0),
                "time/step_s": seconds,
                "time/data_wait_s": 0.02,
                "throughput/tokens_per_sec": 4096 / seconds,
                "throughput/effective_tokens_per_sec": 4096 / seconds,
                "memory/process_rss_peak_bytes": 1.5e9,
                "progress/tokens": 4096 * step,
            },
            tags,
        )
        if step % 10 == 0:
            writer.event("evaluation", step=step, loss=loss(step) + 0.1, bits_per_byte=1.5, tokens=1000)


def summary(step_s: float = 0.3, steps: int = 40, **changes: Any) -> dict[str, Any]:
    """What a finished run writes."""
    return {
        "run": "where it was made",
        "status": "finished",
        "final_loss": loss_at(steps),
        "validation_loss": 2.2345,
        "validation_bits_per_byte": 1.2345,
        "tokens_per_second": 4096 / step_s,
        "effective_tokens_per_second": 4000 / step_s,
        "mfu": 0.258 * 0.3 / step_s,
        "hfu": 0.258 * 0.3 / step_s,
        "step_time_s": {"p50": step_s, "p90": step_s * 1.05, "max": step_s * 1.1},
        "data_wait_frac": 0.0667,
        "communication_exposed_frac": None,
        "peak_memory_bytes": 1_500_000_000,
        "mfu_rule": {
            "flops_rule": "matmul + attention, causal half",
            "token_rule": "tokens processed, padding included",
            "peak_source": "measured sustained matrix product",
            "window": f"steps 4-{steps} of steady state, {steps - 3} steps",
        },
        "memory_rule": "largest resident set of any rank's process",
        "steps": steps,
        "tokens": 4096 * steps,
        "findings": [],
        "reasons": {"communication_exposed_frac": "one process: nothing to communicate"},
        **changes,
    }


CLASSES = {"compute.matmul": 180, "compute.elementwise": 40, "data.loader": 50, "host.launch": 29, "idle": 1}
"""ms of one step."""


def account_document() -> dict[str, Any]:
    """The document of ``account.json`` of a window of two steps of one rank."""
    scale = 1_000_000

    def window(steps: int) -> Window:
        classes = {name: count * scale * steps for name, count in CLASSES.items()}
        total = sum(classes.values())
        return Window(total, total - scale, scale, None, None, None, 0, 0, 0, classes, 0)

    one = window(1)
    times = [RankTime(0, one.window_ns, one.classes)]
    flops = WaterfallFlops(
        {"compute.matmul": 77_000_000_000},
        Peak(1e12, "measured sustained matrix product"),
        Peak(9e11, "measured"),
    )
    made = Account(
        health=(Finding("first-step", "note", "step 10 is the first recorded one", None, ()),),
        ranks=(
            RankAccount(
                0,
                "host",
                window(2),
                (StepAccount(10, one, 0, 1, True), StepAccount(11, one, 1, 2, False)),
            ),
        ),
        waterfall=waterfall(times, flops, window="step 11, rank 0"),
        name_table="1+abc",
    )
    entry = {"first": 10, "last": 11, "name_table": "1+abc", "account": made.to_document()}
    return {"schema": 1, "windows": [entry]}


RECORDS = (
    OptimisationRecord(
        "compile", "fusion.compile", True, True, True, None, Evidence("shown", "40 compiled graphs ran")
    ),
    OptimisationRecord(
        "fused_adamw", "optimizer.fused", True, True, False, "no fused kernel for this device"
    ),
    OptimisationRecord(
        "data_workers",
        "data.num_workers",
        1,
        True,
        True,
        None,
        Evidence("absent", "batches were fetched, and none from a worker process"),
    ),
    OptimisationRecord("bf16", "precision.params_dtype", "fp32", False, False),
)


def finished_run(
    runs_dir: Path,
    name: str = "llama-2m",
    *,
    step_s: float = 0.3,
    overrides: Sequence[str] = ("training.train_iters=40",),
    records: Sequence[OptimisationRecord] = RECORDS,
    with_account: bool = True,
    summary_changes: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A run with everything."""
    with make_run(runs_dir, name, overrides, **changes) as writer:
        writer.open_segment(1)
        writer.event("start", step=0, threads=2)
        for record in records:
            start = {**record.to_document(), "evidence": None, "evidence_why": None}
            writer.event("optimisation", **start, when="start")
        writer.event("warning", message="no MFU: <no> peak & no ceiling")
        log_steps(writer, 1, 40, step_s=step_s, open_segment=False)
        writer.event("checkpoint", step=40, path="step-40")
        for record in records:
            if record.evidence is not None:
                writer.event("optimisation", **record.to_document(), when="window")
        writer.write_summary(summary(step_s, **(summary_changes or {})))
        writer.event("end", status="finished", reason=None)
    if with_account:
        write_json(writer.path / "account.json", account_document())
    return writer.path


def _classes(matmul: int, elementwise: int, loader: int, launch: int) -> dict[str, int]:
    """Classes of a step, given in ms."""
    names = ("compute.matmul", "compute.elementwise", "data.loader", "host.launch")
    return {
        name: ms * 1_000_000 for name, ms in zip(names, (matmul, elementwise, loader, launch), strict=True)
    }


def tune_document(**changes: Any) -> dict[str, Any]:
    """A ladder that was finished: two changes kept, one of no gain, one refused by the gate, one out of memory."""

    def step(
        index: int, entry: str, change: dict[str, Any], treats: list[str], **more: Any
    ) -> dict[str, Any]:
        return {
            "index": index,
            "entry": entry,
            "change": change,
            "treats": treats,
            "predicted": None,
            "no_prediction": None,
            "prediction_score": None,
            "measured": None,
            "outcome": "finished",
            "memory_bytes": None,
            "blocks": [],
            "gate": None,
            "kept": False,
            "why": "",
            "classes_before": None,
            "classes_after": None,
            "device_seconds": 30.0,
            **more,
        }

    def blocks(before: float, after: float, run: str) -> list[dict[str, Any]]:
        return [
            {
                "side": side,
                "run": f"runs/{run}-{number}",
                "step_s": seconds,
                "tokens_per_second": 4096 / seconds,
            }
            for number, (side, seconds) in enumerate(
                (("A", before), ("B", after), ("B", after), ("A", before))
            )
        ]

    return {
        "tune": "20261130-120000-llama-2m-beef",
        "created": "2026-11-30T12:00:00+00:00",
        "source": "llama-2m",
        "overrides": ["training.train_iters=200"],
        "status": "finished",
        "reason": None,
        "budget_s": 1200.0,
        "spent_s": 754.0,
        "device_seconds": 702.0,
        "settings": {"gate": {"exact_steps": 20}, "only": [], "steps_per_block": 20, "world_size": 1},
        "baseline": {
            "run": "runs/baseline",
            "config": "configs/000.toml",
            "step_s": 0.480,
            "tokens_per_second": 8533.3,
            "classes": _classes(200, 130, 120, 40),
        },
        "steps": [
            step(
                1, "data_workers", {"data.num_workers": 1}, ["data.loader"],
                predicted={"ratio": 1.333, "rule": "the loader's class vanishes"},
                measured={"ratio": 1.321, "low": 1.302, "high": 1.339},
                prediction_score={"error": 0.0364, "within_interval": True, "within_range": None},
                memory_bytes=112_000_000, blocks=blocks(0.480, 0.3634, "workers"),
                gate={"tier": "exact", "verdict": "pass", "why": "20 steps equal to the bit"},
                kept=True, why="faster by more than the least effect of 2.0%",
                classes_after=_classes(202, 131, 2, 39),
            ),
            step(
                2, "compile", {"fusion.compile": True}, ["compute.elementwise", "host.launch"],
                no_prediction="shapes were not recorded", measured={"ratio": 1.258, "low": 1.231, "high": 1.287},
                memory_bytes=-72_000_000, blocks=blocks(0.3634, 0.2889, "compile"),
                gate={"tier": "round-off", "verdict": "pass", "why": "inside the envelope of 3 perturbations"},
                kept=True, why="faster by more than the least effect of 2.0%",
                classes_after=_classes(201, 62, 2, 31),
            ),
            step(
                3, "fused_adamw", {"optimizer.fused": True}, ["compute.optimizer"],
                measured={"ratio": 1.004, "low": 0.991, "high": 1.017},
                memory_bytes=0, blocks=blocks(0.2889, 0.2877, "fused"),
                why="the interval includes 1: nothing is claimed from noise",
            ),
            step(
                4, "bf16", {"precision.params_dtype": "bf16"}, ["compute.matmul"],
                measured={"ratio": 1.412, "low": 1.391, "high": 1.430},
                memory_bytes=-320_000_000, blocks=blocks(0.2889, 0.2046, "bf16"),
                gate={"tier": "statistical", "verdict": "fail", "why": "loss worse by 0.031 nat, allowed 0.010"},
                why="the gate refused it: loss worse by 0.031 nat, allowed 0.010",
            ),
            step(
                5, "micro_batch", {"training.micro_batch_size": 64, "optimizer.lr": 0.006}, ["host.launch"],
                outcome="out_of_memory", why="17.9 GB above the limit of 16 GB",
            ),
        ],
        "leave_one_out": [
            step(
                1, "data_workers", {"data.num_workers": 0}, ["data.loader"],
                measured={"ratio": 0.741, "low": 0.729, "high": 0.754}, why="it stays, the run is slower without it",
                kept=True,
            )
        ],
        "final": {
            "run": "runs/final",
            "config": "configs/final.toml",
            "step_s": 0.2871,
            "tokens_per_second": 14266.8,
            "classes": _classes(200, 61, 2, 31),
        },
        "final_gate": {"tier": "round-off", "verdict": "pass", "why": "inside the envelope; held-out loss equal"},
        "speed_up": {"ratio": 1.672, "low": 1.640, "high": 1.703},
        "saved": {
            "seconds_per_step": 0.1929,
            "account_seconds_per_step": 0.196,
            "deviation": 0.196 / 0.1929 - 1,
            "device_hours_per_run": 0.0107,
            "classes": {"data.loader": 0.118},
            "rule": "baseline less final, geometric means of the medians of their blocks",
            "device_hours_per_million_steps": 53.6,
        },
        "findings": ["fused_adamw: no effect above the noise of this machine"],
        **changes,
    }  # fmt: skip


def make_tune(tunes_dir: Path, **changes: Any) -> Path:
    """The folder of a tune."""
    document = tune_document(**changes)
    path = tunes_dir / document["tune"]
    for folder in ("configs", "runs"):
        (path / folder).mkdir(parents=True)
    (path / "configs" / "final.toml").write_text(
        '[fusion]\ncompile = true  # 1.258x, gate "round-off": pass\n'
    )
    save_tune(path, document)
    return path
