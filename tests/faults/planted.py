"""Own runs with a fault put in on purpose: a known time is lost in a known place, or the run breaks at a known step.

Whatever finds lost time is measured against what was planted here.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from drivetrain.config import LoadedConfig, load_config
from drivetrain.engine.creation import create_run
from drivetrain.engine.data.corpus import ensure_corpus
from drivetrain.engine.model.batch import Batch
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.parallel.process_group import PendingSum, ProcessGroup, Ranks
from drivetrain.engine.step import StepFigures, Stepper
from drivetrain.engine.stop import StopRequest
from drivetrain.engine.training_run import TrainingRun
from rank_processes import on_ranks

__all__ = ["Fault", "Place", "PlantedRun", "planted_run"]

Place = Literal["fetch", "sync", "forward", "break"]


@dataclass(frozen=True)
class Fault:
    """What goes wrong, on which rank (None: on all), from which step on."""

    place: Place
    sleep_s: float = 0.0
    rank: int | None = None
    first_step: int = 1


@dataclass(frozen=True)
class PlantedRun:
    """A run with a fault: its directory, and per rank the seconds really slept by step."""

    path: Path
    slept_s: tuple[Mapping[int, float], ...]


class _Sleeper:
    """Sleeps when it is its step's turn, and keeps the time it took."""

    def __init__(self, fault: Fault, rank: int) -> None:
        self._fault = fault
        self._mine = fault.rank is None or fault.rank == rank
        self.step = 0
        self.slept_s: dict[int, float] = {}

    def sleep(self, place: Place) -> None:
        """Once a step."""
        fault = self._fault
        due = self._mine and place == fault.place and self.step >= fault.first_step
        if due and self.step not in self.slept_s:
            before = time.perf_counter()
            time.sleep(fault.sleep_s)
            self.slept_s[self.step] = time.perf_counter() - before

    def begin_step(self) -> None:
        self.step += 1
        assert not (self._fault.place == "break" and self.step == self._fault.first_step), "planted"


class _SlowSum(PendingSum):
    def __init__(self, inner: PendingSum, sleeper: _Sleeper) -> None:
        self._inner = inner
        self._sleeper = sleeper

    def wait(self) -> list[int]:
        self._sleeper.sleep("sync")
        return self._inner.wait()


@dataclass(frozen=True, kw_only=True)
class _SlowGroup(ProcessGroup):
    sleeper: _Sleeper

    def start_sum(self, values: Any) -> PendingSum:
        return _SlowSum(super().start_sum(values), self.sleeper)


class _SlowForward:
    """A decoder whose forward begins late; everything else is handed on."""

    def __init__(self, inner: Decoder, sleeper: _Sleeper) -> None:
        self._inner = inner
        self._sleeper = sleeper

    def loss_sum(self, batch: Batch) -> Any:
        self._sleeper.sleep("forward")
        return self._inner.loss_sum(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(frozen=True, kw_only=True)
class _FaultyStepper(Stepper):
    sleeper: _Sleeper

    def step(self, batches: Iterator[Batch], learning_rate: float, **options: Any) -> StepFigures:
        self.sleeper.begin_step()
        return super().step(self._late(batches), learning_rate, **options)

    def _late(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        self.sleeper.sleep("fetch")
        yield from batches


def _with_fault(run: TrainingRun, sleeper: _Sleeper) -> TrainingRun:
    stepper = run.stepper
    parts = {name: getattr(stepper, name) for name in stepper.__dataclass_fields__}
    parts["group"] = _SlowGroup(ranks=stepper.group.ranks, flights=stepper.group.flights, sleeper=sleeper)
    parts["decoder"] = _SlowForward(stepper.decoder, sleeper)
    return replace(run, stepper=_FaultyStepper(**parts, sleeper=sleeper))


def _train(path: Path, fault: Fault) -> dict[int, float]:
    from drivetrain.engine import worker

    ranks = Ranks.from_environment()
    sleeper = _Sleeper(fault, ranks.rank)
    assemble = worker.assemble

    def faulty(*arguments: Any) -> TrainingRun:
        return _with_fault(assemble(*arguments), sleeper)

    with mock.patch.object(worker, "assemble", faulty), StopRequest() as stop:
        worker.work(path, ranks, stop)
    return sleeper.slept_s


def planted_run(config_file: Path, fault: Fault, *overrides: str, world_size: int = 2) -> PlantedRun:
    """Train a new run of ``config_file`` with the fault in it.

    Raises:
        AssertionError: a rank broke; its traceback is the message.
    """
    loaded = load_config(str(config_file), overrides)
    corpus = ensure_corpus(loaded.config.data, loaded.config.model)
    named = LoadedConfig(loaded.config, loaded.source, fault.place)
    path = create_run(named, corpus, world_size=world_size, argv=["planted"])
    slept = on_ranks(_train, world_size, path, fault, timeout=600)
    return PlantedRun(path, tuple(slept))
