"""Where our tensors lie among the tensors of a checkpoint's files: other names, packed rows, transposed matrices."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from drivetrain.config.model import ModelConfig
from drivetrain.engine.checkpoint.tensor_files import Region, WholeTensor
from drivetrain.engine.model.huggingface_state import parts_of_huggingface
from drivetrain.errors import CheckpointError

__all__ = ["Place", "own_places", "packed", "weight_places"]


@dataclass(frozen=True)
class Place:
    """Where a whole tensor of ours lies in a tensor of a file.

    Attributes:
        tensor: the file's name of it.
        first_row: our first row is that row of the file's tensor (before it is transposed).
        transposed: the file holds the matrix as (columns, rows).
    """

    tensor: str
    first_row: int = 0
    transposed: bool = False

    def region(self, ours: Region) -> Region:
        """A part of our tensor as a part of the file's."""
        if not ours:
            return ours
        (first, end), *rest = ours
        moved = ((first + self.first_row, end + self.first_row), *rest)
        return moved[::-1] if self.transposed else moved

    def turn(self, values: Tensor) -> Tensor:
        """Values of ours as the file holds them, and the other way round."""
        return values.t() if self.transposed else values


def own_places(names: Mapping[str, WholeTensor]) -> dict[str, Place]:
    """Every tensor by itself, under its own name."""
    return {name: Place(name) for name in names}


def weight_places(model: ModelConfig) -> dict[str, Place]:
    """Where every parameter of ``model`` is in a Hugging Face folder."""
    places: dict[str, Place] = {}
    for theirs, parts, transposed in parts_of_huggingface(model):
        row = 0
        for name, shape in parts:
            places[name] = Place(theirs, row, transposed)
            row += shape[0]
    return places


def packed(whole: Mapping[str, WholeTensor], places: Mapping[str, Place]) -> dict[str, WholeTensor]:
    """The tensors of the files that hold ``whole``, in the order of ``places``.

    Raises:
        CheckpointError: ``whole`` lacks a parameter, or holds one that has no place.
    """
    missing = [name for name in places if name not in whole]
    unknown = [name for name in whole if name not in places]
    if missing or unknown:
        raise CheckpointError(
            f"the ranks together do not hold this model: they lack {missing[:3]}, and hold {unknown[:3]} besides"
        )
    rows: dict[str, int] = {}
    for name, place in places.items():
        shape = whole[name].shape
        rows[place.tensor] = rows.get(place.tensor, 0) + (shape[0] if shape else 0)
    found: dict[str, WholeTensor] = {}
    for name, place in places.items():
        tensor = whole[name]
        shape = (rows[place.tensor], *tensor.shape[1:]) if tensor.shape else ()
        found[place.tensor] = WholeTensor(shape[::-1] if place.transposed else shape, tensor.dtype)
    return found
