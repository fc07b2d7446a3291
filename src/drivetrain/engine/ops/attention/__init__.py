"""Attention, as a contract over kinds of masks: the specification, the reference, and who serves which.

A backend that cannot serve a mask refuses, and the refusal names those that can. docs/ops-attention.md has the matrix.
"""

from drivetrain.engine.ops.attention import (
    dense,
    eager,
    flash_attn,
    flex,
    npu,
    products,
    transformer_engine,
    triton_launch,
)
from drivetrain.engine.ops.attention.cases import cases
from drivetrain.engine.ops.attention.mask import CAUSAL, FULL, Alignment, Documents, Dropout, Mask
from drivetrain.engine.ops.attention.registered import attention_chunked, attention_triton
from drivetrain.engine.ops.operator import Backend, Operator, serves_all

__all__ = ["CAUSAL", "FULL", "OPERATOR", "Alignment", "Documents", "Dropout", "Mask"]

FACTOR = 5.0
"""Times the error of the dense softmax. SDPA's own bf16 backward on a CPU is four times that of its plain form."""

OPERATOR = Operator(
    name="attention",
    equation="out_i = sum_j w_ij v_j, w_i = softmax over seen j of (c tanh(s q_i k_j / c) - m |p_i - j|)",
    source="Vaswani et al., arXiv:1706.03762; docs/ops-attention.md for the masks",
    reference=dense.attention,
    cases=cases,
    backends=(
        Backend(
            "eager",
            eager.attention,
            eager.supports,
            ran_on=("cpu",),
            kernels=("scaled_dot_product_flash_attention", "scaled_dot_product_attention"),
        ),
        Backend(
            "products",
            products.attention,
            products.supports,
            ran_on=("cpu",),
            kernels=("_AttentionByProducts",),
        ),
        Backend("dense", dense.attention, serves_all, ran_on=("cpu",), kernels=("softmax",)),
        Backend(
            "chunked",
            attention_chunked,
            serves_all,
            ran_on=("cpu",),
            kernels=("drivetrain::attention_chunked", "drivetrain::attention_backward"),
        ),
        Backend(
            "flex",
            flex.attention,
            flex.supports,
            ran_on=("cpu",),
            kernels=("flex_attention",),
        ),
        Backend(
            "triton",
            attention_triton,
            triton_launch.supports,
            library="triton",
            kernels=("drivetrain::attention_triton", "forward_kernel"),
        ),
        Backend(
            "flash_attn",
            flash_attn.attention,
            flash_attn.supports,
            library=f"flash_attn {flash_attn.installed() or '(not installed; mapped to the arguments of 2.8.3)'}",
            kernels=("flash_fwd", "flash_bwd"),
        ),
        transformer_engine.BACKEND,
        npu.BACKEND,
    ),
    factor=FACTOR,
    # Measured where products.supports says so; its page has the times.
    untuned={"cpu": ("products", "eager")},
)
