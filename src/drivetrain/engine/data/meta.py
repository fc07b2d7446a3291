"""``<prefix>.meta.json``: what is known about a corpus beyond its two files.

Ours always have one. For a corpus of another tool it is written once its ids have been scanned, so that
the scan is not repeated; then ``origin`` is ``scanned`` and what only the maker can know is absent.
"""

from pathlib import Path
from typing import Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drivetrain.archive.atomic import write_json
from drivetrain.engine.data.fingerprint import file_fingerprint
from drivetrain.errors import DataError

__all__ = ["CorpusMeta", "fingerprints", "meta_path", "read_meta", "write_meta"]


def meta_path(prefix: str | Path) -> Path:
    """The file of facts beside a corpus."""
    return Path(f"{prefix}.meta.json")


class CorpusMeta(BaseModel):
    """Facts about a corpus.

    Attributes:
        origin: ``prepared`` here, or ``scanned`` because another tool made it.
        documents, tokens, max_id: counts and the largest token id (-1 for no tokens).
        files: fingerprint of the .bin and of the .idx.
        vocab_size: number of ids of the tokenizer.
        vocab_size_requested: what the tokenizer was asked for; more than ``vocab_size`` where the text
            did not yield as many.
        tokenizer_sha256: see ``tokenizer.tokenizer_hash``.
        eod_id: the id that ends every document.
        text_bytes: UTF-8 bytes of the documents.
        sources: the inputs as they were given.
        skipped: what was left out, and how often: empty documents, binary files, hidden files.
        duplicates: documents that are equal to an earlier one, whether they were kept or left out.
        broken_lines: the first lines of JSON that could not be used, and why.
        tokenizer_text_share: part of the documents the tokenizer was trained on; absent if it was given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = Field(default=1, alias="schema")
    origin: Literal["prepared", "scanned"]
    documents: int = Field(ge=0)
    tokens: int = Field(ge=0)
    max_id: int = Field(ge=-1)
    files: dict[str, str]
    vocab_size: int | None = None
    vocab_size_requested: int | None = None
    tokenizer_sha256: str | None = None
    eod_id: int | None = None
    text_bytes: int | None = None
    sources: tuple[str, ...] = ()
    skipped: dict[str, int] = Field(default_factory=dict)
    duplicates: int | None = None
    broken_lines: tuple[str, ...] = ()
    tokenizer_text_share: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The document that is stored."""
        return self.model_dump(mode="json", by_alias=True)

    @classmethod
    def from_bytes(cls, content: bytes, path: Path) -> Self:
        """Parse a stored document. Raises DataError naming ``path``."""
        try:
            return cls.model_validate(orjson.loads(content))
        except (orjson.JSONDecodeError, ValidationError) as error:
            first = str(error).splitlines()[0] if isinstance(error, orjson.JSONDecodeError) else _first(error)
            raise DataError(
                f"{path} is damaged ({first}); prepare the corpus again, or delete it to have it rebuilt"
            ) from error


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc'])) or 'document'}: {problem['msg']}"


def fingerprints(tokens: Path, index: Path) -> dict[str, str]:
    """Fingerprints of the two files of a corpus as they are now."""
    return {"bin": file_fingerprint(tokens), "idx": file_fingerprint(index)}


def read_meta(prefix: str | Path) -> CorpusMeta | None:
    """The stored facts, or None where there are none."""
    path = meta_path(prefix)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    return CorpusMeta.from_bytes(content, path)


def write_meta(prefix: str | Path, meta: CorpusMeta) -> None:
    """Store the facts beside the corpus, atomically."""
    write_json(meta_path(prefix), meta.to_json())
