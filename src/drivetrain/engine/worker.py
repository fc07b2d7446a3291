"""One process of a run, from its directory to its end: build, train, report."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drivetrain.archive.heartbeat import Heartbeat
from drivetrain.archive.origin import RunOrigin
from drivetrain.archive.reader import open_run
from drivetrain.archive.writer import RankLog, RunWriter
from drivetrain.config import RunConfig, chosen_backend
from drivetrain.engine.assembly import assemble
from drivetrain.engine.devices import peak_for, select_device, set_threads, thread_count
from drivetrain.engine.failures import explain
from drivetrain.engine.hang import watched
from drivetrain.engine.loop import Outcome, train
from drivetrain.engine.memory.cuda import translate_out_of_memory
from drivetrain.engine.memory.recompute_budget import BudgetPlan, budget_of, plan_of_run
from drivetrain.engine.ops.attention.products import attention_in_words
from drivetrain.engine.parallel.clocks import align
from drivetrain.engine.parallel.process_group import ProcessGroup, Ranks, join
from drivetrain.engine.precision import sum_in_fp32
from drivetrain.engine.random_state import set_deterministic
from drivetrain.engine.stop import StopRequest
from drivetrain.engine.summary import summarise
from drivetrain.engine.training_run import Logbook, TrainingRun
from drivetrain.errors import DrivetrainError
from drivetrain.monitor import Console

__all__ = ["WorkerResult", "work"]


@dataclass(frozen=True)
class WorkerResult:
    """How this process ended, and on rank 0 the run's summary."""

    outcome: Outcome
    summary: dict[str, Any] | None


def work(run_path: Path, ranks: Ranks, stop: StopRequest | None = None) -> WorkerResult:
    """Train the run in ``run_path`` as one of its ranks; continues where its checkpoints end.

    Args:
        stop: entered before, so that a signal during the imports is not lost either; by default one of its
            own. A run that is asked to stop while it is set up ends, saved, after its first step.

    Raises:
        DrivetrainError: bad input; the run is marked failed with the message.
    """
    started = time.perf_counter()
    opened = open_run(run_path)
    config = opened.config()
    device = select_device(config.run, ranks.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device.torch_device)
    threads = set_threads(thread_count(config.run, ranks.local_world_size))
    set_deterministic(config.run.deterministic)
    # A step is tried in a group of ranks that are not there: before the real one.
    budget_plan = _budget_plan(config, ranks)
    sum_in_fp32()
    with (
        nullcontext(stop) if stop is not None else StopRequest() as stopping,
        join(ranks, device.type, config.parallelism.distributed_timeout_minutes) as group,
        _logbook(run_path, config, group) as logbook,
    ):
        limit_bytes = config.memory.device_memory_limit_bytes
        with _failure_recorded(logbook), translate_out_of_memory(limit_bytes, device.torch_device):
            peak = peak_for(device, config.precision.params_dtype, threads.compute)
            fingerprint = opened.data_fingerprint()
            origin = RunOrigin.from_manifest(opened.manifest)
            run = assemble(
                config, run_path, group, device, logbook, peak.peak, fingerprint, origin, budget_plan()
            )
            minutes = config.parallelism.distributed_timeout_minutes
            with (
                _begin(run, run_path, threads.compute, peak.reason, origin.perturb_ulp),
                watched(run_path, ranks.rank, 60 * minutes, lambda: run.progress.step)
                if group.size > 1
                else nullcontext(),
                run.watching_compilation(),
            ):
                before = run.progress.step
                outcome = train(run, stopping)
                if run.progress.step > before:
                    run.note_what_the_end_shows()
            summary = summarise(run, outcome, run_path, time.perf_counter() - started, peak)
        _end(logbook, outcome, summary)
        return WorkerResult(outcome, summary if group.is_main else None)


def _budget_plan(config: RunConfig, ranks: Ranks) -> Callable[[], BudgetPlan | None]:
    """What this rank recomputes, to be asked for once there is a record of why it fails."""
    if config.memory.recompute_granularity != "budget":
        return lambda: None
    try:
        plan = plan_of_run(config, ranks.world_size, ranks.rank, budget_of(config))
    except DrivetrainError as error:
        refused = error

        def fails() -> BudgetPlan | None:
            raise refused

        return fails
    return lambda: plan


def _attention_in_words(run: TrainingRun) -> str:
    if run.optimisations.is_active("attention"):
        return f"the operator attention, {chosen_backend(run.config.fusion, 'attention')}"
    return attention_in_words(
        run.decoder.compute_dtype, run.device.torch_device, run.config.model.attention_dropout
    )


@contextmanager
def _logbook(run_path: Path, config: RunConfig, group: ProcessGroup) -> Iterator[Logbook]:
    """What this rank tells the run and the terminal: everything on rank 0, nothing on the others."""
    with ExitStack() as stack:
        if not group.is_main:
            yield Logbook()
            return
        console = stack.enter_context(Console(config.training.train_iters))
        writer = stack.enter_context(RunWriter.resume(run_path, on_fault=console.say))
        beat = stack.enter_context(Heartbeat(run_path, phase="setup", on_fault=console.say))
        yield Logbook(writer=writer, beat=beat, console=console)


@contextmanager
def _failure_recorded(logbook: Logbook) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        logbook.event("end", status="killed", reason="interrupted twice; nothing was saved")
        raise
    except DrivetrainError as error:
        logbook.event("end", status="failed", reason=str(error), bad_input=True)
        raise
    except BaseException as error:
        meaning = explain(error)
        if meaning is not None:
            logbook.event("end", status="failed", reason=str(meaning), bad_input=True)
            raise meaning from error
        logbook.event("end", status="failed", reason=f"{type(error).__name__}: {error}")
        raise


@contextmanager
def _begin(
    run: TrainingRun, run_path: Path, num_threads: int, no_peak: str | None, perturb_ulp: int | None
) -> Iterator[None]:
    """Open the segment, on every rank that writes, for the time of training; say where the run starts from."""
    first = run.progress.step + 1
    logbook, group = run.logbook, run.group
    segment = 0
    if logbook.writer is not None:
        segment = logbook.writer.open_segment(first)
        logbook.event(
            "resume" if run.resumed else "start",
            step=run.progress.step,
            threads=num_threads,
            device=run.device.name,
            perturb_ulp=perturb_ulp,
            attention=_attention_in_words(run),
        )
        if no_peak is not None:
            logbook.event("warning", message=f"no MFU: {no_peak}")
            logbook.say(f"no MFU: {no_peak}")
    segment = int(group.broadcast_text(str(segment)))
    if not run.config.monitor.log_rank_times:
        yield
        return
    rank = group.ranks.rank

    def lost(message: str) -> None:
        print(f"rank {rank}: {message}", file=sys.stderr, flush=True)

    # A full disk costs the lines, as it does on rank 0's metrics, and not the run.
    log = RankLog(run_path, segment=segment, rank=rank, start_step=first, on_fault=lost)
    run.recorder.communication.clock = align(group)
    with closing(log):
        run.recorder.rank_log = log
        yield


def _end(logbook: Logbook, outcome: Outcome, summary: dict[str, Any]) -> None:
    status = "failed" if outcome.status == "diverged" else outcome.status
    # The event first: on a full disk the summary raises, and the run has ended all the same.
    logbook.event("end", status=status, reason=outcome.reason)
    if logbook.writer is not None:
        logbook.writer.write_summary(summary)
    if outcome.reason is not None:
        logbook.say(f"{outcome.status}: {outcome.reason}")
