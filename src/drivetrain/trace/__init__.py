"""Profiler files of anybody's training job: read into event tables, classified, split into steps, accounted for.

One reader a format (:mod:`drivetrain.trace.kineto`), chosen by :func:`drivetrain.trace.read.read_trace`;
whatever comes after the reader sees only :class:`drivetrain.trace.table.Trace`. No torch, nothing that is
unpickled, and no reading of a whole file into memory. Name tables are data files in ``names/``.
"""

__all__: list[str] = []
