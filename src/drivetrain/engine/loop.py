"""The training loop, to be read from top to bottom.

:mod:`drivetrain.engine.assembly` builds what is used here, :mod:`drivetrain.engine.step` is the arithmetic
of one step, :mod:`drivetrain.engine.recorder` turns its figures into metrics.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torch.profiler import record_function

from drivetrain.engine.compilation import graphs_compiled
from drivetrain.engine.evaluation import Evaluation
from drivetrain.engine.profiling import ProfileWindow
from drivetrain.engine.schedule import learning_rate
from drivetrain.engine.stop import StopRequest
from drivetrain.engine.training_run import TrainingRun

__all__ = ["Outcome", "train"]

GC_INTERVAL = 1000
"""Steps between collections of the garbage collector, which otherwise runs in the middle of any step."""


@dataclass(frozen=True)
class Outcome:
    """How the loop ended, and what held-out text says of the model."""

    status: Literal["finished", "interrupted", "diverged"]
    reason: str | None
    validation: Evaluation | None


def train(run: TrainingRun, stop: StopRequest) -> Outcome:
    """Train until the last step, a request to stop, a loss that is not finite, gradients that overflow at any loss
    scale, or weights that differ where they are held twice."""
    config, progress, recorder = run.config, run.progress, run.recorder
    first_step, last_step = progress.step + 1, config.training.train_iters
    validation: Evaluation | None = None
    saved_at = progress.step if run.resumed else None
    compared_every = config.monitor.check_weight_hash_across_dp_replicas_interval
    differing = run.compare_replicas(progress) if compared_every else None
    overflowing: str | None = None

    run.probe_leak()
    with _collect_garbage_at_chosen_steps(), run.train_batches() as batches, ProfileWindow(run) as window:
        while progress.step < last_step and differing is None:
            run.logbook.heartbeat(progress.step, "train")
            window.before_step(progress.step + 1)
            graphs = graphs_compiled()
            # In the middle of the step's tokens: neither the first step nor the last is spent at a rate of 0.
            seen = progress.tokens + run.tokens_per_step // 2
            rate = learning_rate(seen, config.optimizer, config.lr_schedule, run.total_tokens)
            figures = run.stepper.step(
                batches,
                rate,
                # A checkpoint that could not be written ends the run, on all ranks at the same step.
                stop_requested=stop.requested or run.saver.failed,
                on_gradients=run.take_gradients(progress.step + 1),
            )

            progress.step += 1
            progress.samples += config.training.global_batch_size
            progress.tokens += figures.tokens
            progress.effective_tokens += figures.valid_tokens
            progress.model_flops += run.model_flops_of(figures)
            tags = [*window.tags, "compile"] if graphs_compiled() != graphs else window.tags
            if progress.step % GC_INTERVAL == 0:
                with record_function("drivetrain/gc"):
                    gc.collect(1)
                tags = [*tags, "gc"]
            run.note_compilation()
            recorder.submit(figures, progress, tags)
            recorder.close_step()
            if progress.step == first_step:
                run.note_wire_error()
            if figures.skipped:
                overflowing = run.note_skipped_step(figures)
                if overflowing is not None:
                    break
            run.note_finished_save()
            run.note_slow_data()

            saves = due(config.checkpoint.save_interval, progress.step)
            if compared_every and (saves or due(compared_every, progress.step)):
                # Also before a checkpoint would keep one rank's version of them, from which the run then went on.
                differing = run.compare_replicas(progress)
                if differing is not None:
                    break
            if saves:
                recorder.flush(progress)
            if recorder.diverged_at is not None:
                break
            if saves:
                run.save(progress)
                saved_at = progress.step
            evaluates = config.training.eval_iters > 0 and due(config.training.eval_interval, progress.step)
            if evaluates and progress.step < last_step:
                validation = run.evaluate(progress)
            if figures.stop_votes:
                break
        run.stepper.sync.settle()
        recorder.flush(progress)

    if overflowing is not None:
        # No skipped step has changed the weights: they are as sound as before, and what was saved of them is enough.
        run.finish_saving()
        return Outcome("diverged", f"step {progress.step}: {overflowing}", validation)
    if compared_every and differing is None and recorder.diverged_at is None and saved_at != progress.step:
        differing = run.compare_replicas(progress)
    if differing is not None:
        run.finish_saving()
        return Outcome("diverged", differing, validation)
    if recorder.diverged_at is not None:
        run.finish_saving()
        # The weights hold non-finite numbers by now: nothing worth saving, the last checkpoint is older.
        reason = f"the {recorder.diverged_in} at step {recorder.diverged_at} is not finite"
        return Outcome("diverged", reason, validation)
    if saved_at != progress.step:
        run.save(progress)
    if progress.step < last_step:
        run.finish_saving()
        return Outcome("interrupted", stop.signal_name or "another rank was asked to stop", validation)
    if config.training.eval_iters:
        validation = run.evaluate(progress)
    run.finish_saving()
    return Outcome("finished", None, validation)


def due(interval: int, step: int) -> bool:
    """True at every ``interval``-th step; an interval of 0 never is."""
    return interval > 0 and step % interval == 0


@contextmanager
def _collect_garbage_at_chosen_steps() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
