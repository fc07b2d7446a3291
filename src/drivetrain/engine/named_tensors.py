"""A safetensors file as a set of tensors with names, read one tensor at a time.

A tensor's name is the only thing that connects a file with a model or an optimizer; nothing is unpickled.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain.errors import CheckpointError

__all__ = ["TensorFile"]


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
