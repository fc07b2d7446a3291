"""Rotary position embedding in the half-split layout, with the Llama-3 scaling of its frequencies.

Su et al., RoFormer, arXiv:2104.09864; the scaling is that of Llama 3.1 (arXiv:2407.21783, section 3.4.1, and
its reference code). Feature i is paired with feature i + K/2, the layout of Hugging Face folders.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain.config.model import ModelConfig

__all__ = ["Rotation", "inverse_frequencies", "rotate", "rotation"]


class Rotation(NamedTuple):
    """Cosine and sine of each token's angles, (T, 1, K/2) each, in the compute dtype."""

    cosine: Tensor
    sine: Tensor


def inverse_frequencies(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Radians per position of each feature pair, (K/2,) in ``dtype``."""
    size = model.head_size
    assert size % 2 == 0, f"rotary embedding needs an even head width, got {size}"
    exponents = torch.arange(0, size, 2, device=device, dtype=torch.int64).to(dtype) / size
    frequencies = 1.0 / model.rotary_base**exponents
    if not model.use_rope_scaling:
        return frequencies
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    assert low < high, f"rope_scaling_low_freq_factor {low} is not below the high one, {high}"
    context = model.rope_scaling_original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    slowed = frequencies / model.rope_scaling_factor
    blend = (context / wavelengths - low) / (high - low)
    between = (1 - blend) * slowed + blend * frequencies
    scaled = torch.where(wavelengths > context / low, slowed, between)
    return torch.where(wavelengths < context / high, frequencies, scaled)


def rotation(model: ModelConfig, position_ids_T: Tensor, dtype: torch.dtype) -> Rotation:
    """The rotation of tokens at ``position_ids_T`` (T,) int64; angles in fp32 (fp64 for fp64)."""
    angle_dtype = torch.promote_types(dtype, torch.float32)
    frequencies = inverse_frequencies(model, position_ids_T.device, angle_dtype)
    angles = position_ids_T.to(angle_dtype)[:, None, None] * frequencies
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x_THK: Tensor, by: Rotation) -> Tensor:
    """Rotate each feature pair of each head by its token's angle; same shape and dtype, a new tensor."""
    # chunk, not slices: the backward of chunk is one concatenation, that of slices two zero-filled tensors.
    first, second = x_THK.chunk(2, dim=-1)
    return torch.cat((first * by.cosine - second * by.sine, second * by.cosine + first * by.sine), dim=-1)
