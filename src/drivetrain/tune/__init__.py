"""Changes to a run that are tried, measured and kept only if training stays as good.

What lives here: starting runs (``trainer``), the convergence gate (``gate``: decisions from plain numbers;
``gate_runs``: the runs they come from), trials and the ladder. What may not: torch, anything of the engine, and
anything that trains by itself. Runs are started through the command line only, and read from their directories.
"""

__all__: list[str] = []
