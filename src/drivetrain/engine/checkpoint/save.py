"""Writing a checkpoint: whole or not at all, by all ranks together."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from drivetrain.archive.atomic import write_text
from drivetrain.config.model import ModelConfig
from drivetrain.engine.checkpoint.folder import new_temporary, open_temporary, prune, publish, step_name
from drivetrain.engine.checkpoint.manifest import MANIFEST_FILE, read_json, seal
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.huggingface import export_folder, huggingface_architecture
from drivetrain.engine.optimizer import optimizer_state
from drivetrain.engine.random_state import capture_random_state
from drivetrain.errors import DrivetrainError, EnvironmentFault

__all__ = [
    "MODEL_FILE",
    "MODEL_FOLDER",
    "OPTIMIZER_FILE",
    "SCHEMA",
    "STATE_FILE",
    "random_file",
    "save_checkpoint",
]

SCHEMA = 1
MODEL_FOLDER = "model"
MODEL_FILE = "model/model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
RESERVE_BYTES = 2**20
"""Room for everything but the tensors: headers, JSON, generator states, file system blocks."""


def random_file(rank: int) -> str:
    """Where ``rank`` keeps its generators' state."""
    return f"random/r{rank:05d}.safetensors"


def _alone() -> None:
    """The barrier of a single rank."""


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    model: ModelConfig,
    decoder: Decoder,
    optimizer: torch.optim.AdamW,
    trainer_state: Mapping[str, Any],
    keep_latest_k: int,
    tokenizer_file: Path | None = None,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = _alone,
) -> Path:
    """Save ``folder/step-<step>``. Every rank calls it; rank 0 writes what all ranks have in common.

    It is written under a temporary name, forced to the disk and then renamed, so that at any moment, whatever
    happens, ``folder`` holds the former checkpoints or those and the new one. Only then are old ones removed.

    Args:
        folder: made if missing; on a file system that all ranks share.
        model: decides whether ``model/`` is a Hugging Face folder (see ``huggingface_architecture``).
        decoder: the bare model, not wrapped for data parallelism; fp32 weights, the same on all ranks.
        optimizer: from ``build_optimizer``, the same state on all ranks.
        trainer_state: what the trainer needs to continue (counters, data position, smoothed loss, hash of the
            configuration ...): JSON values, finite numbers. Rank 0's is kept.
        keep_latest_k: how many checkpoints stay, this one included.
        tokenizer_file: copied into ``model/``, so that other programs can use the folder.
        barrier: returns once every rank has called it as often.

    Returns:
        The checkpoint's path.

    Raises:
        EnvironmentFault: on every rank, when some rank could not write (a full disk ...). Nothing of it is
            left, and the former checkpoints are untouched.
    """
    final = folder / step_name(step)
    state = _encode_state(step, model, world_size, trainer_state)
    needed = _bytes_needed(decoder, optimizer)
    failures: list[Exception] = []
    temporary: Path | None = None
    try:
        if rank == 0:
            with _keeping(failures):
                folder.mkdir(parents=True, exist_ok=True)
                temporary = new_temporary(folder, step)
                _require_room(folder, needed)
        barrier()
        if rank != 0:
            temporary = open_temporary(folder, step)
        if temporary is not None and not failures:
            with _keeping(failures):
                _write_random_state(temporary, rank)
                if rank == 0:
                    _write_model(temporary, model, decoder, tokenizer_file)
                    save_file(optimizer_state(optimizer), str(temporary / OPTIMIZER_FILE))
                    write_text(temporary / STATE_FILE, state)
        barrier()
        if rank == 0 and temporary is not None and not failures:
            with _keeping(failures):
                _require_all_ranks(temporary, world_size)
                seal(temporary, temporary.name)
                publish(temporary, final)
    finally:
        if rank == 0 and temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    barrier()
    if failures or temporary is None or not _was_published(final, temporary.name):
        raise _fault(folder, step, needed, failures) from (failures[0] if failures else None)
    if rank == 0:
        _prune(folder, step, keep_latest_k)
    return final


@contextmanager
def _keeping(failures: list[Exception]) -> Iterator[None]:
    """Put what goes wrong into ``failures``: a rank that raised would leave the others in a barrier."""
    try:
        yield
    except (OSError, SafetensorError, DrivetrainError) as error:
        failures.append(error)


def _bytes_needed(decoder: Decoder, optimizer: torch.optim.AdamW) -> int:
    tensors = [*decoder.state_dict().values(), *optimizer_state(optimizer).values()]
    return RESERVE_BYTES + sum(int(tensor.nbytes) for tensor in tensors)


def _require_room(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        raise EnvironmentFault("there is no room for it")


def _write_random_state(temporary: Path, rank: int) -> None:
    file = temporary / random_file(rank)
    file.parent.mkdir(exist_ok=True)
    # Renamed when complete: rank 0 takes the name as the sign that this rank is done.
    unfinished = file.with_suffix(".part")
    save_file(capture_random_state(), str(unfinished))
    unfinished.rename(file)


def _require_all_ranks(temporary: Path, world_size: int) -> None:
    missing = [rank for rank in range(world_size) if not (temporary / random_file(rank)).is_file()]
    if missing:
        raise EnvironmentFault(
            f"ranks {missing} could not write their part, or do not share this file system with rank 0"
        )


def _write_model(temporary: Path, model: ModelConfig, decoder: Decoder, tokenizer_file: Path | None) -> None:
    folder = temporary / MODEL_FOLDER
    folder.mkdir()
    if huggingface_architecture(model) is not None:
        export_folder(decoder.state_dict(), model, folder, tokenizer_file)
        return
    save_file(decoder.state_dict(), str(temporary / MODEL_FILE))
    if tokenizer_file is not None:
        shutil.copyfile(tokenizer_file, folder / "tokenizer.json")


def _encode_state(step: int, model: ModelConfig, world_size: int, trainer_state: Mapping[str, Any]) -> str:
    architecture = huggingface_architecture(model)
    state = {
        "schema": SCHEMA,
        "step": step,
        "model_format": "drivetrain" if architecture is None else "huggingface",
        "architecture": architecture,
        "model": model.model_dump(mode="json"),
        "world_size": world_size,
        "torch": torch.__version__,
        "trainer": dict(trainer_state),
    }
    # The standard library's encoder: counters of FLOPs outgrow the 64 bits of the archive's.
    return json.dumps(state, indent=2, allow_nan=False) + "\n"


def _was_published(final: Path, token: str) -> bool:
    try:
        return bool(read_json(final / MANIFEST_FILE)["token"] == token)
    except (OSError, ValueError, KeyError):
        return False


def _fault(folder: Path, step: int, needed: int, failures: list[Exception]) -> EnvironmentFault:
    reason = str(failures[0]) if failures else "another rank could not write its part"
    try:
        free = f"{shutil.disk_usage(folder).free:,} bytes are free"
    except OSError as error:
        free = f"how many are free is not known ({error.strerror})"
    return EnvironmentFault(
        f"the checkpoint of step {step} could not be saved in {folder}: {reason}; it needs {needed:,} bytes, "
        f"{free}; the checkpoints before it are untouched; make room there or lower checkpoint.keep_latest_k"
    )


def _prune(folder: Path, step: int, keep_latest_k: int) -> None:
    try:
        prune(folder, step, keep_latest_k)
    except OSError as error:
        raise EnvironmentFault(
            f"the checkpoint of step {step} is saved, but older ones in {folder} can't be removed: {error}"
        ) from error
