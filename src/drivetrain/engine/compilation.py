"""What torch.compile is doing behind the loop's back."""

import sys

__all__ = ["graphs_compiled"]


def graphs_compiled() -> int:
    """Graphs that torch.compile has built in this process so far; a step that adds one is tagged ``compile``."""
    # Only asked when dynamo is there already: importing it costs seconds and an eager run never needs it.
    utilities = sys.modules.get("torch._dynamo.utils")
    if utilities is None:
        return 0
    return int(utilities.counters["stats"]["unique_graphs"])
