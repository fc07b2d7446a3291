"""Fused operators: who computes what a model is made of, and presets of it."""

from functools import cache
from types import MappingProxyType
from typing import Final, Literal, get_args

from pydantic import Field

from drivetrain.config.base import Section

__all__ = ["AUTO", "LEVELS", "OFF", "FusionConfig", "chosen_backend", "operator_fields"]

OFF: Final = "off"
"""The model's own code; the operator is not called."""
AUTO: Final = "auto"
"""What was tuned for a call, else what the operator prefers on the device."""


class FusionConfig(Section):
    """Fused operators."""

    level: Literal["off", "core", "all"] = "off"
    """What is `auto` without being named: `core` norms, rotary embedding, gated units and attention; `all` also the
    loss with its output matrix, and the products with weights."""
    rms_norm: (
        Literal[
            "off", "auto", "eager", "inductor", "triton", "liger", "flash_attn", "transformer_engine", "npu"
        ]
        | None
    ) = None
    """Backend of RMSNorm; `off`: the model's own code; `auto`: what was tuned, else the operator's preference.
    Absent: as `level` says. The same holds for all operators."""
    layer_norm: (
        Literal["off", "auto", "eager", "inductor", "triton", "liger", "flash_attn", "transformer_engine"]
        | None
    ) = None
    """Backend of LayerNorm."""
    add_rms_norm: (
        Literal[
            "off", "auto", "eager", "inductor", "triton", "liger", "flash_attn", "transformer_engine", "npu"
        ]
        | None
    ) = None
    """Backend of the residual's addition and the RMSNorm behind it, in the middle of each block."""
    add_layer_norm: Literal["off", "auto", "eager", "inductor", "triton", "flash_attn", "npu"] | None = None
    """Backend of the residual's addition and the LayerNorm behind it, in the middle of each block."""
    bias_dropout_add: Literal["off", "auto", "eager", "inductor"] | None = None
    """Backend of dropout and the residual's addition. Which elements are dropped is another draw than torch's: no level
    has it."""
    rotary: Literal["off", "auto", "eager", "inductor", "triton", "liger", "flash_attn", "npu"] | None = None
    """Backend of the rotary position embedding."""
    glu: (
        Literal["off", "auto", "eager", "inductor", "triton", "liger", "transformer_engine", "npu"] | None
    ) = None
    """Backend of the product of activated gate and up."""
    attention: (
        Literal[
            "off",
            "auto",
            "eager",
            "products",
            "dense",
            "chunked",
            "flex",
            "triton",
            "flash_attn",
            "transformer_engine",
            "npu",
        ]
        | None
    ) = None
    """Backend of attention."""
    linear_cross_entropy: (
        Literal[
            "off",
            "auto",
            "eager",
            "chunked",
            "in_place",
            "inductor",
            "liger",
            "flash_attn",
            "transformer_engine",
            "npu",
        ]
        | None
    ) = None
    """Backend of the output matrix with the loss."""
    qkv_product: Literal["off", "auto", "eager", "joined"] | None = None
    """Backend of the products for queries, keys and values."""
    gate_up_product: Literal["off", "auto", "eager", "joined"] | None = None
    """Backend of the products for gate and up."""
    linear: Literal["off", "auto", "eager", "transposed_gradient"] | None = None
    """Backend of all other products with a weight, but that of the output matrix."""
    allow_fallback: bool = False
    """Where a backend named here cannot serve a call, `eager` serves and the run says so. Off: the run ends."""
    tuned_file: str | None = Field(default=None, min_length=1, examples=["ops.tuned.toml"])
    """What `drivetrain ops tune` found. Absent: the file of this machine, where there is one."""
    compile: bool = False
    """Compile each transformer block with torch.compile (the first step takes longer)."""


_CORE = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "rotary", "glu", "attention")
LEVELS = MappingProxyType(
    {
        "off": frozenset[str](),
        "core": frozenset(_CORE),
        "all": frozenset({*_CORE, "linear_cross_entropy", "qkv_product", "gate_up_product", "linear"}),
    }
)
"""Operators that a level makes ``auto`` where nothing else is said of them."""


@cache
def operator_fields() -> tuple[str, ...]:
    """The fields that name an operator's backend, which are the operators' names."""
    # Of all fields they alone may be ``auto``.
    return tuple(
        name
        for name, field in FusionConfig.model_fields.items()
        if any(AUTO in get_args(kind) for kind in get_args(field.annotation))
    )


def chosen_backend(fusion: FusionConfig, operator: str) -> str:
    """``off``, ``auto`` or a backend's name: what the operator's field says, else the level."""
    named: str | None = getattr(fusion, operator)
    if named is not None:
        return named
    return AUTO if operator in LEVELS[fusion.level] else OFF
