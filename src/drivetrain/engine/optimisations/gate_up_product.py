"""Who computes the operator ``gate_up_product`` in the model."""

from drivetrain.engine.optimisations.operators import operator_implementation

__all__ = ["IMPLEMENTATION"]

IMPLEMENTATION = operator_implementation("gate_up_product")
