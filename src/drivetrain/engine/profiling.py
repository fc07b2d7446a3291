"""A window of steps under torch's profiler, and what the profiler itself cost.

The plan of a window of n steps, in the order of the run::

    n steps without   one step on trial   n steps recorded   n steps without

Every rank starts and stops at the same steps, whether it writes a trace or not, and all wait for each other
before the first and after the last of them: a rank whose profiler starts late would look like a slow one.
The trial pays what the profiler costs only once, and tells how large a step's trace is. The steps on both
sides are the calibration. Trial and window are tagged ``profile``: they are no steady state.

A trace appears in ``profile/<first>-<last>/rank<r>.json.gz`` when it is whole, or not at all.
"""

import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from drivetrain.archive.encoding import SCHEMA
from drivetrain.engine.memory.host import PlainPageFaults, look_at_allocator
from drivetrain.engine.memory.measured import MemoryMarks
from drivetrain.engine.recorded_collections import RecordedCollections
from drivetrain.engine.trace_file import export_trace, remove_leftovers, trace_bytes
from drivetrain.engine.training_run import TrainingRun
from drivetrain.errors import DrivetrainError

__all__ = ["ProfileWindow", "WindowPlan"]


@dataclass(frozen=True)
class WindowPlan:
    """Steps of a window, counted from 1, both ends included."""

    first: int
    last: int

    @property
    def num_steps(self) -> int:
        """Recorded steps."""
        return self.last - self.first + 1

    @property
    def trial(self) -> int:
        """The step before, profiled to be measured and thrown away."""
        return self.first - 1

    @property
    def before(self) -> tuple[int, int]:
        """First and last step of the calibration in front of the trial."""
        return self.trial - self.num_steps, self.trial - 1

    @property
    def after(self) -> tuple[int, int]:
        """First and last step of the calibration behind the window."""
        return self.last + 1, self.last + self.num_steps

    def cut(self, last: int) -> "WindowPlan":
        """The same window when it ends with step ``last``."""
        return WindowPlan(self.first, last)


class ProfileWindow:
    """Watches the loop of one segment; does nothing when ``profiler.profile`` is off.

    As a context manager: left normally in the middle of the window, what was recorded so far is written;
    left by an exception nothing is.
    """

    def __init__(self, run: TrainingRun) -> None:
        config = run.config
        profiler = config.profiler
        self._run = run
        self._folder = run.path / "profile"
        self._profiled = run.group.ranks.rank in profiler.profiled_ranks(run.group.size)
        self._plan: WindowPlan | None = None
        if profiler.profile:
            self._plan = WindowPlan(profiler.profile_step_start, profiler.profile_step_end - 1)
        self._profiler: profile | None = None
        self._recording: str | None = None
        self._span: record_function | None = None
        self._written: WindowPlan | None = None
        self._counted = (0, 0, 0)
        self._cut_because: str | None = None
        self._faults: PlainPageFaults | None = None
        self._marks: MemoryMarks | None = None
        self._collections = RecordedCollections()

    @property
    def tags(self) -> list[str]:
        """Tags of the step that is under way."""
        return ["profile"] if self._recording is not None else []

    def __enter__(self) -> Self:
        if self._run.group.is_main:
            remove_leftovers(self._folder)
        plan = self._plan
        earliest = self._run.recorder.clock.warmup_steps + self._run.progress.step + 1
        if plan is not None and plan.trial < earliest:
            self._plan = None
            if not any(self._folder.glob("*/rank*.json.gz")):
                self._run.logbook.warn(
                    f"steps {plan.first}-{plan.last} are not profiled: this segment begins with step "
                    f"{self._run.progress.step + 1}, and its warm-up reaches up to the window"
                )
        elif plan is not None and self._run.device.type == "cpu":
            self._faults = PlainPageFaults(max(plan.before[0], earliest), plan.trial)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abandon()
            return
        with self._profiler_time():
            self._close_step()
            if self._recording == "trial":
                self._abandon()
            elif self._recording == "window":
                assert self._plan is not None
                completed = self._run.progress.step
                if completed < self._plan.last:
                    self._cut_because = f"the run ended with step {completed}"
                self._finish(self._plan.cut(completed))
        self._calibrate()

    def before_step(self, step: int) -> None:
        """To be called on every rank before step number ``step`` begins. Between steps, it costs no step time."""
        plan = self._plan
        if plan is None:
            return
        if self._faults is not None:
            self._faults.before_step(step)
        with self._profiler_time() if self._acts_before(step) else contextlib.nullcontext():
            self._close_step()
            if step == plan.trial:
                self._start("trial")
            elif step == plan.first:
                plan = self._end_trial(plan)
                if plan is not None:
                    self._start("window")
            elif step == plan.last + 1:
                self._finish(plan)
        if self._written is not None and step == self._written.after[1] + 2:
            # The recorder is one step late: only now are the figures of the last step of the calibration in.
            self._calibrate()
        if self._recording is not None and self._profiled:
            self._span = record_function(f"ProfilerStep#{step}")
            self._span.__enter__()

    def _acts_before(self, step: int) -> bool:
        plan = self._plan
        return plan is not None and step in (plan.trial, plan.first, plan.last + 1)

    def _close_step(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)

    @contextlib.contextmanager
    def _profiler_time(self) -> Iterator[None]:
        """Time that the profiler takes between steps counts as maintenance."""
        run = self._run
        run.logbook.heartbeat(run.progress.step, "profile")
        before = time.perf_counter()
        yield
        run.recorder.clock.maintenance("profile", time.perf_counter() - before)
        run.logbook.heartbeat(run.progress.step, "train")

    def _start(self, what: str) -> None:
        run = self._run
        self._recording = what
        progress = run.progress
        self._counted = (progress.tokens, progress.effective_tokens, progress.model_flops)
        if self._profiled:
            self._profiler = _new_profiler(run)
            self._profiler.prepare_trace()
            self._marks = _new_marks(run)
        # A collective under way would be half in the trace of one rank and not in another's.
        run.recorder.settle()
        run.stepper.sync.settle()
        _wait_for_device(run.device.torch_device)
        run.group.barrier()
        if self._marks is not None:
            self._marks.begin()
        if self._profiler is not None:
            self._collections.begin()
            self._profiler.start_trace()

    def _stop(self) -> profile | None:
        self._recording = None
        profiler, self._profiler = self._profiler, None
        marks, self._marks = self._marks, None
        if marks is not None:
            marks.end()
        if profiler is not None:
            _wait_for_device(self._run.device.torch_device)
            profiler.stop_trace()
        self._collections.end()
        return profiler

    def _abandon(self) -> None:
        """Stop recording; nothing is written."""
        self._span = None
        self._stop()

    def _end_trial(self, plan: WindowPlan) -> WindowPlan | None:
        """The window that fits the size limit; None when not even a step does. The same on every rank."""
        run = self._run
        profiler = self._stop()
        size = 0.0
        if profiler is not None:
            try:
                self._folder.mkdir(exist_ok=True)
                size = float(trace_bytes(profiler, self._folder))
            except (DrivetrainError, OSError) as error:
                self._explain(error)
                size = math.inf
        largest = run.group.maximum(size)
        limit = run.config.profiler.file_size_limit_bytes
        fits = 0 if math.isinf(largest) else int(limit // max(largest, 1.0))
        if fits >= plan.num_steps:
            return plan
        if fits == 0:
            why = (
                "a rank cannot write its trace"
                if math.isinf(largest)
                else f"the trace of one step takes {largest:,.0f} bytes, above "
                f"profiler.file_size_limit_bytes = {limit:,}"
            )
            run.logbook.warn(f"steps {plan.first}-{plan.last} are not profiled: {why}")
            self._plan = None
            return None
        self._cut_because = (
            f"profiler.file_size_limit_bytes = {limit:,} holds {fits} steps of {largest:,.0f} bytes"
        )
        self._plan = plan.cut(plan.first + fits - 1)
        run.logbook.warn(
            f"steps {self._plan.first}-{self._plan.last} are profiled, not up to {plan.last}: {self._cut_because}"
        )
        return self._plan

    def _finish(self, plan: WindowPlan) -> None:
        """Write the traces of the steps of ``plan``, and the event."""
        run = self._run
        run.recorder.settle()
        run.stepper.sync.settle()
        work = self._work_done()
        if self._profiler is not None:
            about = {**_about(run, plan), **work, **self._host_memory()}
            if self._marks is not None:
                about["memory"] = self._marks.document()
            self._profiler.add_metadata_json("drivetrain", json.dumps(about))
        profiler = self._stop()
        failed = 0
        folder = self._folder / f"{plan.first}-{plan.last}"
        if profiler is not None and plan.num_steps > 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                export_trace(profiler, folder / f"rank{run.group.ranks.rank}.json.gz")
            except (DrivetrainError, OSError) as error:
                self._explain(error)
                failed = 1
        # Also keeps the ranks together: one that wrote longer would look like a slow one in the next step.
        (failed,) = run.group.start_sum([failed]).wait()
        if plan.num_steps == 0:
            return
        self._written = plan
        self._record(plan, folder, work, failed)

    def _work_done(self) -> dict[str, int]:
        """Tokens and model FLOPs of all ranks since the window began."""
        progress = self._run.progress
        tokens, effective_tokens, model_flops = self._counted
        return {
            "tokens": progress.tokens - tokens,
            "effective_tokens": progress.effective_tokens - effective_tokens,
            "model_flops": progress.model_flops - model_flops,
        }

    def _host_memory(self) -> dict[str, Any]:
        """What the allocator of host memory does with what is freed; nothing where tensors lie elsewhere."""
        if self._faults is None:
            return {}
        seen = look_at_allocator()
        return {
            "host_memory": {
                "allocator": seen.name,
                "keeps_freed": seen.keeps_freed,
                "reason": seen.reason,
                "page_faults_per_step": self._faults.per_step,
            }
        }

    def _record(self, plan: WindowPlan, folder: Path, work: dict[str, int], failed: int) -> None:
        run = self._run
        if not run.group.is_main:
            return
        sizes = {file.name: file.stat().st_size for file in sorted(folder.glob("rank*.json.gz"))}
        run.logbook.event(
            "window",
            what="profile",
            first=plan.first,
            last=plan.last,
            path=str(folder.relative_to(run.path)),
            ranks=list(run.config.profiler.profiled_ranks(run.group.size)),
            file_bytes=sizes,
            cut_because=self._cut_because,
            **work,
        )
        if failed:
            run.logbook.warn(f"{failed} of the profiled ranks could not write their trace to {folder}")
        run.logbook.say(
            f"steps {plan.first}-{plan.last} profiled: {len(sizes)} trace{'s' if len(sizes) != 1 else ''}, "
            f"{sum(sizes.values()):,} bytes, in {folder}"
        )

    def _calibrate(self) -> None:
        """Compare the profiled steps with those on both sides, once."""
        plan, self._written = self._written, None
        if plan is None or not self._run.group.is_main:
            return
        clock = self._run.recorder.clock
        profiled = clock.durations_s(plan.first, plan.last, tags=("profile",))
        before, after = clock.durations_s(*plan.before), clock.durations_s(*plan.after)
        with_it, without = _median(profiled), _median([*before, *after])
        ratio = with_it / without if with_it is not None and without else None
        reason = None
        if ratio is None:
            which = "with" if with_it is None else "without"
            reason = f"no step {which} the profiler was free of warm-up and of other tags"
        self._run.logbook.event(
            "window",
            what="profile_overhead",
            first=plan.first,
            last=plan.last,
            step_s_profiled=with_it,
            step_s_plain=without,
            ratio=ratio,
            step_s_before=_median(before),
            step_s_after=_median(after),
            mean_step_s_profiled=_mean(profiled),
            mean_step_s_plain=_mean([*before, *after]),
            num_profiled=len(profiled),
            num_plain=len(before) + len(after),
            reason=reason,
        )
        if ratio is not None and with_it is not None and without is not None:
            self._run.logbook.say(
                f"profiler: a step took {with_it:.4g} s with it and {without:.4g} s without (x{ratio:.3f})"
            )

    def _explain(self, error: Exception) -> None:
        """The reason, from the rank that knows it; a failed profile never ends a run."""
        print(f"rank {self._run.group.ranks.rank}: no trace: {error}", file=sys.stderr, flush=True)


def _new_profiler(run: TrainingRun) -> profile:
    profiler = run.config.profiler
    activities = [ProfilerActivity.CPU]
    if run.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # Collectives in levels are handed over by threads, whose records are made only if all threads' are.
    every_thread = run.optimisations.is_active("hierarchical_collectives")
    return profile(
        activities=activities,
        record_shapes=profiler.record_shapes,
        profile_memory=profiler.profile_memory,
        with_stack=profiler.with_stack,
        experimental_config=_ExperimentalConfig(profile_all_threads=True) if every_thread else None,
    )


def _new_marks(run: TrainingRun) -> MemoryMarks | None:
    if not run.config.profiler.profile_memory:
        return None
    return MemoryMarks(
        run.decoder,
        run.optimizer,
        run.stepper.sync,
        {} if run.decoder.blocks_are_compiled else dict(run.decoder.blocks.items()),
        run.device.torch_device,
    )


def _about(run: TrainingRun, plan: WindowPlan) -> dict[str, Any]:
    """What the trace says of the run it comes from, under the key ``drivetrain``; see ``docs/profile.md``."""
    config, ranks = run.config, run.group.ranks
    return {
        "schema": SCHEMA,
        "run": run.path.name,
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "first": plan.first,
        "last": plan.last,
        # Sizes of the parallel dimensions, the fastest varying over ranks first; they multiply to world_size.
        "layout": {
            dim: run.mesh.size(dim) for dim in run.mesh.layout.order if dim == "dp" or run.mesh.size(dim) > 1
        },
        "device": {"type": run.device.type, "name": run.device.name},
        "params_dtype": config.precision.params_dtype,
        "num_threads": torch.get_num_threads(),
        "tokens_per_step": run.tokens_per_step,
        "model": config.model.model_dump(),
    }


def _wait_for_device(device: torch.device) -> None:
    """Work of the steps outside the window must not reach into it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
