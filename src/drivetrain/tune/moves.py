"""Changes of a configuration: one leaf, or the several leaves of one declared move.

A move exists where one leaf alone would be another experiment: a batch of twice the size at the old learning rate is
not the same training faster, it is a worse training.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.catalogue import LearningRateRule
from drivetrain.catalogue.larger_batch import batch_leaves
from drivetrain.config import RunConfig, leaf_values, leaves, parse_config, to_toml
from drivetrain.errors import ConfigurationError

__all__ = ["Change", "LearningRateRule", "batch_move", "changed", "recompute_and_batch"]


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

    Leaves and their values are :func:`drivetrain.catalogue.larger_batch.batch_leaves`'.

    Raises:
        ConfigurationError: the batch would not be a whole number of sequences.
    """
    return Change(batch_leaves(config, factor, rule), f"batch x {factor:g}, learning rate {rule}")


def recompute_and_batch(
    config: RunConfig,
    recompute: Mapping[str, Any],
    micro_batch_size: int,
    *,
    factor: float = 1.0,
    rule: LearningRateRule = "none",
) -> Change:
    """What backward computes again, and a larger batch that this makes room for, as one change.

    Args:
        recompute: leaves of the section ``memory`` without it, such as ``{"recompute_granularity": "budget"}``.
        micro_batch_size: the new one.
        factor: of the global batch; 1: it stays.
        rule: by which the learning rate follows it.

    Raises:
        ConfigurationError: the global batch would not be a whole number of sequences.
    """
    leaves = {f"memory.{name}": value for name, value in recompute.items()}
    batch = batch_leaves(config, factor, rule) if factor != 1 else {}
    name = f"recompute, micro-batch {config.training.micro_batch_size} to {micro_batch_size}"
    return Change(
        {**leaves, "training.micro_batch_size": micro_batch_size, **batch},
        name if factor == 1 else f"{name}, global batch x {factor:g}, learning rate {rule}",
    )
