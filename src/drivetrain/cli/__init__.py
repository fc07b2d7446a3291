"""The command line: one thin module a verb.

A verb's module has ``register(app)`` and nothing that computes. Heavy packages are imported inside the
commands, so that ``drivetrain --help`` costs little more than a bare interpreter.

Exit codes: 0 done or yes; 1 the answer is no; 2 bad input, one message; 130 interrupted, state saved.
"""

from drivetrain.cli.application import main

__all__ = ["main"]
