"""``<prefix>.baked.json``: that a corpus is another one after ``data.transform``, so that it is not applied twice."""

from pathlib import Path
from typing import Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drivetrain.archive.atomic import write_json
from drivetrain.config import DataConfig
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.transform import source_hash
from drivetrain.errors import DataError

__all__ = ["BakedFrom", "baked_path", "read_baked", "transform_to_apply", "write_baked"]


class BakedFrom(BaseModel):
    """What a corpus was made from.

    Attributes:
        transform: the value of ``data.transform`` that was applied.
        transform_source: :func:`.source_hash` of it.
        source: prefix of the corpus before it.
        source_fingerprint: of that corpus.
        files: fingerprints of the files that were made.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = Field(default=1, alias="schema")
    transform: str
    transform_source: str
    source: str
    source_fingerprint: str
    files: dict[str, str]


def baked_path(prefix: str | Path) -> Path:
    """The file beside a corpus that says what it was made from."""
    return Path(f"{prefix}.baked.json")


def write_baked(prefix: str | Path, baked: BakedFrom) -> None:
    """Store it, atomically."""
    write_json(baked_path(prefix), baked.model_dump(mode="json", by_alias=True))


def read_baked(prefix: str | Path) -> BakedFrom | None:
    """What the corpus ``prefix`` was made from; None where no transform was applied to it.

    Raises:
        DataError: the file is damaged, or cannot be read.
    """
    path = baked_path(prefix)
    try:
        return BakedFrom.model_validate(orjson.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (orjson.JSONDecodeError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise DataError(
            f"{path} is damaged ({first}); make the corpus again (`drivetrain data prepare --bake`)"
        ) from error


def transform_to_apply(corpus: Corpus, data: DataConfig) -> str | None:
    """``data.transform`` where it is to be applied to the documents of ``corpus``; None where there is none, or where
    the corpus holds its result.

    Raises:
        DataError: the corpus holds the result of another transform, or of another version of this one.
    """
    if data.transform is None:
        return None
    baked = read_baked(corpus.prefix)
    if baked is None:
        return data.transform
    if baked.files != corpus.meta.files:
        raise DataError(
            f"{baked_path(corpus.prefix)} describes other files than {corpus.prefix}.bin and .idx; make the "
            "corpus again (`drivetrain data prepare --bake`)"
        )
    if baked.transform != data.transform:
        raise DataError(
            f"{corpus.prefix!r} was made by applying {baked.transform!r}, and data.transform = {data.transform!r}; use "
            f"data.transform={baked.transform}, or data.data_path={baked.source}"
        )
    if baked.transform_source != source_hash(data.transform):
        raise DataError(
            f"{corpus.prefix!r} was made with another version of {data.transform!r} than the one that is imported now; "
            f"make it again (`drivetrain data prepare --bake`), or use data.data_path={baked.source}"
        )
    return None
