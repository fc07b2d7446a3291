"""Drivetrain: pre-train language models fast on PyTorch, and account for every point of MFU that is lost.

The package is layered; each layer may import those to its right::

    cli -> engine | report -> trace | monitor -> archive -> measure -> config -> errors

Only ``cli`` imports ``engine``, and only ``engine`` imports torch: everything that reads, counts and
compares runs works on a machine without it. ``docs/architecture.md`` explains the seams.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
