"""What torch.compile is doing behind the loop's back."""

import sys

__all__ = ["frames_given_up", "graphs_compiled"]


def graphs_compiled() -> int:
    """Graphs that torch.compile has built in this process so far; a step that adds one is tagged ``compile``."""
    return _counter("stats", "unique_graphs")


def frames_given_up() -> tuple[int, int]:
    """Pieces of code that torch.compile could not compile in this process and left eager, and those it tried.

    Without ``TORCHDYNAMO_SUPPRESS_ERRORS`` a failure ends the run instead.
    """
    tried = _counter("frames", "total")
    return tried - _counter("frames", "ok"), tried


def _counter(group: str, name: str) -> int:
    # Only asked when dynamo is there already: importing it costs seconds and an eager run never needs it.
    utilities = sys.modules.get("torch._dynamo.utils")
    if utilities is None:
        return 0
    return int(utilities.counters[group][name])
