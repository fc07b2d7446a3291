"""A trainer that trains in this process: no start-up, and code can be wrapped around a run."""

import contextlib
import io
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from drivetrain.archive.origin import RunOrigin
from drivetrain.archive.reader import open_run
from drivetrain.config import RunConfig, load_config
from drivetrain.engine.creation import create_run
from drivetrain.engine.data.corpus import ensure_corpus
from drivetrain.engine.parallel.process_group import Ranks
from drivetrain.engine.random_state import deterministic
from drivetrain.engine.worker import work
from drivetrain.tune.trainer import Attempt

__all__ = ["InProcessTrainer"]


class InProcessTrainer:
    """Attributes: ``trained``, the overrides and options of each run it made."""

    def __init__(
        self, around: Callable[[RunConfig], AbstractContextManager[None]] = lambda _: nullcontext()
    ) -> None:
        self.around = around
        self.trained: list[list[str]] = []

    def train(
        self,
        config: Path,
        overrides: Sequence[str],
        *,
        options: Sequence[str] = (),
        world_size: int = 1,
        timeout_s: float | None = None,
    ) -> Attempt:
        assert world_size == 1
        self.trained.append([*overrides, *options])
        loaded = load_config(str(config), overrides)
        seed = int(options[options.index("--perturb-ulp") + 1]) if "--perturb-ulp" in options else None
        origin = RunOrigin(probe="--probe" in options, perturb_ulp=seed)
        corpus = ensure_corpus(loaded.config.data, loaded.config.model)
        path = create_run(loaded, corpus, world_size=1, argv=["test"], origin=origin)
        with (
            contextlib.redirect_stderr(io.StringIO()),
            deterministic(loaded.config.run.deterministic),
            self.around(loaded.config),
        ):
            result = work(path, Ranks())
        outcome = "diverged" if result.outcome.status == "diverged" else "finished"
        return Attempt(outcome, path, "", 0.0, open_run(path).summary())
