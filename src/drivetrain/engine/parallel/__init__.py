"""Processes that share one model: who they are, how they talk, how gradients are summed.

One technique a file. The model never imports from here, and nothing here knows what a transformer is.
"""

__all__: list[str] = []
