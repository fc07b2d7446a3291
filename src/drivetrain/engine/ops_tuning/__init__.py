"""The offline tuner of operators: which calls a configuration makes, which backend is right and fastest for each.

What lives here: recording calls (``recording``), trying one backend in a process of its own (``trial``), timing those
that are right side by side (``timing``), the rule of choice (``choice``), and the file (``writing``). What may not: the
training loop. A run reads the file by ``engine/ops/tuned_file`` and never tunes.
"""

__all__: list[str] = []
