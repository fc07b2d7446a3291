"""safetensors files that several ranks write and read at once, each its own parts of the tensors.

The format (github.com/huggingface/safetensors): 8 bytes, the length of the header; the header, a JSON object from each
tensor's name to its dtype, shape and place; the values of all tensors without a gap. As the header follows from names,
shapes and dtypes alone, every rank knows where its values go, and no value has to travel to another rank.
"""

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

__all__ = [
    "DTYPES",
    "DTYPE_OF",
    "Entry",
    "FileSet",
    "Region",
    "TensorsOfFile",
    "WholeTensor",
    "lay_out",
    "write_part",
]

Region = tuple[tuple[int, int], ...]
"""A part of a tensor: first and end in each dimension."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
"""The format's names."""
DTYPE_OF = {text: dtype for dtype, text in DTYPES.items()}

_LENGTH_BYTES = 8
_ALIGNMENT = 8


@dataclass(frozen=True)
class WholeTensor:
    """Shape and dtype of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Entry(WholeTensor):
    """A tensor in a file; ``begin`` is the position of its first byte in the file."""

    begin: int

    @property
    def end(self) -> int:
        """Position behind its last byte."""
        return self.begin + self.nbytes


@dataclass(frozen=True)
class TensorsOfFile:
    """A file that is still to be written.

    Attributes:
        name: of the file.
        header: everything before the first value.
        size: of the file, bytes.
    """

    name: str
    header: bytes
    entries: Mapping[str, Entry]
    size: int

    def create(self, folder: Path) -> None:
        """Make the file at its full size, with its header and without values."""
        with (folder / self.name).open("xb") as file:
            file.write(self.header)
            file.truncate(self.size)


@dataclass(frozen=True)
class FileSet:
    """The files that hold a set of tensors: one, or numbered ones with an index, as Hugging Face names them.

    Attributes:
        index: content of ``index_name``; None where there is one file.
    """

    files: tuple[TensorsOfFile, ...]
    index_name: str
    index: Mapping[str, object] | None

    def entries(self) -> Iterator[tuple[str, str, Entry]]:
        """Tensor, file and place of all tensors."""
        for file in self.files:
            for name, entry in file.entries.items():
                yield name, file.name, entry


def lay_out(tensors: Mapping[str, WholeTensor], stem: str, max_bytes: int) -> FileSet:
    """Spread ``tensors``, in their order, over files of at most ``max_bytes`` of values (one tensor may be larger)."""
    parts: list[dict[str, WholeTensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if parts[-1] and filled + tensor.nbytes > max_bytes:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor
        filled += tensor.nbytes
    index_name = f"{stem}.safetensors.index.json"
    if len(parts) == 1:
        return FileSet((_file(f"{stem}.safetensors", parts[0]),), index_name, None)
    names = [f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    files = tuple(_file(name, part) for name, part in zip(names, parts, strict=True))
    total = sum(entry.nbytes for file in files for entry in file.entries.values())
    weight_map = {tensor: file.name for file in files for tensor in file.entries}
    return FileSet(files, index_name, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _file(name: str, tensors: Mapping[str, WholeTensor]) -> TensorsOfFile:
    # Widest elements first, so that every value is aligned to its own size: what the format's own writer does.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    document: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    begins = {}
    for tensor_name, tensor in ordered:
        document[tensor_name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        begins[tensor_name] = position
        position += tensor.nbytes
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGNMENT)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    entries = {
        tensor_name: Entry(tensor.shape, tensor.dtype, len(header) + begins[tensor_name])
        for tensor_name, tensor in ordered
    }
    return TensorsOfFile(name, header, entries, len(header) + position)


def write_part(descriptor: int, entry: Entry, region: Region, values: Tensor) -> None:
    """Write ``values`` (on the CPU, of the region's shape) to where ``region`` of the tensor lies in the open file.

    One write for each run of elements that lie together: one in all for rows, one a row for columns.
    """
    assert values.device.type == "cpu"
    assert values.dtype == entry.dtype
    assert tuple(values.shape) == tuple(end - first for first, end in region), (values.shape, region)
    if values.numel() == 0:
        return
    # From this dimension on a run is whole; the one before it may be cut and is still one run.
    whole = len(entry.shape)
    while whole > 0 and region[whole - 1] == (0, entry.shape[whole - 1]):
        whole -= 1
    outer = max(0, whole - 1)
    strides = [prod(entry.shape[dim + 1 :]) for dim in range(len(entry.shape))]
    start = sum(first * stride for (first, _), stride in zip(region, strides, strict=True))
    data = memoryview(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    runs = prod(values.shape[:outer])
    run_bytes = len(data) // runs
    for number, place in enumerate(itertools.product(*(range(size) for size in values.shape[:outer]))):
        element = start + sum(index * stride for index, stride in zip(place, strides, strict=False))
        _write_all(
            descriptor,
            data[number * run_bytes : (number + 1) * run_bytes],
            entry.begin + element * entry.dtype.itemsize,
        )


def _write_all(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written
