"""Dtypes of the computation, and the loss scale that fp16 needs.

What a tensor's dtype is for a configuration, in words and without torch, is in ``config/tensor_dtypes.py``; the dtype
of gradients on the wire is data parallelism's affair (``parallel/wire.py``).
"""

from drivetrain.engine.precision.dtypes import compute_dtype, optimizer_state_dtype, sum_in_fp32
from drivetrain.engine.precision.loss_scaler import LossScaler
from drivetrain.engine.precision.overflow import Overflow, look_for_overflow

__all__ = [
    "LossScaler",
    "Overflow",
    "compute_dtype",
    "look_for_overflow",
    "optimizer_state_dtype",
    "sum_in_fp32",
]
