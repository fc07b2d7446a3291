"""Figures of steps become metrics, one step late, so that nothing waits for the device.

When step t is handed in, step t-1 has long finished on the device; reading its loss and its clock then
costs no synchronisation. Everything a run measures about itself passes through here.
"""

import math
import resource
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.profiler import record_function

from drivetrain.archive.writer import RankLog, RunWriter
from drivetrain.config import RunConfig
from drivetrain.engine.communication import Communication, Taken, metrics_of
from drivetrain.engine.data_report import DataReport
from drivetrain.engine.parallel.process_group import ProcessGroup
from drivetrain.engine.progress import Progress
from drivetrain.engine.step import StepFigures
from drivetrain.engine.timing import Mark, elapsed_s, mark
from drivetrain.measure.clock import StepClock
from drivetrain.measure.flops import RepeatedLayers, hardware_flops, model_flops
from drivetrain.measure.overlap import StepOverlap
from drivetrain.measure.peaks import Peak
from drivetrain.monitor import Console, StepInfo

__all__ = ["Recorder", "peak_memory_bytes"]


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process held: allocated tensors on CUDA, the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class _Pending:
    """A step whose figures may not be there yet."""

    figures: StepFigures
    counters: Progress
    global_loss_sum: torch.Tensor
    work: dist.Work | None
    tags: tuple[str, ...]
    ended: Mark | None = None
    taken: Taken | None = None


@dataclass
class _Interval:
    """Sums over the steps since the last record."""

    steps: int = 0
    duration_s: float = 0.0
    data_wait_s: float = 0.0
    exposed_s: float = 0.0
    hooks_s: float = 0.0
    tokens: int = 0
    effective_tokens: int = 0
    flops: int = 0
    communicated: Counter[str] = field(default_factory=Counter)
    offloaded: dict[str, float] = field(default_factory=dict)
    fused_calls: int | None = None
    overlap: StepOverlap = field(default_factory=StepOverlap)
    tags: dict[str, None] = field(default_factory=dict)


class Recorder:
    """Feeds the clock, the run directory and the console from the steps' figures."""

    def __init__(
        self,
        config: RunConfig,
        group: ProcessGroup,
        device: torch.device,
        *,
        peak: Peak | None,
        writer: RunWriter | None,
        console: Console | None,
        communication: Communication | None = None,
        repeated: RepeatedLayers | None = None,
    ) -> None:
        self.clock = StepClock()
        self.last_loss: float | None = None
        self.diverged_at: int | None = None
        self.diverged_in = ""
        self._config = config
        self._group = group
        self._device = device
        self._repeated = RepeatedLayers() if repeated is None else repeated
        self._peak = peak
        self._writer = writer
        self.rank_log: RankLog | None = None
        self.data: DataReport | None = None
        self._console = console
        self.communication = Communication(None) if communication is None else communication
        self._pending: _Pending | None = None
        self._interval = _Interval()
        self._hooks_s = 0.0
        self._steps = 0
        self._communicated: Counter[str] = Counter()

    def communicated_per_step(self, dimension: str) -> float:
        """Bytes that this rank handed to the collectives of ``dimension`` in a step: the mean of what was recorded."""
        return self._communicated[dimension] / self._steps if self._steps else 0.0

    def submit(self, figures: StepFigures, progress: Progress, tags: Sequence[str]) -> None:
        """Hand in the step that was just issued; the one before is recorded now."""
        before = time.perf_counter()
        with record_function("drivetrain/log"):
            total = figures.loss_sum.clone()
            work = self._group.sum_(total, async_op=True)
            self._record_pending(progress)
            self._pending = _Pending(figures, replace(progress), total, work, tuple(tags))
        self._hooks_s += time.perf_counter() - before

    def close_step(self) -> None:
        """The step ends here: what follows until the next one (evaluation, checkpoint) is not part of it."""
        if self._pending is not None and self._pending.ended is None:
            self._pending = replace(self._pending, ended=mark(self._device), taken=self.communication.take())

    def settle(self) -> None:
        """Return when the collective of the pending step is over on this rank; its record is unchanged."""
        if self._pending is not None and self._pending.work is not None:
            self._pending.work.wait()

    def flush(self, progress: Progress) -> None:
        """Record the step that is still pending, waiting for the device if need be."""
        with record_function("drivetrain/log"):
            self._record_pending(progress)

    def _record_pending(self, progress: Progress) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        assert pending.ended is not None, "close_step() ends every step"
        figures, counters = pending.figures, pending.counters
        with record_function("drivetrain/sync"):
            if pending.work is not None:
                pending.work.wait()
            loss = _loss_of(float(pending.global_loss_sum.item()), figures.valid_tokens)
            grad_norm = float(figures.grad_norm.item())
            duration_s = elapsed_s(figures.started, pending.ended)
        if loss is not None:
            self.last_loss = loss
        # A skipped step has changed no weight: whether too many of them follow each other is the loss scaler's to say.
        if self.diverged_at is None and not figures.skipped:
            # A gradient that is not finite has made the weights so, one step before the loss shows it.
            for what, value in (("loss", loss), ("gradient norm", grad_norm)):
                if value is not None and not math.isfinite(value):
                    self.diverged_at, self.diverged_in = counters.step, what
                    break
        smoothed = progress.smooth(loss) if loss is not None and math.isfinite(loss) else None
        overlap = self.communication.overlap(pending.taken, figures.started, pending.ended)
        exposed_s = self._exposed_s(figures, overlap)
        model, squares = self._config.model, figures.sum_squared_lengths
        flops = model_flops(model, tokens=figures.tokens, sum_squared_lengths=squares).total
        if overlap is not None:
            self._interval.overlap += overlap
            if not self.clock.warming_up and not pending.tags:
                self.communication.add_steady(overlap)
        self._interval.tags |= dict.fromkeys(("warmup",) if self.clock.warming_up else ())
        self._interval.tags |= dict.fromkeys(pending.tags)
        self.clock.record(
            step=counters.step,
            duration_s=duration_s,
            data_wait_s=figures.data_wait_s,
            exposed_comm_s=exposed_s,
            tokens=figures.tokens,
            effective_tokens=figures.valid_tokens,
            model_flops=flops,
            hardware_flops=hardware_flops(
                model, tokens=figures.tokens, sum_squared_lengths=squares, recompute=self._repeated
            ).total,
            tags=pending.tags,
        )
        self._gather(figures, duration_s, exposed_s, flops)
        last = counters.step == self._config.training.train_iters
        if counters.step % self._config.monitor.log_interval == 0 or last or self.diverged_at is not None:
            self._log(pending, loss, smoothed, exposed_s is not None)

    def _exposed_s(self, figures: StepFigures, overlap: StepOverlap | None) -> float | None:
        """Seconds of waiting for collectives; None where nobody knows."""
        if overlap is not None and self.communication.unseen is None:
            return overlap.exposed_ns * 1e-9
        return elapsed_s(*figures.exposed_wait) if figures.exposed_wait is not None else None

    def _gather(self, figures: StepFigures, duration_s: float, exposed_s: float | None, flops: int) -> None:
        interval = self._interval
        interval.steps += 1
        interval.duration_s += duration_s
        interval.data_wait_s += figures.data_wait_s
        interval.exposed_s += exposed_s or 0.0
        interval.tokens += figures.tokens
        interval.effective_tokens += figures.valid_tokens
        interval.flops += flops
        interval.communicated.update(figures.communicated)
        if figures.offloaded is not None:
            moved = {"moved_bytes": figures.offloaded.nbytes, "exposed_s": figures.offloaded.exposed_s}
            for what, value in moved.items():
                interval.offloaded[what] = interval.offloaded.get(what, 0.0) + value
        if figures.fused_calls is not None:
            interval.fused_calls = (interval.fused_calls or 0) + figures.fused_calls
        self._steps += 1
        self._communicated.update(figures.communicated)

    def _log(self, pending: _Pending, loss: float | None, smoothed: float | None, wait_known: bool) -> None:
        interval, self._interval = self._interval, _Interval()
        hooks_s, self._hooks_s = self._hooks_s, 0.0
        metrics = self._metrics(pending, interval, loss, smoothed)
        metrics["time/hooks_s"] = hooks_s / interval.steps
        if wait_known:
            metrics["time/comm_exposed_s"] = interval.exposed_s / interval.steps
        metrics |= metrics_of(interval.overlap, self.communication.unseen)
        communicated = {
            f"comm/{dimension}_bytes": total / interval.steps
            for dimension, total in interval.communicated.items()
        }
        metrics |= communicated
        metrics |= {f"offload/{what}": total / interval.steps for what, total in interval.offloaded.items()}
        if interval.fused_calls is not None:
            metrics["comm/tp_fused_calls"] = interval.fused_calls / interval.steps
        counters, tags = pending.counters, tuple(interval.tags)
        if self.data is not None:
            metrics |= self.data.metrics(interval.steps, interval.data_wait_s, interval.duration_s, tags)
        if self._writer is not None:
            self._writer.log_metrics(counters.step, metrics, tags)
        if self.rank_log is not None:
            own_times = _own_times(metrics, waits=self._group.size > 1)
            self.rank_log.log(
                counters.step,
                {**own_times, **communicated},
                collectives=self.communication.line_of(pending.taken),
            )
        if self._console is not None:
            self._console.step(
                StepInfo(
                    step=counters.step,
                    total_steps=self._config.training.train_iters,
                    samples=counters.samples,
                    global_batch_size=self._config.training.global_batch_size,
                    metrics=metrics,
                    tags=tags,
                )
            )

    def _metrics(
        self, pending: _Pending, interval: _Interval, loss: float | None, smoothed: float | None
    ) -> dict[str, float | None]:
        figures, counters = pending.figures, pending.counters
        devices = self._group.size
        seconds = interval.duration_s
        flops_per_device = interval.flops / seconds / devices
        memory_key = "allocated" if self._device.type == "cuda" else "process_rss"
        scaling: dict[str, float | None] = {}
        if figures.loss_scale is not None:
            scaling = {"optim/loss_scale": figures.loss_scale, "optim/skipped_steps": figures.skipped_steps}
        return {
            "train/loss": loss,
            "train/loss_ema": smoothed,
            "train/grad_norm": None if figures.skipped else float(figures.grad_norm.item()),
            "train/grad_clip_coef": None if figures.skipped else float(figures.clip_coefficient.item()),
            **scaling,
            "optim/lr": figures.learning_rate,
            "time/step_s": seconds / interval.steps,
            "time/data_wait_s": interval.data_wait_s / interval.steps,
            "throughput/tokens_per_sec": interval.tokens / seconds,
            "throughput/device/tokens_per_sec": interval.tokens / seconds / devices,
            "throughput/effective_tokens_per_sec": interval.effective_tokens / seconds,
            "throughput/device/flops_per_sec": flops_per_device,
            "throughput/device/mfu": flops_per_device / self._peak.value if self._peak is not None else None,
            f"memory/{memory_key}_peak_bytes": float(peak_memory_bytes(self._device)),
            "progress/tokens": counters.tokens,
            "progress/effective_tokens": counters.effective_tokens,
            "progress/samples": counters.samples,
            "progress/flops": counters.model_flops,
        }


def _loss_of(loss_sum: float, valid_tokens: int) -> float | None:
    """Nats per token; None for a global batch in which no token carries loss: it says nothing of the model."""
    return loss_sum / valid_tokens if valid_tokens else None


def _own_times(metrics: Mapping[str, float | None], *, waits: bool) -> dict[str, float | None]:
    """What differs between ranks: own work is the step without the two waits; None where there is a wait for other
    ranks (``waits``) that is not known."""
    times = {key: metrics.get(key) for key in ("time/step_s", "time/comm_exposed_s", "time/data_wait_s")}
    if waits and times["time/comm_exposed_s"] is None:
        return {**times, "time/own_work_s": None}
    step, *waited = (value or 0.0 for value in times.values())
    return {**times, "time/own_work_s": step - sum(waited)}
