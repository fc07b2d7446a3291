"""Dtypes of the computation and of what is kept. Master weights and gradients are fp32 whatever is chosen."""

import torch

from drivetrain.config.execution import PrecisionConfig

__all__ = ["compute_dtype", "optimizer_state_dtype", "sum_in_fp32"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Dtype of matrix products and activations."""
    return _DTYPES[precision.params_dtype]


def optimizer_state_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Dtype of the optimizer's moments between updates."""
    return _DTYPES[precision.optimizer_state_dtype]


def sum_in_fp32() -> None:
    """Have matrix products of 16 bits add up in fp32, on CUDA too.

    cuBLAS may otherwise add partial sums of one product in 16 bits (torch allows it by default). CPUs never do. A
    setting of the process, like ``run.deterministic``: to be called once, before anything is computed.
    """
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
