"""Processes that share one model: who they are, how they talk, which part of it each holds, how gradients are summed.

One technique a file. The model never imports from here: it is taken apart and its modules replaced from outside.
"""

__all__: list[str] = []
