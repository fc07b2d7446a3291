"""Who computes the operator ``bias_dropout_add`` in the model."""

from drivetrain.engine.optimisations.operators import operator_implementation

__all__ = ["IMPLEMENTATION"]

IMPLEMENTATION = operator_implementation("bias_dropout_add")
