"""A run as the loop sees it: what it trains, what it has done, and the things it does now and then."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import record_function

from drivetrain.archive.heartbeat import Heartbeat
from drivetrain.archive.writer import RunWriter
from drivetrain.config import RunConfig, tokens_per_step, total_tokens
from drivetrain.engine.checkpoint import CheckpointSaver, Saved, held_state
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.devices import Device
from drivetrain.engine.evaluation import Evaluation, evaluate
from drivetrain.engine.model.batch import Batch
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.optimisations.in_effect import Optimisations, finding_of
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

__all__ = ["Logbook", "TrainingRun"]


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
        ) as loader:
            self._note(self.optimisations.begin(loader), "start")
            yield iter(loader)

    def note_what_the_end_shows(self) -> None:
        """Record the optimisations of which only the steps themselves show that they were not in effect."""
        self._note(self.optimisations.end(), "end")

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
                progress.step, held_state(self.stepper.sync, self.optimizer), progress.to_dict()
            )
        self._note_checkpoints(whole)

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
