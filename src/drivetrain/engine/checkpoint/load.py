"""Reading a checkpoint of any layout into a run of any other: each rank reads the parts it holds, and no more."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.config.model import ModelConfig
from drivetrain.engine.checkpoint.agreement import ALONE, Agreement
from drivetrain.engine.checkpoint.held_state import HeldState, whole_weights
from drivetrain.engine.checkpoint.manifest import read_json
from drivetrain.engine.checkpoint.places import Place, own_places, packed, weight_places
from drivetrain.engine.checkpoint.save import (
    MODEL_FOLDER,
    OPTIMIZER_STEM,
    SCHEMA,
    STATE_FILE,
    WEIGHTS_STEM,
    random_file,
)
from drivetrain.engine.checkpoint.source import TensorSource, open_source
from drivetrain.engine.checkpoint.tensor_files import WholeTensor
from drivetrain.engine.checkpoint.write_plan import region_of
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.huggingface import require_same_model
from drivetrain.engine.model.huggingface_state import expected_shapes
from drivetrain.engine.named_tensors import TensorFile
from drivetrain.engine.optimizer import STATE_KEYS
from drivetrain.engine.parallel.gradient_sync import Held
from drivetrain.errors import CheckpointError

__all__ = ["LoadedCheckpoint", "checked_checkpoint", "load_checkpoint", "load_model"]


_STATE_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""That moments can have, as a configuration names them."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What a checkpoint holds besides weights and optimizer state.

    Attributes:
        step: optimizer steps done.
        trainer_state: the dict that was given to ``save_checkpoint``.
        world_size: ranks that saved it.
        random_state: this rank's generators, for ``restore_random_state`` right before the first step; None
            when the run continues with other ranks or in another layout: then there is no state to continue from.
    """

    step: int
    trainer_state: dict[str, Any]
    world_size: int
    random_state: Mapping[str, Tensor] | None


@dataclass(frozen=True)
class _Copy:
    """A part of a tensor of a file, and the tensor it is for."""

    name: str
    source: TensorSource
    place: Place
    held: Held

    def copy(self) -> None:
        if not self.held.tensor.numel():  # an empty part at the end of a dimension is no region of a file
            return
        values = self.source.read(self.place.tensor, self.place.region(region_of(self.held)))
        self.held.tensor.copy_(self.place.turn(values))


def load_checkpoint(
    path: Path,
    model: ModelConfig,
    state: HeldState,
    *,
    agreement: Agreement = ALONE,
    layout: Mapping[str, object] | None = None,
) -> LoadedCheckpoint:
    """Load this rank's part of ``path`` into the tensors of ``state``, in place. Every rank calls it.

    Names, shapes, dtypes and sizes of all files are checked first, by every rank; nothing is changed on any rank
    unless all found everything in order. Whether the *values* are those that were written was checked by
    ``find_latest``.

    Args:
        model: configuration of the whole model.
        layout: as given to ``save_checkpoint``.

    Raises:
        CheckpointError: on every rank: it is no checkpoint, one of another model, or a file is missing, too many or
            cut.
    """
    with ExitStack() as stack:
        copies: list[_Copy] = []
        document: dict[str, Any] = {}
        random_state: Mapping[str, Tensor] | None = None
        with _agreed(agreement):
            document = _read_state(path)
            copies += _weights(stack, path, document, model, state.weights)
            copies += _optimizer(stack, path, model, state.optimizer)
            random_state = _random_state(path, document, agreement, layout)
        with _agreed(agreement), torch.no_grad():
            for copy in copies:
                copy.copy()
    return LoadedCheckpoint(
        step=document["step"],
        trainer_state=document["trainer"],
        world_size=document["world_size"],
        random_state=random_state,
    )


def checked_checkpoint(path: Path, model: ModelConfig) -> LoadedCheckpoint:
    """What ``path`` holds besides tensors, which are compared with ``model`` by name and shape; none is read.

    Raises:
        CheckpointError: it is no checkpoint, or one of another model.
    """
    with ExitStack() as stack:
        state = _read_state(path)
        _weights(stack, path, state, model, {})
        _optimizer(stack, path, model, {})
    return LoadedCheckpoint(state["step"], state["trainer"], state["world_size"], None)


def load_model(path: Path, decoder: Decoder) -> None:
    """Load only the weights of the checkpoint ``path`` into a whole model.

    Raises:
        CheckpointError: it is no checkpoint, or one of another model.
    """
    with ExitStack() as stack:
        copies = _weights(stack, path, _read_state(path), decoder.model, whole_weights(decoder))
        with torch.no_grad():
            for copy in copies:
                copy.copy()


@contextmanager
def _agreed(agreement: Agreement) -> Iterator[None]:
    """When the block ends with a CheckpointError on one rank it does so on all. Collective."""
    failure: CheckpointError | None = None
    try:
        yield
    except CheckpointError as error:
        failure = error
    told = [text.decode() for text in agreement.gather(str(failure).encode() if failure is not None else b"")]
    if failure is not None:
        raise failure
    others = {rank: text for rank, text in enumerate(told) if text}
    if others:
        rank, text = next(iter(others.items()))
        raise CheckpointError(f"rank {rank}: {text}")


def _weights(
    stack: ExitStack, path: Path, state: Mapping[str, Any], model: ModelConfig, held: Mapping[str, Held]
) -> list[_Copy]:
    folder = path / MODEL_FOLDER
    whole = {name: WholeTensor(tuple(shape), torch.float32) for name, shape in expected_shapes(model).items()}
    if state["model_format"] == "huggingface":
        require_same_model(folder, model)
        places = weight_places(model)
    else:
        places = own_places(whole)
    source = stack.enter_context(open_source(folder, WEIGHTS_STEM))
    _require(source, packed(whole, places), all_of_them=True)
    return _copies(source, places, held)


def _optimizer(stack: ExitStack, path: Path, model: ModelConfig, held: Mapping[str, Held]) -> list[_Copy]:
    source = stack.enter_context(open_source(path, OPTIMIZER_STEM))
    known = {f"{name}/{key}" for name in expected_shapes(model) for key in STATE_KEYS}
    unknown = [name for name in source.tensors if name not in known]
    if unknown:
        raise CheckpointError(
            f"{source.file_of(unknown[0])} belongs to another model: it has {unknown[0]!r} in excess"
        )
    whole = {name: WholeTensor(one.placement.full_shape, one.tensor.dtype) for name, one in held.items()}
    _require(source, whole, all_of_them=False)
    return _copies(source, own_places(whole), held)


def _require(source: TensorSource, expected: Mapping[str, WholeTensor], *, all_of_them: bool) -> None:
    """Compare names and shapes."""
    problems = []
    missing = [name for name in expected if name not in source.tensors]
    if missing:
        problems.append(f"it lacks {len(missing)} tensors, the first is {missing[0]!r}")
    unknown = [name for name in source.tensors if name not in expected] if all_of_them else []
    if unknown:
        name = unknown[0]
        problems.append(
            f"it has in excess {len(unknown)} tensors, the first is {name!r} in {source.file_of(name).name}"
        )
    for name, tensor in expected.items():
        if name in source.tensors and source.tensors[name].shape != tensor.shape:
            problems.append(
                f"{name!r} in {source.file_of(name).name} is {source.tensors[name].shape} instead of {tensor.shape}"
            )
            break
    if problems:
        raise CheckpointError(f"{source.where} belongs to another model: " + "; ".join(problems))


def _copies(source: TensorSource, places: Mapping[str, Place], held: Mapping[str, Held]) -> list[_Copy]:
    copies = []
    for name, one in held.items():
        place = places[name]
        dtype = source.tensors[place.tensor].dtype
        if dtype != one.tensor.dtype:
            hint = ""
            if "/" in name and dtype in _STATE_DTYPES:
                hint = f"; it goes on with precision.optimizer_state_dtype={_STATE_DTYPES[dtype]}"
            raise CheckpointError(
                f"{source.file_of(place.tensor)}: {place.tensor!r} is {dtype}, expected {one.tensor.dtype}{hint}"
            )
        copies.append(_Copy(name, source, place, one))
    return copies


def _random_state(
    path: Path, state: Mapping[str, Any], agreement: Agreement, layout: Mapping[str, object] | None
) -> Mapping[str, Tensor] | None:
    saved = state.get("layout")
    same = saved is None or layout is None or saved == dict(layout)
    if state["world_size"] != agreement.size or not same:
        return None
    with TensorFile(path / random_file(agreement.rank)) as tensors:
        return dict(tensors)


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
