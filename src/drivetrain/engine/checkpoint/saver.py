"""The checkpoints of one run: written while training stands still, or by a thread while it goes on."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from drivetrain.config.model import ModelConfig
from drivetrain.engine.checkpoint.agreement import ALONE, Agreement
from drivetrain.engine.checkpoint.held_state import HeldState
from drivetrain.engine.checkpoint.save import (
    Attempt,
    Part,
    begin,
    end,
    keeping,
    reason_of,
    save_checkpoint,
    say_warning,
)
from drivetrain.engine.one_core import OneCoreThread
from drivetrain.errors import EnvironmentFault

__all__ = ["CheckpointSaver", "Saved"]

SNAPSHOT_RANGE = "drivetrain/checkpoint/snapshot"
"""Name of the profiler's range around the copy to the host."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole.

    Attributes:
        write_s: seconds for which its values were written while training went on; None: training stood still.
    """

    step: int
    path: Path
    write_s: float | None


class CheckpointSaver:
    """Saves one checkpoint after the other; every rank of the run has one, and calls it alike.

    Args:
        folder: of the run's checkpoints.
        asynchronous: ``save`` copies this rank's part to host memory and returns; a thread writes it. The next
            ``save``, and ``finish``, wait for that.
        timeout_s: for how long rank 0's thread waits for the other ranks' parts.
        warn: told, on rank 0, when a checkpoint is whole and old ones could not be removed.
    """

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        *,
        keep_latest_k: int,
        asynchronous: bool,
        tokenizer_file: Path | None = None,
        agreement: Agreement = ALONE,
        layout: Mapping[str, object] | None = None,
        timeout_s: float = 600.0,
        warn: Callable[[str], None] = say_warning,
    ) -> None:
        self._folder = folder
        self._agreement = agreement
        self._asynchronous = asynchronous
        self._timeout_s = timeout_s
        self._warn = warn
        self._settings: dict[str, Any] = {
            "model": model,
            "keep_latest_k": keep_latest_k,
            "tokenizer_file": tokenizer_file,
            "agreement": agreement,
            "layout": layout,
        }
        self._buffers: dict[str, Tensor] = {}
        self._writing: _Writing | None = None

    @property
    def failed(self) -> bool:
        """Whether this rank's thread has failed by now; ``finish`` tells all ranks why."""
        return self._writing is not None and self._writing.failed

    @property
    def is_writing(self) -> bool:
        """Whether there is one that nobody has waited for yet; the same on every rank."""
        return self._writing is not None

    def save(self, step: int, state: HeldState, trainer_state: Mapping[str, Any]) -> list[Saved]:
        """Save ``step``; the checkpoints that have become whole by it: this one, or the one before. Collective.

        Raises:
            EnvironmentFault: on every rank, when this or the former one could not be written by some rank.
        """
        finished = self.finish()
        if not self._asynchronous:
            path = save_checkpoint(
                self._folder,
                step,
                state=state,
                trainer_state=trainer_state,
                warn=self._warn,
                **self._settings,
            )
            return [*finished, Saved(step, path, None)]
        attempt = begin(self._folder, step, state=state, trainer_state=trainer_state, **self._settings)
        with record_function(SNAPSHOT_RANGE):
            attempt = replace(attempt, parts=self._snapshot(attempt.parts))
        self._writing = _Writing(attempt, self._timeout_s)
        return finished

    def newly_whole(self) -> Saved | None:
        """On rank 0: the checkpoint that its thread has completed since it was last asked for. Does not wait."""
        writing = self._writing
        if writing is None or writing.reported or writing.thread.is_alive() or writing.failed:
            return None
        writing.reported = True
        return writing.saved

    def finish(self) -> list[Saved]:
        """Wait until the one that is being written is whole, on every rank; it, if nobody was told yet. Collective.

        Raises:
            EnvironmentFault: on every rank, when some rank could not write it; the former ones are untouched. A rank
                whose thread met a bug raises that.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return []
        writing.thread.join()
        attempt, bug = writing.attempt, writing.bug
        try:
            # The others wait for this rank's word here, whatever it has met.
            end(attempt, writing.failures if bug is None else [bug], self._agreement)
        except EnvironmentFault as fault:
            if bug is not None:
                raise bug from fault
            raise
        if attempt.rank == 0:
            attempt.tidy(self._warn)
        return [] if writing.reported else [writing.saved]

    @torch.no_grad()
    def _snapshot(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """The same parts in host memory of our own, which is kept for the next time."""
        copied = []
        on_device = False
        for part in parts:
            source = part.values.detach()
            buffer = self._buffers.get(part.name)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                # Pinned: a device copies into it while the host goes on to the next.
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                self._buffers[part.name] = buffer
            buffer.copy_(source, non_blocking=source.is_cuda)
            on_device = on_device or source.is_cuda
            copied.append(replace(part, values=buffer))
        if on_device:
            torch.cuda.current_stream().synchronize()
        return tuple(copied)


class _Writing:
    """A thread that writes one checkpoint. It calls no collective: the ranks' files say when they are done."""

    def __init__(self, attempt: Attempt, timeout_s: float) -> None:
        self.attempt = attempt
        self.failures: list[Exception] = []
        self.bug: BaseException | None = None
        self.reported = False
        self._seconds = 0.0
        self._timeout_s = timeout_s
        # A run that ends with an error does not wait for it: what it has written is no checkpoint yet.
        self.thread = OneCoreThread(target=self._run, name="checkpoint-writer", daemon=True)
        self.thread.start()

    @property
    def failed(self) -> bool:
        return bool(self.failures) or self.bug is not None

    @property
    def saved(self) -> Saved:
        return Saved(self.attempt.step, self.attempt.final, self._seconds)

    def _run(self) -> None:
        began = time.perf_counter()
        attempt = self.attempt
        try:
            with keeping() as failures:
                attempt.write()
            if failures and attempt.rank != 0:
                attempt.tell_failure(reason_of(failures[0]))
            if not failures and attempt.rank == 0:
                with keeping() as failures:
                    attempt.wait_for_ranks(self._timeout_s)
                    attempt.conclude()
            self.failures = failures
        except BaseException as error:  # noqa: BLE001 - raised again by finish, on the thread that trains
            if attempt.rank != 0:
                attempt.tell_failure(reason_of(error))
            self.bug = error
        finally:
            if attempt.rank == 0:
                attempt.give_up()
        self._seconds = time.perf_counter() - began
