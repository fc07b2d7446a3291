"""Fake runs that also count live bytes and tokens that carry loss, and that know of how many processes they were."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_runs import FakeRunner

from drivetrain.config import RunConfig
from drivetrain.tune.trainer import Attempt


class GoalRunner(FakeRunner):
    """Writes what goals other than speed go by.

    Attributes:
        live: live bytes at the peak that a run counts when it begins under a limit; None: it counts none.
        effective: tokens of a step that carry loss; None: they are not logged.
        sizes: (name of the run, processes) of every attempt.
    """

    live: Callable[[RunConfig], int] | None = None
    effective: Callable[[RunConfig], float] | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.sizes: list[tuple[str, int]] = []

    def train(self, config: Path, overrides: Any, **options: Any) -> Attempt:
        """Of :class:`FakeRunner`."""
        attempt = super().train(config, overrides, **options)
        self.sizes.append((self.started[-1][1], options.get("world_size", 1)))
        return attempt

    def profile(self, config: Path, overrides: Any, **options: Any) -> Attempt:
        """Of :class:`FakeRunner`."""
        attempt = super().profile(config, overrides, **options)
        self.sizes.append((self.started[-1][1], options.get("world_size", 1)))
        return attempt

    def _run(self, verb: str, config: RunConfig, *more: Any) -> Attempt:
        attempt = super()._run(verb, config, *more)
        if attempt.run is None:
            return attempt
        if self.effective is not None:
            (file,) = attempt.run.glob("segments/*/metrics.jsonl")
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            for line in (one for one in lines if "step" in one):
                line["progress/effective_tokens"] = line["step"] * self.effective(config)
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if self.live is not None and config.memory.device_memory_limit_bytes is not None:
            file = attempt.run / "events.jsonl"
            bytes_of = {"activations": self.live(config) - 100, "optimizer": 100}
            event = {
                "time": 0.0,
                "segment": 0,
                "kind": "window",
                "what": "memory_count",
                "peak_bytes": self.live(config),
                "by_category": bytes_of,
            }
            with file.open("a") as events:
                events.write(json.dumps(event) + "\n")
        return attempt
