"""Who computes the operator ``linear_cross_entropy`` in the model."""

from drivetrain.engine.optimisations.operators import operator_implementation

__all__ = ["IMPLEMENTATION"]

IMPLEMENTATION = operator_implementation("linear_cross_entropy")
