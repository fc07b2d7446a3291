"""Runs of llama-2m in this process, with code wrapped around them; finished ones are kept."""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from drivetrain.archive.listing import list_runs
from drivetrain.archive.origin import RunOrigin
from drivetrain.archive.reader import Run, open_run
from drivetrain.config import load_config
from drivetrain.errors import DrivetrainError
from drivetrain.tune.gate import Evidence
from drivetrain.tune.gate_files import read_evidence

__all__ = ["OVERRIDES", "Job", "Runs", "Wrapping"]

Wrapping = Callable[[], AbstractContextManager[None]]
"""Makes a context in which code is wrapped."""

OVERRIDES = (
    "training.micro_batch_size=4",
    "training.global_batch_size=4",
    "training.eval_iters=0",
    "optimizer.lr=1e-3",
    "lr_schedule.min_lr=1e-4",
    "lr_schedule.lr_warmup_tokens=20480",
    "lr_schedule.lr_decay_tokens=2048000",
    "run.device=cpu",
    "run.num_threads=1",
)
"""llama-2m with a small batch, at the beginning of a run of 2,000 steps."""


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        name: of the run; the same name is the same run.
        overrides: on top of :data:`OVERRIDES`.
        probe, perturb_ulp: as of ``drivetrain train``.
        wrappings: around its training, the first one innermost.
    """

    name: str
    overrides: tuple[str, ...]
    probe: bool = True
    perturb_ulp: int | None = None
    wrappings: tuple[Wrapping, ...] = ()


class Runs:
    """The runs of a folder by name; missing ones are trained."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._runs: dict[str, Run] = {}
        self._evidence: dict[str, Evidence] = {}
        for run in list_runs(folder, on_fault=lambda _: None):
            status = run.status()
            if status in ("finished", "failed"):
                self._runs[run.name] = run
            elif status != "running":
                # Torn by an interrupted session; it is trained again.
                shutil.rmtree(run.path)

    def get(self, job: Job) -> Evidence:
        """The evidence of ``job``.

        Raises:
            DrivetrainError: its run crashed. No harm is meant to crash, so that run says nothing of the gate.
        """
        if job.name not in self._evidence:
            run = self._runs.get(job.name)
            if run is None:
                run = self._runs[job.name] = self._train(job)
            found = read_evidence(run)
            if found.end == "failed":
                raise DrivetrainError(
                    f"the run {job.name} crashed: {found.reason}; delete {run.path}, and it is trained again"
                )
            self._evidence[job.name] = found
        return self._evidence[job.name]

    def note(self) -> str:
        """What a reader must know of the runs."""
        revisions = {
            str((run.manifest["provenance"]["git"] or {}).get("commit"))[:7] for run in self._runs.values()
        }
        return (
            f"{len(self._runs)} runs of llama-2m, {', '.join(OVERRIDES[:2])}, of revisions "
            f"{', '.join(sorted(revisions))}, harm injected by wrapping; kept in {self.folder.name}"
        )

    def _train(self, job: Job) -> Run:
        import torch

        from drivetrain.engine.creation import create_run
        from drivetrain.engine.data.corpus import ensure_corpus
        from drivetrain.engine.parallel.process_group import Ranks
        from drivetrain.engine.random_state import deterministic
        from drivetrain.engine.worker import work

        began = time.monotonic()
        overrides = (*OVERRIDES, *job.overrides, f"run.runs_dir={self.folder}", f"run.name={job.name}")
        loaded = load_config("llama-2m", overrides)
        corpus = ensure_corpus(loaded.config.data, loaded.config.model)
        origin = RunOrigin(probe=job.probe, perturb_ulp=job.perturb_ulp)
        path = create_run(loaded, corpus, world_size=1, argv=sys.argv, origin=origin)
        # A compiled block of the run before must not be taken for one of this run's wrapped code.
        torch._dynamo.reset()
        # The run's own messages go beside it: this session's progress is what is watched.
        with ExitStack() as stack:
            log = stack.enter_context((path / "log.txt").open("w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stderr(log))
            stack.enter_context(deterministic(loaded.config.run.deterministic))
            for wrapping in job.wrappings:
                stack.enter_context(wrapping())
            outcome = work(path, Ranks()).outcome
        if outcome.status == "interrupted":
            raise KeyboardInterrupt
        shutil.rmtree(path / "checkpoints", ignore_errors=True)
        print(
            f"  {job.name}: {outcome.status}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True
        )
        return open_run(path)
