"""Sets of tensors with names: a safetensors file read one tensor at a time, and copying one set into another.

A tensor's name is the only thing that connects a file with a model or an optimizer; nothing is unpickled.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain.errors import CheckpointError

__all__ = ["TensorFile", "copy_tensors"]


class TensorFile(Mapping[str, Tensor], AbstractContextManager["TensorFile"]):
    """A safetensors file as a read-only mapping; a tensor is read from the disk (to the CPU) when asked for.

    Use it as a context manager. Raises CheckpointError if ``path`` is missing or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        try:
            file: Any = safe_open(str(path), framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} can't be read as a safetensors file: {error}") from error
        self._file = file
        self._names: tuple[str, ...] = tuple(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.__exit__(exception_type, exception, traceback)


def copy_tensors(source: Mapping[str, Tensor], target: Mapping[str, Tensor], what: str) -> None:
    """Copy every tensor of ``source`` into the tensor of ``target`` of the same name, in place.

    Names, shapes and dtypes must agree exactly, and nothing is written before the names are found to agree.

    Args:
        source: tensors on any device; may be a :class:`TensorFile`.
        target: tensors on any device, overwritten.
        what: the source in words, for the message.

    Raises:
        CheckpointError: a tensor is missing, left over, or of another shape or dtype.
    """
    missing = sorted(target.keys() - source.keys())
    unknown = sorted(source.keys() - target.keys())
    if missing or unknown:
        raise CheckpointError(
            f"{what} belongs to another model: "
            + "; ".join(
                f"{label} {len(names)} tensors, the first is {names[0]!r}"
                for label, names in (("it lacks", missing), ("it has in excess", unknown))
                if names
            )
        )
    with torch.no_grad():
        for name, destination in target.items():
            tensor = source[name]
            if tensor.shape != destination.shape or tensor.dtype != destination.dtype:
                raise CheckpointError(
                    f"{what} belongs to another model: {name!r} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"expected {destination.dtype} {tuple(destination.shape)}"
                )
            destination.copy_(tensor)
