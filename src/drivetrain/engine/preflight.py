"""What can be known to go wrong before a run exists: tried by the launcher, so that nothing is left behind."""

import numpy as np

from drivetrain.config import LaunchFacts, RunConfig, data_seed, violations
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.sequences import Sequences
from drivetrain.engine.initial_state import require_usable_start
from drivetrain.errors import ConfigurationError

__all__ = ["require_countable_step", "require_usable_inputs"]


def require_usable_inputs(config: RunConfig, corpus: Corpus) -> None:
    """Each split gives a sample, the transform takes one, what the run starts from is there and of this model.

    Held-out text is needed only after the last step, maybe days later: it is looked at now.

    Raises:
        DrivetrainError: what would have stopped the run.
    """
    seq_length, seed = config.model.seq_length, data_seed(config)
    Sequences(corpus, config.data, "train", seq_length, seed).batch(np.zeros(1, dtype=np.int64))
    if config.training.eval_iters:
        Sequences(corpus, config.data, "validation", seq_length, seed)
    require_usable_start(config)


def require_countable_step(config: RunConfig, world_size: int, device_type: str) -> None:
    """On a CPU a memory limit is held by counting one step, which is taken without other ranks.

    Raises:
        ConfigurationError: a rank cannot take a step alone.
    """
    facts = LaunchFacts(world_size=world_size, device_type=device_type)
    broken = [found for found in violations(config, facts) if found.rule == "memory-limit-counts-whole-ranks"]
    if broken:
        raise ConfigurationError(*map(str, broken))
