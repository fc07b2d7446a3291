"""What a run without a checkpoint of its own starts from: drawn weights, those of a folder, or another run's state."""

import os
from pathlib import Path

import torch

from drivetrain.archive.reader import open_run
from drivetrain.config import ModelConfig, RunConfig
from drivetrain.engine.checkpoint import checked_checkpoint, damage, find_latest
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.huggingface import load_weights, require_same_model
from drivetrain.engine.model.initialization import initial_value
from drivetrain.engine.parallel.gradient_sync import GradientSync
from drivetrain.engine.progress import Progress
from drivetrain.errors import CheckpointError

__all__ = ["former_state", "initialize_weights", "other_data", "require_usable_start"]


def former_state(config: RunConfig) -> Path | None:
    """The checkpoint whose whole state the run starts from; None: it begins at step 1."""
    checkpoint = config.checkpoint
    if checkpoint.initial_load_path is None or checkpoint.initial_load_model_only:
        return None
    return Path(checkpoint.initial_load_path)


def require_usable_start(config: RunConfig) -> None:
    """Weights or state that ``checkpoint.initial_load_path`` names are there, of this model, and leave steps to do.

    Raises:
        CheckpointError: they are not. A checkpoint is compared with its checksums.
    """
    if config.checkpoint.initial_load_path is None:
        return
    path = former_state(config)
    if path is None:
        _require_usable_weights(Path(config.checkpoint.initial_load_path), config.model)
        return
    reason = damage(path)
    if reason is not None:
        raise CheckpointError(f"{path} is no sound checkpoint: {reason}{_hint(path, config.model)}")
    found = checked_checkpoint(path, config.model)
    Progress.from_dict(found.trainer_state)
    if found.step >= config.training.train_iters:
        raise CheckpointError(
            f"{path} was saved after step {found.step:,}, and training.train_iters = {config.training.train_iters:,} "
            f"leaves nothing to train; use {found.step + 1:,} or more"
        )


def _require_usable_weights(path: Path, model: ModelConfig) -> None:
    try:
        require_same_model(path, model)
    except CheckpointError as error:
        if not (path / "state.json").is_file():
            raise
        raise CheckpointError(
            f"{error}; {path} is a checkpoint: its weights alone are in {path / 'model'}, and with "
            "checkpoint.initial_load_model_only=false the run goes on from it"
        ) from error


def _hint(path: Path, model: ModelConfig) -> str:
    """What was probably meant; empty where nobody knows."""
    if (path / "checkpoints").is_dir():
        found = find_latest(path / "checkpoints", lambda *_: None)
        return f"; it is a run, whose newest checkpoint is {found}" if found is not None else ""
    try:
        require_same_model(path, model)
    except CheckpointError:
        return ""
    return (
        "; it is a Hugging Face folder, which holds weights and nothing else: use "
        "checkpoint.initial_load_model_only=true"
    )


def initialize_weights(sync: GradientSync, config: RunConfig) -> None:
    """Each rank takes its part out of the values that a single process would start from.

    Weights of a folder are read whole, on the host.
    """
    with torch.no_grad():
        if config.checkpoint.initial_load_path is None:
            for name, held in sync.parameters().items():
                drawn = initial_value(config.model, name, held.placement.full_shape, config.run.seed)
                held.tensor.copy_(drawn[held.placement.slices()])
            return
        whole = Decoder(config.model, torch.float32)
        load_weights(Path(config.checkpoint.initial_load_path), whole)
        values = dict(whole.named_parameters())
        for name, held in sync.parameters().items():
            held.tensor.copy_(values[name][held.placement.slices()])


def other_data(path: Path, fingerprint: str) -> str | None:
    """Why the position in the data that the checkpoint ``path`` holds is one in other data, in words; None: it is not,
    or the checkpoint lies in no run, so that nobody knows."""
    run_path = Path(os.path.abspath(path)).parent.parent
    if not (run_path / "run.json").is_file():
        return None
    former = str(open_run(run_path).manifest["dataset"].get("fingerprint"))
    if former == fingerprint:
        return None
    return (
        f"{path} was saved while training on another corpus (fingerprint {former[:12]}, here {fingerprint[:12]}): the "
        "position in the data is a number of samples of that one"
    )
