"""Trials, the convergence gate and the ladder: one change at a time, kept only where it is faster and unharmed.

Runs are started through the command line alone and read from their directories. Nothing here imports torch or the
engine.
"""
