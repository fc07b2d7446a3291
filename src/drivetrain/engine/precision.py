"""Dtypes of the computation. Master weights, gradients and optimizer state are fp32 whatever is chosen."""

import torch

from drivetrain.config.execution import PrecisionConfig

__all__ = ["compute_dtype"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compute_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Dtype of matrix products and activations."""
    return _DTYPES[precision.params_dtype]
