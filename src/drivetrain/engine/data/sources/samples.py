"""The texts of samples, whatever data set they are of."""

from collections.abc import Iterator

import orjson

from drivetrain.engine.data.sources.source import Reading, Report, Sample, Samples
from drivetrain.errors import DataError

__all__ = ["texts"]


def texts(content: Samples, reading: Reading, report: Report) -> Iterator[str]:
    """The text of each sample.

    Raises:
        DataError: a sample without text, where ``reading.strict``: ``file: sample: reason``.
    """
    for sample in content.samples:
        try:
            yield _text(sample, reading.json_key)
        except ValueError as error:
            place = f"{content.path}: {sample.name}: {error}"
            if reading.strict:
                raise DataError(place) from error
            report.broken_sample(place)


def _text(sample: Sample, key: str) -> str:
    """The text. Raises ValueError with the reason why there is none."""
    if sample.form == "text":
        return sample.data.decode("utf-8")
    if sample.form == "none":
        raise ValueError(f"no .txt and no .json; it has {sample.data.decode() or 'nothing'}")
    value = orjson.loads(sample.data)
    if sample.form == "object":
        if not isinstance(value, dict):
            raise ValueError(f"its .json is {type(value).__name__}, expected an object")
        if key not in value:
            keys = ", ".join(map(repr, list(value)[:10])) or "none"
            raise ValueError(f"no key {key!r} in its .json; its keys: {keys}")
        value = value[key]
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {type(value).__name__}, expected a string")
    return value
