"""Reading a checkpoint into a decoder and an optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.checkpoint.manifest import read_json
from drivetrain.engine.checkpoint.save import (
    MODEL_FILE,
    MODEL_FOLDER,
    OPTIMIZER_FILE,
    SCHEMA,
    STATE_FILE,
    random_file,
)
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.huggingface import load_weights
from drivetrain.engine.named_tensors import TensorFile, copy_tensors
from drivetrain.engine.optimizer import load_optimizer_state
from drivetrain.errors import CheckpointError

__all__ = ["LoadedCheckpoint", "load_checkpoint", "load_model"]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What a checkpoint holds besides weights and optimizer state.

    Attributes:
        step: optimizer steps done.
        trainer_state: the dict that was given to ``save_checkpoint``.
        world_size: ranks that saved it.
        random_state: this rank's generators, for ``restore_random_state`` right before the first step; None
            when the run continues with another number of ranks: then there is no state to continue from.
    """

    step: int
    trainer_state: dict[str, Any]
    world_size: int
    random_state: Mapping[str, Tensor] | None


def load_checkpoint(
    path: Path,
    decoder: Decoder,
    optimizer: torch.optim.AdamW,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> LoadedCheckpoint:
    """Load ``path`` in place: weights into ``decoder``, moments and step counts into ``optimizer``.

    Whether the files are sound was checked by ``find_latest``; names, shapes and dtypes are checked here.

    Raises:
        CheckpointError: it is no checkpoint, or one of another model.
    """
    state = _read_state(path)
    load_model(path, decoder)
    with TensorFile(path / OPTIMIZER_FILE) as tensors:
        load_optimizer_state(optimizer, tensors)
    random_state = None
    if state["world_size"] == world_size:
        with TensorFile(path / random_file(rank)) as tensors:
            random_state = dict(tensors)
    return LoadedCheckpoint(
        step=state["step"],
        trainer_state=state["trainer"],
        world_size=state["world_size"],
        random_state=random_state,
    )


def load_model(path: Path, decoder: Decoder) -> None:
    """Load only the weights of the checkpoint ``path``.

    Raises:
        CheckpointError: it is no checkpoint, or one of another model.
    """
    if _read_state(path)["model_format"] == "huggingface":
        load_weights(path / MODEL_FOLDER, decoder)
        return
    with TensorFile(path / MODEL_FILE) as tensors:
        copy_tensors(tensors, decoder.state_dict(), str(path / MODEL_FILE))


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = read_json(path / STATE_FILE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no checkpoint: {error}") from error
    if state.get("schema") != SCHEMA:
        raise CheckpointError(f"{path} has schema {state.get('schema')}; this version reads schema {SCHEMA}")
    expected = {"step": int, "model_format": str, "world_size": int, "trainer": dict}
    for name, kind in expected.items():
        if not isinstance(state.get(name), kind):
            raise CheckpointError(
                f"{path / STATE_FILE}: {name!r} should be {kind.__name__}, is {state.get(name)!r}"
            )
    return state
