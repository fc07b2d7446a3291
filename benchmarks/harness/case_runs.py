"""Runs of a case: verbs of the command line, in the network lab where the case has links."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

from cases.case import Case
from drivetrain.archive.account_file import mean_step_of
from drivetrain.archive.reader import open_run
from drivetrain.archive.tunes import list_tunes, open_tune
from drivetrain.config import config_hash, load_config, tokens_per_step
from drivetrain.errors import DrivetrainError
from drivetrain.tune.launcher import Launcher
from drivetrain.tune.short_run import as_override, prefetched_steps, short_run, steps_to_run
from drivetrain.tune.trainer import Attempt, CommandLineTrainer

__all__ = ["Block", "CaseRuns", "Failed", "Profiled", "hash_of", "palindrome"]

BENCHMARKS = Path(__file__).resolve().parent.parent
LAB = f"case{os.getpid()}"
"""Of this process alone: the hosts of all labs of a machine are in one list."""
DRIVETRAIN = (sys.executable, "-m", "drivetrain")


class Failed(DrivetrainError):
    """A verb did not end as it should, or a run; with its last words."""


@dataclass(frozen=True)
class Profiled:
    """A profile's account.

    Attributes:
        run: its directory.
        classes: nanoseconds of the mean profiled step over all ranks, by class.
        step_s: median step without the profiler.
    """

    run: Path
    classes: Mapping[str, float]
    step_s: float


@dataclass(frozen=True)
class Block:
    """One measured run of one side.

    Attributes:
        step_s: median of its steps that are neither tagged nor fed from what was ready before the first.
        steps: how many those were.
        tokens: of a step.
    """

    step_s: float
    steps: int
    tokens: int


def palindrome(sides: Sequence[str], rounds: int) -> list[str]:
    """The order of the blocks: all sides, and back, ``rounds`` times: for two sides A B B A."""
    return [*sides, *reversed(sides)] * rounds


class CaseRuns:
    """Runs verbs for a case in ``folder``, each run a process of its own; use it in ``with``.

    Args:
        folder: of everything that is made; must be there.
        case: which.
    """

    def __init__(self, folder: Path, case: Case) -> None:
        self.folder = folder
        self.case = case
        template = f"{shlex.join([*DRIVETRAIN, 'lab', 'run', '--name', LAB])} -- {{command}}"
        self._template = template if case.hosts else None
        self._trainer = CommandLineTrainer(
            folder / "logs",
            directory=folder,
            environment=self._variables(),
            launcher=None if self._template is None else Launcher.parse(self._template),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._trainer.close()

    @contextlib.contextmanager
    def links(self, rate_mbit: float | None) -> Iterator[None]:
        """The lab of the case with links of this rate for as long as the block lasts; nothing without hosts."""
        if not self.case.hosts:
            yield
            return
        assert rate_mbit is not None
        hosts = ["--hosts", str(self.case.hosts), "--ranks", "1", "--rate", f"{rate_mbit:.0f}mbit"]
        self.drivetrain("lab", "up", *hosts, "--name", LAB)
        try:
            yield
        finally:
            self.drivetrain("lab", "down", "--name", LAB)

    def drivetrain(self, *arguments: str, accept: Sequence[int] = (0,)) -> str:
        """Run a verb; what it printed.

        Raises:
            Failed: its exit code is not among ``accept``.
        """
        print(f"$ drivetrain {shlex.join(arguments)}", file=sys.stderr, flush=True)
        process = subprocess.Popen(
            [*DRIVETRAIN, *arguments],
            stdout=subprocess.PIPE,
            cwd=self.folder,
            env={**os.environ, **self._variables()},
        )
        try:
            out, _ = process.communicate()
        except BaseException:
            # A tune saves its state and ends its runs.
            process.terminate()
            process.wait()
            raise
        if process.returncode not in accept:
            raise Failed(f"drivetrain {arguments[0]} ended with exit code {process.returncode}")
        return out.decode()

    def _variables(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
        return {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "DRIVETRAIN_LAB_DIR": str(self.folder / "labs"),
        }

    def profile(self, config: Path, steps: int) -> Profiled:
        """``drivetrain profile`` where runs of the case belong."""
        attempt = self._trainer.profile(
            config,
            [as_override("run.runs_dir", str(self.folder / "runs"))],
            steps=steps,
            world_size=self.case.ranks,
        )
        run = _finished(attempt)
        mean = mean_step_of(run)
        if mean is None:
            raise Failed(f"the profile {run} has no account of a step")
        assert attempt.summary is not None, "it finished"
        return Profiled(run, dict(mean.classes), float(attempt.summary["training"]["step_time_s"]["p50"]))

    def tune(self, config: Path, options: Sequence[str]) -> tuple[Path, dict[str, Any]]:
        """Climb the ladder from ``config``; folder and document of the tune."""
        launcher = [] if self._template is None else ["--launcher", self._template]
        ranks = ["--nproc", str(self.case.ranks)]
        words = ["tune", str(config), *ranks, *launcher, *self.case.tune, *options, "--json"]
        self.drivetrain(*words, accept=(0, 1))
        # Absolute: its configurations and runs are read from here.
        (path,) = list_tunes(self.folder / "tunes")
        document = dict(open_tune(str(path)).document)
        if document["baseline"] is None:
            raise Failed(f"the baseline could not be profiled: {document['findings']}")
        return path, document

    def block(self, config: Path, measured: int) -> Block:
        """Train a whole configuration once for at least ``measured`` steps that count.

        Raises:
            Failed: it did not train to its end, or gave no figure.
        """
        loaded = load_config(str(config)).config
        steps = steps_to_run(loaded, self.case.ranks, measured)
        overrides = [*short_run(loaded, steps), as_override("run.runs_dir", str(self.folder / "runs"))]
        attempt = self._trainer.train(config, overrides, world_size=self.case.ranks)
        run = _finished(attempt)
        clean = [line for line in open_run(run).metrics() if not line["tags"]]
        times = [float(line["time/step_s"]) for line in clean[prefetched_steps(loaded, self.case.ranks) :]]
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        if not times:
            raise Failed(f"{config} gave no figure: each of its steps was tagged")
        return Block(median(times), len(times), tokens_per_step(loaded))

    def measure(
        self, sides: Mapping[str, Path], steps: int, rounds: int
    ) -> tuple[dict[str, list[Block]], dict[str, str]]:
        """All sides in turns; the blocks of each, and of those that did not run, why. Who fails once is left out."""
        blocks: dict[str, list[Block]] = {name: [] for name in sides}
        failed: dict[str, str] = {}
        for name in palindrome(list(sides), rounds):
            if name in failed:
                continue
            try:
                block = self.block(sides[name], steps)
            except Failed as error:
                failed[name] = str(error)
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                continue
            blocks[name].append(block)
            print(f"{name}: {block.step_s * 1e3:.1f} ms a step", file=sys.stderr, flush=True)
        return {name: found for name, found in blocks.items() if name not in failed}, failed


def _finished(attempt: Attempt) -> Path:
    if attempt.outcome != "finished":
        raise Failed(f"{attempt.outcome.replace('_', ' ')}: {attempt.message}")
    assert attempt.run is not None, "it finished"
    return attempt.run


def hash_of(config: Path) -> str:
    """Of a whole configuration."""
    return config_hash(load_config(str(config)).config)
