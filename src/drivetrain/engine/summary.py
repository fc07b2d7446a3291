"""The figures of a run at its end: the document of ``train --json`` and of ``summary.json``."""

import dataclasses
from pathlib import Path
from typing import Any

from drivetrain.config.layout import DIMENSIONS
from drivetrain.engine.devices import PeakAnswer
from drivetrain.engine.loop import Outcome
from drivetrain.engine.parallel.hierarchy import ACROSS, INSIDE
from drivetrain.engine.recorder import peak_memory_bytes
from drivetrain.engine.training_run import TrainingRun

__all__ = ["summarise"]


def summarise(
    run: TrainingRun, outcome: Outcome, run_path: Path, elapsed_s: float, peak: PeakAnswer
) -> dict[str, Any]:
    """Every figure with its rule; None where it is unknown, and then ``reasons`` says why.

    Called on every rank: the peak memory is the largest of them.
    """
    figures = run.recorder.clock.summary(
        run.group.size, peak.peak, elapsed_s=elapsed_s, peak_reason=peak.reason
    )
    validation = outcome.validation
    watch = run.optimisations.building.compilation
    reasons = {key: why for key, why in figures.reasons.items() if key != "flops_per_second_per_device"}
    if run.recorder.last_loss is None:
        reasons["final_loss"] = "no step of this segment had a token that carries loss"
    if validation is None:
        why = (
            "training.eval_iters is 0"
            if run.config.training.eval_iters == 0
            else f"the run was {outcome.status} before its first evaluation"
        )
        reasons |= dict.fromkeys(("validation_loss", "validation_bits_per_byte"), why)
    elif validation.loss is None:
        why = "no token of the held-out text carries loss"
        reasons |= dict.fromkeys(("validation_loss", "validation_bits_per_byte"), why)
    elif validation.bits_per_byte is None:
        reasons["validation_bits_per_byte"] = run.corpus.token_byte_lengths().reason
    communication, unseen = run.recorder.communication.to_document()
    if unseen is not None:
        reasons["communication" if communication is None else "communication.overlap_frac"] = unseen
    return {
        "run": str(run_path),
        "status": outcome.status,
        "final_loss": run.recorder.last_loss,
        "validation_loss": validation.loss if validation is not None else None,
        "validation_bits_per_byte": validation.bits_per_byte if validation is not None else None,
        "tokens_per_second": figures.tokens_per_second,
        "effective_tokens_per_second": figures.effective_tokens_per_second,
        "mfu": figures.mfu,
        "hfu": figures.hfu,
        "effective_mfu": figures.effective_mfu,
        "step_time_s": dataclasses.asdict(figures.step_time_s),
        "data_wait_frac": figures.data_wait_frac,
        "communication_exposed_frac": figures.communication_exposed_frac,
        "communication_bytes_per_step": _communicated(run),
        "communication": communication,
        "peak_memory_bytes": int(run.group.maximum(peak_memory_bytes(run.device.torch_device))),
        "mfu_rule": {
            "flops_rule": figures.flops_rule,
            "token_rule": figures.token_rule,
            "peak_source": figures.peak_source,
            "window": figures.window,
        },
        "communication_rule": (
            "payload that a rank hands to the collectives of each dimension in a step: the mean of this segment's "
            "steps, the largest of any rank"
        ),
        "gradient_reduction": _gradient_reduction(run),
        "weight_hash": _weight_hash(run),
        "memory_rule": (
            "largest allocated tensor bytes of any rank"
            if run.device.type == "cuda"
            else "largest resident set of any rank's process, the interpreter and libraries included"
        ),
        "recompute": None if run.budget_plan is None else run.budget_plan.to_document(),
        "steps": run.progress.step,
        "tokens": run.progress.tokens,
        "effective_tokens": run.progress.effective_tokens,
        "wall": dataclasses.asdict(figures.wall),
        "compilation": None if watch is None else watch.report.to_document(),
        "optimisations": [record.to_document() for record in run.optimisations.records()],
        "findings": [*figures.findings, *run.optimisations.findings(), *_of_data(run)],
        "reasons": reasons,
    }


def _of_data(run: TrainingRun) -> list[str]:
    """Waiting for batches, where there is any to speak of."""
    found = None if run.recorder.data is None else run.recorder.data.finding()
    return [] if found is None else [found]


def _communicated(run: TrainingRun) -> dict[str, float]:
    """By dimension of the mesh, those left out over which nothing travels. Collective."""
    several = [dimension for dimension in DIMENSIONS if run.mesh.size(dimension) > 1]
    several += [
        f"{dimension}_{level}"
        for dimension in several
        if run.mesh.hierarchy(dimension)
        for level in (INSIDE, ACROSS)
    ]
    largest = {
        dimension: run.group.maximum(run.recorder.communicated_per_step(dimension)) for dimension in several
    }
    return {dimension: value for dimension, value in largest.items() if value}


def _gradient_reduction(run: TrainingRun) -> dict[str, Any] | None:
    """How far the reduced gradient of this segment's first step was from one that travelled in full precision;
    None where gradients travel in it."""
    error = run.stepper.sync.wire_error()
    if error is None:
        return None
    return {"dtype": run.config.precision.grad_reduce_dtype, "relative_error": error}


def _weight_hash(run: TrainingRun) -> dict[str, Any] | None:
    """What the comparisons of replicas have looked at in this segment; None where none was asked for, or possible."""
    check = run.replica_check
    if check is None:
        return None
    return {"checks": check.checks, "tensors_compared": check.shared, "agreed_at": check.agreed_at}
