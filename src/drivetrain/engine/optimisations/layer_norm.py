"""Who computes the operator ``layer_norm`` in the model."""

from drivetrain.engine.optimisations.operators import operator_implementation

__all__ = ["IMPLEMENTATION"]

IMPLEMENTATION = operator_implementation("layer_norm")
