"""Changes of a configuration: one leaf, or the several leaves of one declared move.

A move exists where one leaf alone would be another experiment: a batch of twice the size at the old learning rate is
not the same training faster, it is a worse training.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from drivetrain.config import RunConfig, decay_tokens, leaf_values, leaves, parse_config, to_toml
from drivetrain.errors import ConfigurationError

__all__ = ["Change", "LearningRateRule", "batch_move", "changed"]

LearningRateRule = Literal["none", "sqrt", "linear"]
"""How the learning rate follows a batch of k times the size: not at all, by √k (Adam; Malladi et al. 2022,
arXiv 2205.10287), or by k (SGD; Goyal et al. 2017, arXiv 1706.02677)."""


@dataclass(frozen=True)
class Change:
    """One declared change.

    Attributes:
        leaves: leaf → new value.
        name: what it is called: an entry of the catalogue, or a move.
    """

    leaves: Mapping[str, Any]
    name: str | None = None

    def before(self, config: RunConfig) -> "Change":
        """The change that takes this one back from a configuration that was ``config``."""
        values = {leaf.path: value for leaf, value in leaf_values(config)}
        return Change({path: values[path] for path in self.leaves}, self.name)


def changed(config: RunConfig, change: Change) -> RunConfig:
    """``config`` after ``change``.

    Raises:
        ConfigurationError: a leaf does not exist, or its value is out of range. Rules are not checked.
    """
    unknown = sorted(change.leaves.keys() - leaves().keys())
    if unknown:
        raise ConfigurationError(*(f"{leaf}: no such field" for leaf in unknown))
    document = config.model_dump()
    for path, value in change.leaves.items():
        section, _, name = path.partition(".")
        document[section][name] = value
    # Through the loader's own check, so that a value out of range is reported as it always is.
    where = f"the change {change.name}" if change.name else "the change"
    return parse_config(to_toml(RunConfig.model_construct(**_sections(document))), where)


def _sections(document: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The sections with their values unchecked: what they hold may be illegal, and is checked right after."""
    types = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    return {name: types[name].model_construct(**values) for name, values in document.items()}  # type: ignore[union-attr]


def batch_move(config: RunConfig, factor: float, rule: LearningRateRule) -> Change:
    """A global batch of ``factor`` times the size, for as many tokens, at a learning rate by ``rule``.

    The number of steps is rounded up, so that no token fewer is seen; warm-up and decay are in tokens and stay. The
    end of the decay, where it follows from the length of the run, is pinned to the tokens it was.

    Raises:
        ConfigurationError: the batch would not be a whole number of sequences.
    """
    training = config.training
    batch = training.global_batch_size * factor
    if batch < 1 or abs(batch - round(batch)) > 1e-9:
        raise ConfigurationError(
            f"training.global_batch_size: {training.global_batch_size} x {factor:g} is {batch:g}, no whole number of "
            f"sequences; nearest: x {max(1, round(batch)) / training.global_batch_size:g}"
        )
    scale = {"none": 1.0, "sqrt": math.sqrt(factor), "linear": factor}[rule]
    steps = -(-training.train_iters * training.global_batch_size // round(batch))
    moved: dict[str, Any] = {
        "training.global_batch_size": round(batch),
        "training.train_iters": steps,
    }
    if scale != 1.0:
        moved["optimizer.lr"] = config.optimizer.lr * scale
        if config.lr_schedule.min_lr > 0:
            moved["lr_schedule.min_lr"] = config.lr_schedule.min_lr * scale
    if config.lr_schedule.lr_decay_style != "constant" and steps * round(batch) != (
        training.train_iters * training.global_batch_size
    ):
        moved["lr_schedule.lr_decay_tokens"] = decay_tokens(config)
    return Change(moved, f"batch x {factor:g}, learning rate {rule}")
