"""What a file is, by its first bytes."""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from drivetrain.errors import DataError

__all__ = ["HEADER_BYTES", "LlmC", "foreign_format", "llm_c_header"]

HEADER_BYTES = 1024
"""llm.c's files begin with 256 int32: magic, version, number of tokens, zeros."""
LLM_C = {20240520: (1, "<u2", 50256), 20240801: (7, "<u4", 128000)}
"""Version, dtype and the id between documents by magic number: of GPT-2, and of Llama 3."""
MAGICS = (
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"MMIDIDX", "a Megatron index"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x28\xb5\x2f\xfd", "a zstandard file"),
    (b"GGUF", "a GGUF model"),
    (b"\x89PNG", "a PNG image"),
    (b"%PDF", "a PDF document"),
    (b"\x7fELF", "a program"),
    (b"SQLite format 3", "an SQLite database"),
)


@dataclass(frozen=True)
class LlmC:
    """The header of a file of llm.c.

    Attributes:
        dtype: of the token ids behind it.
        num_tokens: how many it says there are.
        eod_id: the id that stands before each document.
    """

    dtype: np.dtype[np.unsignedinteger]
    num_tokens: int
    eod_id: int


def first_bytes(path: Path, size: int = HEADER_BYTES) -> bytes:
    """The first bytes of a file. Raises DataError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def foreign_format(head: bytes) -> str | None:
    """What a file that begins with ``head`` is, in words, if its first bytes tell."""
    known = next((name for magic, name in MAGICS if head.startswith(magic)), None)
    if known is None and len(head) > 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 28:
        return "a safetensors file"
    return known


def llm_c_header(path: Path, head: bytes) -> LlmC | None:
    """The header of a file of llm.c; None for a file that begins otherwise.

    Raises:
        DataError: the magic number is llm.c's and the rest is not as its version says.
    """
    if len(head) < 4:
        return None
    (magic,) = struct.unpack_from("<i", head)
    if magic not in LLM_C:
        return None
    expected, dtype, eod_id = LLM_C[magic]
    if len(head) < HEADER_BYTES:
        raise DataError(
            f"{path} is truncated: the header of llm.c has {HEADER_BYTES} bytes, found {len(head)}"
        )
    version, num_tokens = struct.unpack_from("<ii", head, 4)
    if version != expected:
        raise DataError(f"{path} has version {version} of llm.c's format; version {expected} is readable")
    if num_tokens < 0:
        raise DataError(f"{path} is damaged: its header says that it holds {num_tokens} tokens")
    return LlmC(np.dtype(dtype), num_tokens, eod_id)
