"""A lane: one side's training process, which runs only while it is its turn.

All sides of a session are started and warmed up first. Then one at a time is let run for a few steps
(SIGCONT) and stopped again (SIGSTOP). So sides alternate every few seconds without paying for a start each
time, and moments in which others use the machine can be left out on every side alike.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

from harness.quiet import Usage, foreign_share, wait_until_quiet

__all__ = ["Block", "Done", "Lane", "LaneFailure", "Side"]

POLL_S = 0.05
FOREIGN_LIMIT = 0.03
START_LIMIT_S = 900.0
DROPPED = 2
"""Periods at the start of a block that are not timed: the one in which the process was stopped, and one more
in which caches fill again."""


@dataclass(frozen=True)
class Block:
    """Some steps of a lane in a row.

    Attributes:
        step_s: time from the end of a step to the end of the next, seconds.
        foreign_share: share of all CPUs that other processes took meanwhile.
    """

    step_s: list[float]
    foreign_share: float

    @property
    def median_s(self) -> float:
        """The block's figure."""
        return median(self.step_s)

    @property
    def quiet(self) -> bool:
        """Others left the machine alone."""
        return self.foreign_share <= FOREIGN_LIMIT


@dataclass(frozen=True)
class Done:
    """What a side says it did, over all its steps.

    Attributes:
        parameters: trainable parameters.
        tokens_per_step: tokens of an optimizer step.
        losses: training loss of each step in nats per token; a single mean where the side only tells that.
        steps: number of steps.
        hooks: share of each step inside the side's own logging, where it tells.
    """

    parameters: int
    tokens_per_step: int
    losses: list[float]
    steps: int
    hooks: list[float]


@dataclass(frozen=True)
class Side:
    """How a side is started, watched, ended and read.

    Attributes:
        name: in words, with its settings.
        command, environment: of the process; it runs in a folder of its own.
        stamps: the moments (``time.time``) at which steps ended so far, from the folder.
        end: asks the process to finish its step and end well.
        done: what it did, from the folder, after it ended.
        exit_codes: of an end that was asked for.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    stamps: Callable[[Path], list[float]]
    end: Callable[[subprocess.Popen[bytes], Path], None]
    done: Callable[[Path], Done]
    exit_codes: tuple[int, ...] = (0,)


class LaneFailure(Exception):
    """A side's process ended with an error, or never began to train."""


class Lane:
    """One process of ``side`` in ``folder``; entered: running and warm, then stopped."""

    def __init__(self, side: Side, folder: Path, *, warmup: int, patience_s: float) -> None:
        self.side = side
        self.blocks: list[Block] = []
        self._folder = folder
        self._warmup = warmup
        self._patience_s = patience_s

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        start = time.monotonic()
        with (self._folder / "stdout").open("wb") as out, (self._folder / "stderr").open("wb") as err:
            # A session of its own, so that its helpers are stopped with it and Ctrl-C is left to us.
            self._process = subprocess.Popen(
                self.side.command,
                cwd=self._folder,
                env={**os.environ, **self.side.environment},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        try:
            self._wait_for(self._warmup)
        except BaseException:
            self._kill()
            raise
        self._signal(signal.SIGSTOP)
        print(f"  {self.side.name}: warm after {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    def block(self, steps: int) -> Block:
        """Let the lane run for ``steps`` timed steps. Waits for a quiet machine first, as long as patience goes."""
        wait_until_quiet(patience_s=self._patience_s)
        before = len(self.side.stamps(self._folder))
        self._signal(signal.SIGCONT)
        try:
            self._wait_for(before + DROPPED)
            usage = Usage.now(self._process.pid)
            stamps = self._wait_for(before + DROPPED + steps)
            used = Usage.now(self._process.pid)
        finally:
            # A process that has died meanwhile is reported as such, not as one that cannot be stopped.
            with contextlib.suppress(ProcessLookupError):
                self._signal(signal.SIGSTOP)
        timed = stamps[before + DROPPED - 1 : before + DROPPED + steps]
        return Block([end - start for start, end in pairwise(timed)], foreign_share(usage, used))

    def quiet_block(self, steps: int, attempts: int) -> Block:
        """A block, repeated while others disturb it, whatever its times; the least disturbed counts."""
        best = self.block(steps)
        for _ in range(attempts - 1):
            if best.quiet:
                break
            best = min(best, self.block(steps), key=lambda block: block.foreign_share)
        self.blocks.append(best)
        return best

    def finish(self) -> Done:
        """Let the process end well, and read what it did."""
        self._signal(signal.SIGCONT)
        self.side.end(self._process, self._folder)
        code = self._process.wait(timeout=300)
        if code not in self.side.exit_codes:
            raise self._failure(f"ended with exit code {code}")
        return self.side.done(self._folder)

    def _wait_for(self, count: int) -> list[float]:
        limit = time.monotonic() + START_LIMIT_S
        while True:
            stamps = self.side.stamps(self._folder)
            if len(stamps) >= count:
                return stamps
            if self._process.poll() is not None:
                raise self._failure(
                    f"ended with exit code {self._process.returncode} after {len(stamps)} steps"
                )
            if time.monotonic() > limit:
                raise self._failure(f"has done {len(stamps)} of {count} steps after {START_LIMIT_S:.0f} s")
            time.sleep(POLL_S)

    def _failure(self, what: str) -> LaneFailure:
        tail = (self._folder / "stderr").read_text(errors="replace")[-3000:]
        return LaneFailure(f"{self.side.name} {what}:\n{tail}")

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()
