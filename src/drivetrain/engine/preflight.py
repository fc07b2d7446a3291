"""What can be known to go wrong before a run exists: tried by the launcher, so that nothing is left behind."""

from collections.abc import Collection

import numpy as np

from drivetrain.catalogue import entry
from drivetrain.config import (
    LaunchFacts,
    RunConfig,
    chosen_backend,
    data_seed,
    operator_fields,
    violations,
)
from drivetrain.config.fusion import AUTO, OFF
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.opening import samples_of
from drivetrain.engine.devices import select_device
from drivetrain.engine.initial_state import require_usable_start
from drivetrain.engine.operators_of_run import require_usable_tuned_file
from drivetrain.engine.ops.selection import Selection
from drivetrain.errors import ConfigurationError, DrivetrainError

__all__ = [
    "asked_operators",
    "require_countable_step",
    "require_servable_backends",
    "require_usable_inputs",
    "unservable_backends",
]


def require_usable_inputs(config: RunConfig, corpus: Corpus) -> None:
    """Each split gives a sample, the transform takes one, what the run starts from is there and of this model.

    Held-out text is needed only after the last step, maybe days later: it is looked at now.

    Raises:
        DrivetrainError: what would have stopped the run.
    """
    seq_length, seed = config.model.seq_length, data_seed(config)
    samples_of(corpus, config.data, "train", seq_length, seed).batch(np.zeros(1, dtype=np.int64))
    if config.training.eval_iters:
        samples_of(corpus, config.data, "validation", seq_length, seed)
    require_usable_start(config)
    require_usable_tuned_file(config)


def require_countable_step(config: RunConfig, world_size: int, device_type: str) -> None:
    """On a CPU a memory limit is held by counting one step, which is taken without other ranks.

    Raises:
        ConfigurationError: a rank cannot take a step alone.
    """
    facts = LaunchFacts(world_size=world_size, device_type=device_type)
    broken = [found for found in violations(config, facts) if found.rule == "memory-limit-counts-whole-ranks"]
    if broken:
        raise ConfigurationError(*map(str, broken))


def require_servable_backends(config: RunConfig) -> None:
    """Each backend that is named serves the calls that a run makes of its operator here.

    Raises:
        ConfigurationError: some do not; each with those that can.
    """
    if not _named_backends(config):
        return
    found = unservable_backends(config, select_device(config.run).type)
    if found:
        raise ConfigurationError(*found.values())


def asked_operators(config: RunConfig) -> tuple[str, ...]:
    """Operators that a run of ``config`` computes by, where its model calls them."""
    # Whether one applies is a matter of model and layout: no entry of an operator asks how many processes there are.
    return tuple(
        name
        for name in operator_fields()
        if chosen_backend(config.fusion, name) != OFF and entry(name).applies(config, LaunchFacts()) is None
    )


def unservable_backends(config: RunConfig, device_type: str) -> dict[str, str]:
    """By operator, why the backend that ``fusion.<operator>`` names cannot serve calls that a run makes, and who can.

    The calls are recorded from one layer of the model, without memory and without data: of whole sequences and, where
    attention stops at the borders of documents, of packed ones. A rank of several that share layers has its part of
    heads and features. Nothing is recorded where no backend is named, ``eager`` is, or another may serve instead.

    Args:
        device_type: of the device of the run, here.
    """
    named = _named_backends(config)
    if not named:
        return {}
    return _refusals(_one_layer_of_a_rank(config), device_type, asked_operators(config), named)


def _named_backends(config: RunConfig) -> dict[str, str]:
    """By operator, of those that have to serve: nobody may serve instead."""
    if config.fusion.allow_fallback:
        return {}
    backends = {name: chosen_backend(config.fusion, name) for name in asked_operators(config)}
    return {name: backend for name, backend in backends.items() if backend not in (AUTO, "eager")}


def _refusals(
    config: RunConfig, device_type: str, asked: Collection[str], named: dict[str, str]
) -> dict[str, str]:
    # The tuner's own module: a run that names no backend does not import it.
    from drivetrain.engine.ops_tuning.recording import LAYS_OUT, example_packings, recorded_calls

    laid_out = {name: backend for name, backend in named.items() if name in LAYS_OUT}
    calls = recorded_calls(config, device_type, example_packings(config), laid_out, asked=asked)
    selection = Selection(requested=named)
    found: dict[str, str] = {}
    for call in calls:
        name = call.operator.name
        if name not in named or name in found:
            continue
        try:
            selection.choose(call.operator, call.signature)
        except DrivetrainError as error:
            found[name] = str(error)
    return dict(sorted(found.items()))


def _one_layer_of_a_rank(config: RunConfig) -> RunConfig:
    model, size = config.model, config.parallelism.tensor_model_parallel_size
    part = model.model_copy(
        update={
            "num_layers": 1,
            "kv_channels": model.head_size,
            "num_attention_heads": max(1, model.num_attention_heads // size),
            # Ranks beyond the number of groups hold copies of one.
            "num_query_groups": max(1, model.query_groups // size),
            "ffn_hidden_size": max(1, model.ffn_size // size),
        }
    )
    alone = config.parallelism.model_copy(update={"tensor_model_parallel_size": 1})
    return config.model_copy(update={"model": part, "parallelism": alone})
