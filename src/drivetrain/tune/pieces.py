"""The pieces of a ladder's work: each is done once, and its result kept, so that a killed ladder can be replayed.

A ladder is a function of its settings and of the results of its pieces (a profile, a trial, a gate). Whoever resumes
it runs it from the start again: pieces that are there are not repeated, and so every decision comes out as before.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drivetrain.tune.trainer import Attempt, Runner

__all__ = ["Journal", "Meter"]


class Meter:
    """A runner that adds up what its attempts cost."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.elapsed_s = 0.0
        self.device_seconds = 0.0

    def train(
        self,
        config: Path,
        overrides: Sequence[str],
        *,
        options: Sequence[str] = (),
        world_size: int = 1,
        timeout_s: float | None = None,
    ) -> Attempt:
        """See :class:`drivetrain.tune.trainer.Trainer`."""
        attempt = self._runner.train(
            config, overrides, options=options, world_size=world_size, timeout_s=timeout_s
        )
        return self._count(attempt, world_size)

    def profile(
        self,
        config: Path,
        overrides: Sequence[str],
        *,
        steps: int,
        start: int | None = None,
        options: Sequence[str] = (),
        world_size: int = 1,
        timeout_s: float | None = None,
    ) -> Attempt:
        """See :class:`drivetrain.tune.trainer.Runner`."""
        attempt = self._runner.profile(
            config,
            overrides,
            steps=steps,
            start=start,
            options=options,
            world_size=world_size,
            timeout_s=timeout_s,
        )
        return self._count(attempt, world_size)

    def restart(self) -> None:
        """Count from nothing: a piece costs the same whatever was done before it."""
        self.elapsed_s = self.device_seconds = 0.0

    def _count(self, attempt: Attempt, world_size: int) -> Attempt:
        # A run that somebody else stopped is no result: the piece it belongs to is done again.
        if attempt.outcome == "interrupted":
            raise KeyboardInterrupt
        self.elapsed_s += attempt.elapsed_s
        self.device_seconds += attempt.elapsed_s * world_size
        return attempt


class Journal:
    """Results of finished pieces by their keys.

    Attributes:
        entries: ``{"piece", "result", "elapsed_s", "device_seconds"}`` in the order they were finished.
        elapsed_s, device_seconds: of the pieces that were asked for so far; a piece that was cut short counts for
            nothing.
    """

    def __init__(self, entries: Sequence[dict[str, Any]], meter: Meter, save: Callable[[], None]) -> None:
        self.entries = list(entries)
        self.elapsed_s = 0.0
        self.device_seconds = 0.0
        self._known = {entry["piece"]: entry for entry in self.entries}
        self._meter = meter
        self._save = save
        self._asked: set[str] = set()

    def do(self, key: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of the piece ``key``: as it was kept, or of ``work``, which is written down at once."""
        assert key not in self._asked, f"the piece {key} is asked for twice"
        self._asked.add(key)
        entry = self._known.get(key)
        if entry is None:
            self._meter.restart()
            result = work()
            entry = {
                "piece": key,
                "result": result,
                "elapsed_s": self._meter.elapsed_s,
                "device_seconds": self._meter.device_seconds,
            }
            self.entries.append(entry)
            self._known[key] = entry
            self._save()
        self.elapsed_s += entry["elapsed_s"]
        self.device_seconds += entry["device_seconds"]
        found: dict[str, Any] = entry["result"]
        return found

    def cost_of(self, key: str) -> tuple[float, float]:
        """Seconds and device-seconds of a piece that is there."""
        entry = self._known[key]
        return float(entry["elapsed_s"]), float(entry["device_seconds"])
