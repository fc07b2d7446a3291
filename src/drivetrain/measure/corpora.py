"""Where corpora lie that nobody named: the standard library's, and those made by applying a transform to another."""

import hashlib
import platform
from pathlib import Path

from drivetrain.config.blend import BAKED, with_prefixes
from drivetrain.config.schema import RunConfig
from drivetrain.measure.machine import cache_folder

__all__ = ["baked_data_path", "baked_prefix", "standard_library_prefix", "transform_key"]


def standard_library_prefix(vocab_size: int, cache_dir: str | Path | None = None) -> Path:
    """Prefix of the standard library's source, of this version of Python, as a corpus of at most so many ids."""
    base = Path(cache_dir) if cache_dir is not None else cache_folder()
    return base / "corpora" / f"stdlib-{platform.python_version()}-v{vocab_size}" / "corpus"


def transform_key(transform: str) -> str:
    """What the prefix of a corpus says of the ``data.transform`` that was applied to it: 12 hexadecimal digits."""
    return hashlib.sha256(transform.encode()).hexdigest()[:12]


def baked_prefix(prefix: str, transform: str) -> str:
    """Prefix of the corpus ``prefix`` after ``transform``."""
    return f"{prefix}.baked-{transform_key(transform)}"


def baked_data_path(config: RunConfig) -> str | None:
    """``data.data_path`` of the same run on corpora to which ``data.transform`` was applied; None where there is no
    transform, or it was applied already."""
    data = config.data
    if data.transform is None:
        return None
    transform = data.transform
    if data.data_path is None:
        return baked_prefix(str(standard_library_prefix(config.model.vocab_size)), transform)

    def change(prefix: str) -> str:
        return prefix if BAKED.match(prefix) else baked_prefix(prefix, transform)

    changed = with_prefixes(data.data_path, change)
    return None if changed == data.data_path else changed
