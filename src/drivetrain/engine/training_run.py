"""A run as the loop sees it: what it trains, what it has done, and the things it does now and then."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from drivetrain.archive.heartbeat import Heartbeat
from drivetrain.archive.reader import open_run
from drivetrain.archive.writer import RunWriter
from drivetrain.config import RunConfig, tokens_per_step, total_tokens
from drivetrain.engine.checkpoint import CheckpointSaver, Saved, held_state
from drivetrain.engine.compile_report import CompileReport, recompilation_in_words
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.data_report import DataReport
from drivetrain.engine.devices import Device
from drivetrain.engine.evaluation import Evaluation, evaluate
from drivetrain.engine.memory.recompute_budget import BudgetPlan
from drivetrain.engine.model.batch import Batch
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.optimisations.in_effect import Optimisations, finding_of
from drivetrain.engine.optimisations.service import service_of_all_ranks
from drivetrain.engine.parallel.gathering import whole_tensors
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import ProcessGroup
from drivetrain.engine.probe import losses_of_places, measure_leak, write_gradients, write_leak
from drivetrain.engine.progress import Progress
from drivetrain.engine.recorder import Recorder
from drivetrain.engine.step import StepFigures, Stepper
from drivetrain.engine.weight_hash import ReplicaCheck
from drivetrain.measure.flops import model_flops
from drivetrain.measure.optimisation import OptimisationRecord
from drivetrain.monitor import Console

__all__ = ["LOSS_SCALER", "Logbook", "TrainingRun"]

LOSS_SCALER = "loss_scaler"
"""Where a checkpoint's trainer state has that of the loss scaler."""


@dataclass(frozen=True)
class Logbook:
    """Where a process writes what happens. Rank 0 has all three; on the others nothing is written."""

    writer: RunWriter | None = None
    beat: Heartbeat | None = None
    console: Console | None = None

    def event(self, kind: str, **fields: object) -> None:
        """Append to the run's events."""
        if self.writer is not None:
            self.writer.event(kind, **fields)

    def say(self, text: str) -> None:
        """Show a line to the person at the terminal."""
        if self.console is not None:
            self.console.say(text)

    def warn(self, text: str) -> None:
        """An event and a line."""
        self.event("warning", message=text)
        self.say(f"warning: {text}")

    def heartbeat(self, step: int, phase: str) -> None:
        """Tell the heartbeat where the run is."""
        if self.beat is not None:
            self.beat.update(step=step, phase=phase)


@dataclass(frozen=True)
class TrainingRun:
    """Everything :func:`drivetrain.engine.loop.train` needs.

    Attributes:
        path: the run directory.
        probed: started with ``--probe``: its first step leaves what the gate compares.
        replica_check: compares weights that several ranks hold; None: there is one rank, or nobody asked.
        budget_plan: what this rank recomputes to stay within a budget; None: it goes by none.
    """

    path: Path
    config: RunConfig
    group: ProcessGroup
    mesh: Mesh
    device: Device
    corpus: Corpus
    decoder: Decoder
    optimizer: torch.optim.AdamW
    optimisations: Optimisations
    stepper: Stepper
    recorder: Recorder
    saver: CheckpointSaver
    progress: Progress
    resumed: bool
    logbook: Logbook
    probed: bool = False
    replica_check: ReplicaCheck | None = None
    budget_plan: BudgetPlan | None = None

    @property
    def checkpoint_folder(self) -> Path:
        """Where its checkpoints are."""
        return self.path / "checkpoints"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all ranks."""
        return tokens_per_step(self.config)

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole run."""
        return total_tokens(self.config)

    def model_flops_of(self, figures: StepFigures) -> int:
        """Model FLOPs of a step over all ranks."""
        return model_flops(
            self.config.model, tokens=figures.tokens, sum_squared_lengths=figures.sum_squared_lengths
        ).total

    @contextmanager
    def train_batches(self) -> Iterator[Iterator[Batch]]:
        """This rank's micro-batches from where the run stands to its last step."""
        training = self.config.training
        remaining = (training.train_iters - self.progress.step) * training.global_batch_size
        with BatchLoader(
            self.config,
            self.corpus,
            "train",
            rank=self.mesh.index("dp"),
            world_size=self.mesh.size("dp"),
            start_sample=self.progress.samples,
            num_samples=remaining,
            num_workers=self.optimisations.building.num_workers,
            prefetch_batches=self.optimisations.building.prefetch_batches,
            sample_cache=self.optimisations.building.sample_cache,
        ) as loader:
            self._note(self.optimisations.begin(loader), "start")
            report = DataReport(loader, self.config.data, self.progress.samples)
            self._note_order(report)
            self.recorder.data = report
            yield iter(loader)

    def note_what_the_end_shows(self) -> None:
        """Record the optimisations of which only the steps themselves show that they were not in effect. Collective
        where operators are asked for."""
        building = self.optimisations.building
        if building.operators.requested:
            building.service = service_of_all_ranks(building.operators, self.group)
        self._note(self.optimisations.end(), "end")
        watch = self.optimisations.building.compilation
        if watch is not None:
            self._note_compilation(watch.report, "end")
        report = self.recorder.data
        if report is not None:
            self.logbook.event("data", when="end", step=self.progress.step, **report.at_end())
            self.note_slow_data()

    def note_slow_data(self) -> None:
        """A warning, once, where steps wait for batches: how much, and which operation of building them is slow.
        To be called after each step."""
        report = self.recorder.data
        if report is not None and (news := report.news()) is not None:
            self.logbook.warn(news)

    def _note_order(self, report: DataReport) -> None:
        """An event with a hash of the order of samples; a warning where a run goes on with another than it had."""
        if self.logbook.writer is None:
            return
        now = report.at_start()
        former = [event for event in open_run(self.path).events() if event["kind"] == "data"]
        hashes = {event["order_hash"] for event in former if event.get("when") == "start"}
        self.logbook.event("data", when="start", step=self.progress.step, **now)
        if hashes - {now["order_hash"]}:
            self.logbook.warn(
                "the order of samples is not the one this run had before (another version of the code?): some will be "
                "seen twice in this epoch, and others not at all"
            )

    @contextmanager
    def watching_compilation(self) -> Iterator[None]:
        """Where blocks are compiled: what torch.compile says of it is kept while this is entered."""
        with self.optimisations.building.compilation or nullcontext():
            yield

    def note_compilation(self) -> None:
        """An event when torch.compile has broken a graph, compiled again or given up where it had not before; a warning
        where a size that changed was the reason. To be called after each step, and costs nothing where nothing was
        compiled."""
        watch = self.optimisations.building.compilation
        if watch is None:
            return
        warned = set(watch.report.recompilations)
        if not watch.look():
            return
        self._note_compilation(watch.report, "step")
        for one in sorted(set(watch.report.recompilations) - warned):
            if one.sizes is not None:
                self.logbook.warn(
                    f"step {self.progress.step} compiled code again: {recompilation_in_words(one)}; sizes that vary "
                    "cost a compilation each until torch compiles for any"
                )

    def _note_compilation(self, report: CompileReport, when: str) -> None:
        self.logbook.event("compilation", when=when, step=self.progress.step, **report.to_document())

    def _note(self, records: Sequence[OptimisationRecord], when: str) -> None:
        """An event for each record, a warning for each request without effect, a line for the others at the start."""
        for record in records:
            self.logbook.event("optimisation", when=when, **record.to_document())
        active = [record.name for record in records if record.active]
        if active and when == "start":
            self.logbook.say(f"optimisations in effect: {', '.join(active)}")
        for finding in filter(None, map(finding_of, records)):
            self.logbook.warn(finding)

    @property
    def _rank_0_has_all(self) -> bool:
        """Whether rank 0 can look at losses and gradients of the model without the others."""
        return self.mesh.size("dp") == self.group.size and self.config.parallelism.zero_stage == 0

    def probe_leak(self) -> None:
        """Before the first step of a probed run: whether a loss sees other documents or later tokens."""
        if not self.probed or self.progress.step > 0 or (self._rank_0_has_all and not self.group.is_main):
            return
        losses = None if self._rank_0_has_all else self._losses_over_ranks
        leak = measure_leak(self.config, self.corpus, self.decoder, losses)
        if not self.group.is_main:
            return
        write_leak(self.path, leak)
        if leak.verdict != "clean":
            self.logbook.warn(f"leak probe: {leak.verdict}: {leak.why}")

    def _losses_over_ranks(self, batch: Batch) -> torch.Tensor:
        """The loss of every place, from the ranks that hold the first replica of the model. Collective."""
        pipeline = self.stepper.pipeline
        run = self.decoder.loss_sum if pipeline is None else lambda batch: pipeline.evaluate([batch])
        losses = losses_of_places(self.decoder, run, batch)
        counts = self.mesh.index("tp") == self.mesh.index("cp") == self.mesh.index("dp") == 0
        if losses is None or not counts:
            losses = torch.zeros(batch.labels.shape, dtype=torch.float64)
        self.group.sum_(losses)
        return losses

    def take_gradients(self, step: int) -> Callable[[], None] | None:
        """What keeps the gradients of ``step``, where they are to be kept: those of the first of a probed run."""
        if not self.probed or step != 1 or (self._rank_0_has_all and not self.group.is_main):
            return None
        return self._write_gradients

    def _write_gradients(self) -> None:
        held = self.stepper.sync.gradients()
        if self._rank_0_has_all:
            write_gradients(self.path, {name: one.tensor for name, one in held.items()})
            return
        whole = dict(whole_tensors(self.config.model, held, self.mesh, self.group))
        if self.group.is_main:
            write_gradients(self.path, whole)

    def evaluate(self, progress: Progress) -> Evaluation:
        """Loss on held-out text, recorded as an event. The time counts as maintenance."""
        training = self.config.training
        with (
            self._maintenance("evaluation"),
            BatchLoader(
                self.config,
                self.corpus,
                "validation",
                rank=self.mesh.index("dp"),
                world_size=self.mesh.size("dp"),
                start_sample=0,
                num_samples=training.eval_iters * training.global_batch_size,
            ) as loader,
        ):
            # Our decoder waits part by part; a model that does not say what it reads would read rows of the last step.
            self.stepper.sync.settle()
            result = evaluate(
                self.decoder,
                loader,
                self.group,
                self.device.torch_device,
                self.corpus.bytes_per_token(),
                counts=self.mesh.is_first_of_model,
                pipeline=self.stepper.pipeline,
                batches_at_once=self.stepper.num_microbatches if self.stepper.pipeline is not None else 1,
            )
        self.logbook.event(
            "evaluation",
            step=progress.step,
            loss=result.loss,
            bits_per_byte=result.bits_per_byte,
            tokens=result.tokens,
            batches=loader.num_steps,
        )
        loss = f"{result.loss:.4f}" if result.loss is not None else "unknown"
        bits = f", {result.bits_per_byte:.4f} bits per byte" if result.bits_per_byte is not None else ""
        self.logbook.say(f"step {progress.step}: validation loss {loss}{bits} ({result.tokens:,} tokens)")
        if loader.num_steps is not None and loader.num_steps < training.eval_iters:
            self.logbook.warn(
                f"training.eval_iters asks for {training.eval_iters:,} global batches; all held-out text "
                f"makes {loader.num_steps:,}, which were evaluated"
            )
        return result

    def compare_replicas(self, progress: Progress) -> str | None:
        """Compare the weights that several ranks hold alike; where they differ, what and where, on every rank. None:
        they agree (also where that is known of this step already), or nobody is there to compare with. The time counts
        as maintenance. Collective."""
        check = self.replica_check
        if check is None or check.agreed_at == progress.step:
            return None
        with self._maintenance("weight_hash"):
            differing = check.compare(progress.step, self.stepper.sync.parameters())
        if not differing:
            return None
        self.logbook.event(
            "alarm",
            what="weight_hash",
            step=progress.step,
            agreed_at=check.agreed_at,
            tensors=[{"name": one.name, "ranks": one.holders} for one in differing],
        )
        return check.in_words(progress.step, differing)

    def save(self, progress: Progress) -> None:
        """Save a checkpoint, or begin to; events tell of those that are whole. The time counts as maintenance."""
        self.recorder.flush(progress)
        with self._maintenance("checkpoint"):
            whole = self.saver.save(
                progress.step, held_state(self.stepper.sync, self.optimizer), self._trainer_state(progress)
            )
        self._note_checkpoints(whole)

    def _trainer_state(self, progress: Progress) -> dict[str, Any]:
        scaler = self.stepper.loss_scaler
        return progress.to_dict() if scaler is None else {**progress.to_dict(), LOSS_SCALER: scaler.to_dict()}

    def note_wire_error(self) -> None:
        """After the first step of a segment: how far its reduced gradient was from one that travelled in full
        precision, where gradients travel in less. Collective."""
        error = self.stepper.sync.wire_error()
        if error is None:
            return
        dtype, step = self.config.precision.grad_reduce_dtype, self.progress.step
        if not math.isfinite(error):
            self.logbook.say(f"gradients travel in {dtype}; those of step {step} overflowed: no error")
            return
        self.logbook.event("gradient_reduction", step=step, dtype=dtype, relative_error=error)
        self.logbook.say(
            f"gradients travel in {dtype}: the reduced gradient of step {step} differs from one in fp32 by {error:.2g} "
            "of its norm"
        )

    def note_skipped_step(self, figures: StepFigures) -> str | None:
        """An event for a step that overflowed and was skipped; why training must end, where no loss scale helps."""
        scaler, step = self.stepper.loss_scaler, self.progress.step
        assert scaler is not None, "only a loss scaler has steps skipped"
        self.logbook.event(
            "skipped_step",
            step=step,
            loss_scale=figures.loss_scale,
            next_loss_scale=scaler.scale,
            hysteresis_left=scaler.hysteresis_left,
            skipped_steps=scaler.skipped_steps,
        )
        falls = f", now {scaler.scale:g}" if scaler.scale != figures.loss_scale else ""
        used = figures.loss_scale
        self.logbook.say(f"step {step} skipped: gradients overflowed at loss scale {used:g}{falls}")
        if self.take_gradients(step) is not None:
            self.logbook.warn(
                f"the probe has no gradients of step {step}, which overflowed: lower precision.initial_loss_scale"
            )
        return scaler.failure

    def note_finished_save(self) -> None:
        """An event when the checkpoint that was being written is whole by now. Does not wait."""
        if self.group.is_main and (saved := self.saver.newly_whole()) is not None:
            self._note_checkpoints([saved])

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written, if any; EnvironmentFault on every rank when it failed."""
        if not self.saver.is_writing:
            return
        with self._maintenance("checkpoint"):
            whole = self.saver.finish()
        self._note_checkpoints(whole)

    def _note_checkpoints(self, whole: Sequence[Saved]) -> None:
        for saved in whole:
            written = {} if saved.write_s is None else {"write_s": saved.write_s}
            self.logbook.event("checkpoint", step=saved.step, path=saved.path.name, **written)

    @contextmanager
    def _maintenance(self, kind: str) -> Iterator[None]:
        self.logbook.heartbeat(self.progress.step, kind)
        before = time.perf_counter()
        with record_function(f"drivetrain/{kind}"):
            yield
        self.recorder.clock.maintenance(kind, time.perf_counter() - before)
        self.logbook.heartbeat(self.progress.step, "train")
