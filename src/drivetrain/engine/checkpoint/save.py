"""Writing a checkpoint: whole or not at all, by all ranks together, each its own parts at their places.

Rank 0 makes the files at their full size; every rank writes the values it is to write, forces them to the disk and
puts its generators' state beside them as the sign that it is done; rank 0 then seals the folder and gives it its name.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from drivetrain.archive.atomic import write_json, write_text
from drivetrain.config.model import ModelConfig
from drivetrain.engine.checkpoint.agreement import ALONE, Agreement
from drivetrain.engine.checkpoint.folder import new_temporary, prune, publish, step_name
from drivetrain.engine.checkpoint.held_state import HeldState
from drivetrain.engine.checkpoint.manifest import seal
from drivetrain.engine.checkpoint.places import Place, own_places, packed, weight_places
from drivetrain.engine.checkpoint.tensor_files import Entry, FileSet, Region, WholeTensor, lay_out, write_part
from drivetrain.engine.checkpoint.write_plan import WritePlan, bytes_of, describe, plan_writes, region_of
from drivetrain.engine.model.huggingface import MAX_SHARD_BYTES, describe_folder, huggingface_architecture
from drivetrain.engine.model.huggingface_state import expected_shapes
from drivetrain.engine.optimizer import STATE_KEYS
from drivetrain.engine.random_state import capture_random_state
from drivetrain.errors import CheckpointError, DrivetrainError, EnvironmentFault

__all__ = [
    "MODEL_FOLDER",
    "OPTIMIZER_STEM",
    "SCHEMA",
    "STATE_FILE",
    "WEIGHTS_STEM",
    "Attempt",
    "Part",
    "begin",
    "end",
    "keeping",
    "random_file",
    "reason_of",
    "save_checkpoint",
    "say_warning",
]

SCHEMA = 1
MODEL_FOLDER = "model"
WEIGHTS_STEM = "model"
OPTIMIZER_STEM = "optimizer"
STATE_FILE = "state.json"
RESERVE_BYTES = 2**20
"""Room for everything but the tensors: headers, JSON, generator states, file system blocks."""

_LOOK_EVERY_S = 0.02


def random_file(rank: int) -> str:
    """Where ``rank`` keeps its generators' state."""
    return f"random/r{rank:05d}.safetensors"


def _failure_file(rank: int) -> str:
    return f"failed-r{rank:05d}"


@dataclass(frozen=True)
class Part:
    """Values that this rank writes.

    Attributes:
        name: of our tensor.
        file: path inside the checkpoint.
        entry, region: the tensor there, and which part of it.
        place: how the file holds it.
        values: as this rank holds them, on any device.
    """

    name: str
    file: str
    entry: Entry
    region: Region
    place: Place
    values: Tensor


@dataclass(frozen=True)
class Attempt:
    """One save on one rank, agreed upon and not written yet.

    Attributes:
        folder: that holds the run's checkpoints.
        temporary: where this one is written.
        needed: bytes of the whole checkpoint.
        parts: what this rank writes.
        random_state: this rank's generators at the time of the save.
    """

    folder: Path
    step: int
    temporary: Path
    needed: int
    rank: int
    world_size: int
    parts: tuple[Part, ...]
    random_state: Mapping[str, Tensor]
    keep_latest_k: int

    @property
    def final(self) -> Path:
        """Its name when it is whole."""
        return self.folder / step_name(self.step)

    def write(self) -> None:
        """Write this rank's parts and force them to the disk; may be called on another thread."""
        by_file: dict[str, list[Part]] = {}
        for part in self.parts:
            by_file.setdefault(part.file, []).append(part)
        for name, parts in by_file.items():
            descriptor = os.open(self.temporary / name, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for part in parts:
                    values = part.place.turn(part.values.detach().cpu())
                    write_part(descriptor, part.entry, part.region, values)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        _write_random_state(self.temporary, self.rank, self.random_state)

    def tell_failure(self, text: str) -> None:
        """Leave word for rank 0 that this rank could not write, if there is room for that."""
        try:
            (self.temporary / _failure_file(self.rank)).write_text(text)
        except OSError:
            # Rank 0 finds out at its time limit, and all ranks before the next save.
            return

    def wait_for_ranks(self, timeout_s: float) -> None:
        """On rank 0: return when every rank has written its parts, as the files show; EnvironmentFault otherwise."""
        give_up = time.monotonic() + timeout_s
        while True:
            missing = self._unfinished_ranks()
            for rank in missing:
                told = self.temporary / _failure_file(rank)
                if told.is_file():
                    raise EnvironmentFault(f"rank {rank}: {told.read_text()}")
            if not missing:
                return
            if time.monotonic() > give_up:
                raise EnvironmentFault(f"ranks {missing} have not written their part in {timeout_s:g} s")
            time.sleep(_LOOK_EVERY_S)

    def conclude(self) -> None:
        """On rank 0, when all ranks have written: seal it and give it its name."""
        missing = self._unfinished_ranks()
        if missing:
            raise EnvironmentFault(
                f"ranks {missing} could not write their part, or do not share this file system with rank 0"
            )
        seal(self.temporary, self.temporary.name)
        publish(self.temporary, self.final)

    def tidy(self, warn: Callable[[str], None]) -> None:
        """On rank 0, when it is whole: remove old ones; ``warn`` is told when that fails. No rank ends for it."""
        try:
            prune(self.folder, self.step, self.keep_latest_k)
        except OSError as error:
            warn(
                f"the checkpoint of step {self.step} is saved, but older ones in {self.folder} can't be removed: "
                f"{error}"
            )

    def give_up(self) -> None:
        """On rank 0: leave nothing of it."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _unfinished_ranks(self) -> list[int]:
        return [rank for rank in range(self.world_size) if not (self.temporary / random_file(rank)).is_file()]


def say_warning(text: str) -> None:
    """On stderr."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    model: ModelConfig,
    state: HeldState,
    trainer_state: Mapping[str, Any],
    keep_latest_k: int,
    tokenizer_file: Path | None = None,
    agreement: Agreement = ALONE,
    layout: Mapping[str, object] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    warn: Callable[[str], None] = say_warning,
) -> Path:
    """Save ``folder/step-<step>``. Every rank calls it and returns when the checkpoint is whole.

    It is written under a temporary name, forced to the disk and then renamed, so that at any moment, whatever
    happens, ``folder`` holds the former checkpoints or those and the new one. Only then are old ones removed.

    Args:
        folder: made if missing; on a file system that all ranks share.
        model: decides whether ``model/`` is a Hugging Face folder (see ``huggingface_architecture``).
        state: what this rank holds. All ranks together hold everything; what several hold is the same on each.
        trainer_state: what the trainer needs to continue (counters, data position, smoothed loss, hash of the
            configuration ...): JSON values, finite numbers. Rank 0's is kept.
        keep_latest_k: how many checkpoints stay, this one included.
        tokenizer_file: copied into ``model/``, so that other programs can use the folder.
        layout: sizes and order of the dimensions of parallelism, by name; kept in ``state.json``.
        max_shard_bytes: a file of tensors is not larger, unless a single tensor is.
        warn: told, on rank 0, when the new one is whole and old ones could not be removed.

    Returns:
        The checkpoint's path.

    Raises:
        EnvironmentFault: on every rank, when some rank could not write (a full disk ...). Nothing of it is
            left, and the former checkpoints are untouched.
    """
    attempt = begin(
        folder,
        step,
        model=model,
        state=state,
        trainer_state=trainer_state,
        keep_latest_k=keep_latest_k,
        tokenizer_file=tokenizer_file,
        agreement=agreement,
        layout=layout,
        max_shard_bytes=max_shard_bytes,
    )
    try:
        with keeping() as failures:
            attempt.write()
        end(attempt, failures, agreement)
        with keeping() as failures:
            if attempt.rank == 0:
                attempt.conclude()
    finally:
        if attempt.rank == 0:
            attempt.give_up()
    end(attempt, failures, agreement)
    if attempt.rank == 0:
        attempt.tidy(warn)
    return attempt.final


def begin(
    folder: Path,
    step: int,
    *,
    model: ModelConfig,
    state: HeldState,
    trainer_state: Mapping[str, Any],
    keep_latest_k: int,
    tokenizer_file: Path | None,
    agreement: Agreement,
    layout: Mapping[str, object] | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Attempt:
    """Agree who writes what, and make the files. Collective; arguments and errors as of :func:`save_checkpoint`."""
    random_state = capture_random_state()
    encoded = _encode_state(step, model, agreement.size, trainer_state, layout)
    held = {**state.weights, **state.optimizer}
    plan = plan_writes(agreement.gather(describe(held)))
    if plan.uncovered:
        raise CheckpointError(
            f"no rank holds all of {plan.uncovered[0]} ({len(plan.uncovered)} tensors in all): nothing was saved"
        )
    files, places = _files(model, plan, max_shard_bytes)
    needed = RESERVE_BYTES + bytes_of(plan.whole)
    answer = b""
    with keeping() as failures:
        if agreement.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            temporary = new_temporary(folder, step)
            answer = temporary.name.encode()
            try:
                _require_room(folder, needed)
                _make_files(temporary, model, files, plan, tokenizer_file, encoded)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    answer = agreement.gather(b"error:" + str(failures[0]).encode() if failures else answer)[0]
    if answer.startswith(b"error:"):
        raise _fault(folder, step, needed, answer.removeprefix(b"error:").decode()) from (
            failures[0] if failures else None
        )
    entries = {
        (folder_of, tensor): (path, entry)
        for folder_of, file_set in files.items()
        for tensor, path, entry in _in(folder_of, file_set)
    }
    parts = []
    for name, tensor in held.items():
        if name in plan.written_by[agreement.rank]:
            place = places[name]
            path, entry = entries[MODEL_FOLDER if name in state.weights else "", place.tensor]
            region = place.region(region_of(tensor))
            parts.append(Part(name, path, entry, region, place, tensor.tensor))
    return Attempt(
        folder=folder,
        step=step,
        temporary=folder / answer.decode(),
        needed=needed,
        rank=agreement.rank,
        world_size=agreement.size,
        parts=tuple(parts),
        random_state=random_state,
        keep_latest_k=keep_latest_k,
    )


def end(attempt: Attempt, failures: Sequence[BaseException], agreement: Agreement) -> None:
    """Raise the same EnvironmentFault on every rank when one has ``failures``. Collective."""
    told = agreement.gather(reason_of(failures[0]).encode() if failures else b"")
    reasons = {rank: text.decode() for rank, text in enumerate(told) if text}
    if not reasons:
        return
    rank, reason = next(iter(reasons.items()))
    where = f"rank {rank}: " if agreement.size > 1 and not reason.startswith("rank ") else ""
    raise _fault(attempt.folder, attempt.step, attempt.needed, where + reason) from (
        failures[0] if failures else None
    )


def reason_of(error: BaseException) -> str:
    """What is said of ``error``, never nothing; of one that a user cannot mend its kind as well."""
    if isinstance(error, (OSError, SafetensorError, DrivetrainError)) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"


@contextmanager
def keeping() -> Iterator[list[Exception]]:
    """Collect what goes wrong: a rank that raised would leave the others waiting for it."""
    failures: list[Exception] = []
    try:
        yield failures
    except (OSError, SafetensorError, DrivetrainError) as error:
        failures.append(error)


def _in(folder: str, file_set: FileSet) -> Iterator[tuple[str, str, Entry]]:
    for tensor, file, entry in file_set.entries():
        yield tensor, f"{folder}/{file}" if folder else file, entry


def _files(
    model: ModelConfig, plan: WritePlan, max_shard_bytes: int
) -> tuple[dict[str, FileSet], dict[str, Place]]:
    """The files of each folder of a checkpoint, and where each tensor of ours lies in them."""
    parameters = {name: tuple(shape) for name, shape in expected_shapes(model).items()}
    weights = {name: tensor for name, tensor in plan.whole.items() if "/" not in name}
    optimizer = {
        f"{name}/{key}": plan.whole[f"{name}/{key}"]
        for name in parameters
        for key in STATE_KEYS
        if f"{name}/{key}" in plan.whole
    }
    places = (
        weight_places(model)
        if huggingface_architecture(model) is not None
        else own_places({name: WholeTensor(shape, torch.float32) for name, shape in parameters.items()})
    )
    files = {
        MODEL_FOLDER: lay_out(packed(weights, places), WEIGHTS_STEM, max_shard_bytes),
        "": lay_out(optimizer, OPTIMIZER_STEM, max_shard_bytes),
    }
    return files, places | own_places(optimizer)


def _make_files(
    temporary: Path,
    model: ModelConfig,
    files: Mapping[str, FileSet],
    plan: WritePlan,
    tokenizer_file: Path | None,
    encoded_state: str,
) -> None:
    """Everything but the values: files of their full size, indices, and what other programs read first."""
    weights = temporary / MODEL_FOLDER
    weights.mkdir()
    (temporary / "random").mkdir()
    for folder, file_set in files.items():
        for file in file_set.files:
            file.create(temporary / folder)
        if file_set.index is not None:
            write_json(temporary / folder / file_set.index_name, file_set.index)
    if huggingface_architecture(model) is not None:
        dtypes = {tensor.dtype for name, tensor in plan.whole.items() if "/" not in name}
        assert len(dtypes) == 1, f"weights of several dtypes: {dtypes}"
        describe_folder(model, weights, tokenizer_file, dtypes.pop())
    elif tokenizer_file is not None:
        shutil.copyfile(tokenizer_file, weights / "tokenizer.json")
    write_text(temporary / STATE_FILE, encoded_state)


def _require_room(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        raise EnvironmentFault("there is no room for it")


def _write_random_state(temporary: Path, rank: int, state: Mapping[str, Tensor]) -> None:
    file = temporary / random_file(rank)
    # Renamed when complete: rank 0 takes the name as the sign that this rank is done.
    unfinished = file.with_suffix(".part")
    save_file(dict(state), str(unfinished))
    unfinished.rename(file)


def _encode_state(
    step: int,
    model: ModelConfig,
    world_size: int,
    trainer_state: Mapping[str, Any],
    layout: Mapping[str, object] | None,
) -> str:
    architecture = huggingface_architecture(model)
    state = {
        "schema": SCHEMA,
        "step": step,
        "model_format": "drivetrain" if architecture is None else "huggingface",
        "architecture": architecture,
        "model": model.model_dump(mode="json"),
        "world_size": world_size,
        "layout": None if layout is None else dict(layout),
        "torch": torch.__version__,
        "trainer": dict(trainer_state),
    }
    # The standard library's encoder: counters of FLOPs outgrow the 64 bits of the archive's.
    return json.dumps(state, indent=2, allow_nan=False) + "\n"


def _fault(folder: Path, step: int, needed: int, reason: str) -> EnvironmentFault:
    try:
        free = f"{shutil.disk_usage(folder).free:,} bytes are free"
    except OSError as error:
        free = f"how many are free is not known ({error.strerror})"
    return EnvironmentFault(
        f"the checkpoint of step {step} could not be saved in {folder}: {reason}; it needs {needed:,} bytes, "
        f"{free}; the checkpoints before it are untouched; make room there or lower checkpoint.keep_latest_k"
    )
