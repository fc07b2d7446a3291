"""A block: one process that trains for some steps, timed, on a machine that was watched meanwhile."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from harness.quiet import Watch, wait_until_quiet

__all__ = ["Block", "BlockFailure", "Record", "measure"]

FOREIGN_LIMIT = 0.02
ATTEMPTS = 4


@dataclass(frozen=True)
class Record:
    """What a side's process tells about itself.

    Attributes:
        ended: moments (``time.time``) at which each step's period ended.
        losses: training losses the side itself reported, in nats per token; may be fewer than steps.
        parameters: number of trainable parameters; None where the side does not tell.
        tokens_per_step: tokens of one optimizer step.
        hooks: share of each step inside the side's own logging; empty where it does not tell.
    """

    ended: list[float]
    losses: list[float]
    parameters: int | None
    tokens_per_step: int
    hooks: list[float]


@dataclass(frozen=True)
class Block:
    """Timed steps of one process.

    Attributes:
        side: whose.
        step_s: period of each timed step: from the end of the step before to its own.
        foreign_share: share of all CPUs other processes took during the timed steps.
        attempts: how often the block was run until the machine was quiet enough.
    """

    side: str
    step_s: list[float]
    losses: list[float]
    parameters: int | None
    tokens_per_step: int
    hooks: list[float]
    foreign_share: float | None
    attempts: int

    @property
    def median_s(self) -> float:
        """The block's figure."""
        return median(self.step_s)


class BlockFailure(Exception):
    """A side's process ended with an error; the message has its last lines."""


def measure(
    side: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    read: Callable[[Path], Record],
    *,
    warmup: int,
    patience_s: float = 180.0,
) -> Block:
    """Run ``command`` in an empty folder and time its steps after ``warmup`` of them.

    A block during which others took more than ``FOREIGN_LIMIT`` of the machine is repeated, whatever its
    times; the least disturbed attempt counts.
    """
    best: Block | None = None
    for attempt in range(1, ATTEMPTS + 1):
        wait_until_quiet(patience_s=patience_s)
        block = _attempt(side, command, environment, read, warmup, attempt)
        if best is None or (block.foreign_share or 0.0) < (best.foreign_share or 0.0):
            best = block
        if (best.foreign_share or 0.0) <= FOREIGN_LIMIT:
            break
        if attempt < ATTEMPTS:
            print(f"  {side}: others took {block.foreign_share:.1%} of the machine; again", file=sys.stderr)
    assert best is not None
    return best


def _attempt(
    side: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    read: Callable[[Path], Record],
    warmup: int,
    attempt: int,
) -> Block:
    with tempfile.TemporaryDirectory(prefix="block-") as name:
        folder = Path(name)
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            process = subprocess.Popen(
                command, cwd=folder, env={**os.environ, **environment}, stdout=out, stderr=err
            )
            try:
                with Watch(process.pid) as watch:
                    code = process.wait()
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if code != 0:
            tail = (folder / "stderr").read_text(errors="replace")[-3000:]
            raise BlockFailure(f"{side} ended with exit code {code}:\n{tail}")
        record = read(folder)
    assert len(record.ended) > warmup + 1, f"{side}: {len(record.ended)} steps, {warmup} of them warm-up"
    timed = record.ended[warmup - 1 :]
    return Block(
        side=side,
        step_s=[end - start for start, end in pairwise(timed)],
        losses=record.losses,
        parameters=record.parameters,
        tokens_per_step=record.tokens_per_step,
        hooks=record.hooks[warmup:],
        foreign_share=watch.foreign_share(timed[0], timed[-1]),
        attempts=attempt,
    )
