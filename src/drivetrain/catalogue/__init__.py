"""The optimisations, one entry a file: everything *about* an optimisation, nothing that does it.

An entry is a module of this package with an ``ENTRY``; it is found by being there. What does the work is
``engine/optimisations/<name>.py``. Here lives no torch and no code of the engine, so that entries serve the tuner, the
diagnosis and the documentation anywhere.
"""

from drivetrain.catalogue.discovery import catalogue, entry, entry_of_field, move_between
from drivetrain.catalogue.entry import Knob, Optimisation
from drivetrain.catalogue.move import LearningRateRule, Move, Numerics, Setting, StepEstimate

__all__ = [
    "Knob",
    "LearningRateRule",
    "Move",
    "Numerics",
    "Optimisation",
    "Setting",
    "StepEstimate",
    "catalogue",
    "entry",
    "entry_of_field",
    "move_between",
]
