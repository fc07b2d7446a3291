"""Who computes the operator ``rms_norm`` in the model."""

from drivetrain.engine.optimisations.operators import operator_implementation

__all__ = ["IMPLEMENTATION"]

IMPLEMENTATION = operator_implementation("rms_norm")
