"""The tensors of a folder of safetensors files: known by name before a value is read, then read part by part."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain.engine.checkpoint.manifest import read_json
from drivetrain.engine.checkpoint.tensor_files import DTYPE_OF, Region, WholeTensor
from drivetrain.errors import CheckpointError

__all__ = ["TensorSource", "open_source"]

_LARGEST_HEADER = 100 * 2**20
"""Bytes; the format's own limit."""


@dataclass(frozen=True)
class TensorSource:
    """What the files hold.

    Attributes:
        where: the folder or the single file, for messages.
        tensors: shape and dtype of each tensor.
    """

    where: Path
    tensors: Mapping[str, WholeTensor]
    _files: Mapping[str, Path]
    _stack: ExitStack
    _opened: dict[Path, Any]

    def file_of(self, tensor: str) -> Path:
        """The file that holds ``tensor``."""
        return self._files[tensor]

    def read(self, tensor: str, region: Region) -> Tensor:
        """That part of ``tensor``, on the CPU; nothing else of the file is read.

        Raises:
            CheckpointError: the file cannot be read.
        """
        path = self._files[tensor]
        try:
            if path not in self._opened:
                self._opened[path] = self._stack.enter_context(safe_open(str(path), framework="pt"))
            file = self._opened[path]
            whole = tuple((0, size) for size in self.tensors[tensor].shape)
            if region == whole:
                values: Tensor = file.get_tensor(tensor)
            else:
                values = file.get_slice(tensor)[tuple(slice(first, end) for first, end in region)]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {tensor} can't be read: {error}") from error
        return values


@contextmanager
def open_source(folder: Path, stem: str) -> Iterator[TensorSource]:
    """The tensors of ``<stem>.safetensors`` in ``folder``, or of the files named by ``<stem>.safetensors.index.json``.

    Raises:
        CheckpointError: a file is missing, cut, no safetensors file, or not named by the index; it names the file, and
            a tensor that lacks or is too many.
    """
    tensors: dict[str, WholeTensor] = {}
    files: dict[str, Path] = {}
    for path, expected in _files_of(folder, stem):
        for name, tensor in _read_header(path, expected).items():
            if name in files:
                raise CheckpointError(f"{path} holds {name!r}, which {files[name].name} holds too")
            tensors[name] = tensor
            files[name] = path
    with ExitStack() as stack:
        yield TensorSource(_where(folder, stem), tensors, files, stack, {})


def _where(folder: Path, stem: str) -> Path:
    single = folder / f"{stem}.safetensors"
    return single if single.is_file() else folder


def _files_of(folder: Path, stem: str) -> Iterator[tuple[Path, list[str] | None]]:
    """Each file, and the tensors that the index says it holds (None: there is no index)."""
    single = folder / f"{stem}.safetensors"
    index = folder / f"{stem}.safetensors.index.json"
    parts = sorted(folder.glob(f"{stem}-*.safetensors"))
    if not index.is_file():
        if parts:
            raise CheckpointError(
                f"{index} is missing, without which {parts[0].name} and others mean nothing"
            )
        if not single.is_file():
            raise CheckpointError(f"{single} is missing")
        yield single, None
        return
    if single.is_file():
        raise CheckpointError(
            f"{single} and {index.name} are both there; one of them is of another checkpoint"
        )
    try:
        weight_map = read_json(index)["weight_map"]
        by_file: dict[str, list[str]] = {}
        for tensor, file in weight_map.items():
            by_file.setdefault(str(file), []).append(str(tensor))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of tensors: {error!r}") from error
    for name in by_file:
        if Path(name).name != name:
            raise CheckpointError(f"{index}: {name} lies outside the folder")
    extra = [path for path in parts if path.name not in by_file]
    if extra:
        held = next(iter(_read_header(extra[0], None)), None)
        raise CheckpointError(
            f"{extra[0]} is not named by {index.name}; it holds {held!r}: it belongs to another checkpoint"
        )
    for name, expected in by_file.items():
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder / name} is missing; it holds {expected[0]!r} ({len(expected)} tensors in all)"
            )
        yield folder / name, expected


def _read_header(path: Path, expected: list[str] | None) -> dict[str, WholeTensor]:
    """The tensors of a file whose bytes are all there."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise CheckpointError(f"{path} is cut in its header, or no safetensors file ({size:,} bytes)")
            document = json.loads(file.read(length))
        found: dict[str, WholeTensor] = {}
        behind = 8 + length
        for name, entry in document.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            tensor = WholeTensor(tuple(entry["shape"]), DTYPE_OF[entry["dtype"]])
            if last - first != tensor.nbytes:
                raise CheckpointError(f"{path}: {name!r} of {tensor} has {last - first:,} bytes")
            if 8 + length + last > size:
                raise CheckpointError(
                    f"{path} is cut: it has {size:,} bytes, and {name!r} ends at {8 + length + last:,}"
                )
            behind = max(behind, 8 + length + last)
            found[name] = tensor
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} can't be read as a safetensors file: {error!r}") from error
    if behind != size:
        raise CheckpointError(f"{path} has {size:,} bytes, and its tensors end at {behind:,}")
    if expected is None:
        return found
    lacking = [name for name in expected if name not in found]
    if lacking:
        raise CheckpointError(f"{path} lacks {lacking[0]!r}, which the index says it holds")
    named = set(expected)
    extra = [name for name in found if name not in named]
    if extra:
        raise CheckpointError(f"{path} holds {extra[0]!r}, which the index does not name")
    return found
