"""Operators: what a model computes, each with a reference, a contract of its numerics, and backends that compute the
same.

What lives here: one file (or folder) for each operator, found by discovery; what an operator is (``operator``), what a
call looks like (``signature``), who serves it (``selection``), and how a backend is graded against float64
(``numerics``). What may not: a model, parallelism, or a choice that is made while training by timing something.

An operator is usable alone: nothing here knows of a run.
"""

__all__: list[str] = []
