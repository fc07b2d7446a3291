"""Faults of the data pipeline: code of the user's own that is slow, and rows that are padded.

``data.slow_collation`` has no scenario: masks and borders of a micro-batch are a few operations over whole arrays, and
nothing a user can set makes them slow.
"""

from typing import Any

from scenario import Job, Place, Scenario

__all__ = ["SCENARIOS", "SLOW_DOCUMENTS"]

SLOW_DOCUMENTS = '''
def without_repeats(ids):
    """Looks for runs of tokens that a document has twice, one slice at a time."""
    tokens, seen, repeated = ids.tolist(), set(), 0
    for size in range(2, 26):
        for start in range(len(tokens) - size):
            run = tuple(tokens[start : start + size])
            repeated += run in seen
            seen.add(run)
    return ids
'''
_SLOW_BATCHES = r'''
import re

MARKED = re.compile(r"(\d+ )+x")


def without_marked(ids):
    """Means well: it backs up from every number to the end of the row."""
    for row in ids:
        text = " ".join(map(str, row.tolist())) + " "
        for _ in range(4):
            assert MARKED.sub("", text) == text
    return ids
'''
_MANY_STEPS = ("training.train_iters=80",)
_DOCUMENTS = "data.transform=own_code:without_repeats"


def _slow_documents(place: Place) -> Job:
    return place.job(_DOCUMENTS, own_code=SLOW_DOCUMENTS)


def _large(place: Place, **others: Any) -> Job:
    """A corpus of some megabytes, which the system reads in large pieces."""
    return place.job(f"data.data_path={place.corpus(words=400, documents=12_000)}", *_MANY_STEPS, **others)


def _padded(place: Place, *overrides: str, **others: Any) -> Job:
    """Documents of which hardly any fills half of a row, each in a row of its own."""
    short = f"data.data_path={place.corpus(words=40)}"
    rows = ("data.packing=pad", "training.micro_batch_size=4", "training.global_batch_size=4")
    return place.job(short, *rows, *overrides, **others)


def _packed(place: Place) -> Job:
    """The same tokens a step, in half the rows."""
    short = f"data.data_path={place.corpus(words=40)}"
    return place.job(short)


SCENARIOS = (
    Scenario(
        "data.slow_transform of documents",
        ("data.slow_transform",),
        ("data.slow_transform",),
        "process",
        _slow_documents,
        lambda place: place.job(),
        "data.transform looks for repeated runs of tokens in plain Python, in every document",
    ),
    Scenario(
        "data.slow_transform of batches",
        ("data.slow_transform",),
        ("data.slow_transform",),
        "process",
        lambda place: place.job("data.batch_transform=own_code:without_marked", own_code=_SLOW_BATCHES),
        lambda place: place.job(),
        "data.batch_transform searches each row with a regular expression that backs up",
    ),
    Scenario(
        "data.cold_cache",
        ("data.cold_cache",),
        ("data.cold_cache",),
        "process",
        lambda place: _large(place, reads_per_second=20),
        _large,
        "a container may read its disk twenty times a second, and nothing of the corpus is in memory yet",
    ),
    Scenario(
        "data.padding",
        ("data.padding",),
        ("data.padding",),
        "process",
        _padded,
        _packed,
        "packing = pad with documents shorter than half a row; without it their tokens fill half as many rows",
    ),
    Scenario(
        "data.padding + data.slow_transform",
        ("data.padding", "data.slow_transform"),
        ("data.padding",),
        "process",
        lambda place: _padded(place, "data.batch_transform=own_code:without_marked", own_code=_SLOW_BATCHES),
        _packed,
        "rows of short documents are padded, and a regular expression backs up in each",
    ),
)
