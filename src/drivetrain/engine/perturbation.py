"""A run from almost the same weights: what rounding alone does to a run is measured by disturbing it that little."""

from collections.abc import Mapping

import torch
from torch import Tensor

from drivetrain.engine.model.initialization import parameter_generator
from drivetrain.engine.parallel.gradient_sync import Held

__all__ = ["perturb_weights", "unit_in_the_last_place"]


def unit_in_the_last_place(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance from each value to the next larger magnitude in ``dtype``, in the values' own dtype and shape.

    ``2**floor(log2(|x|)) * eps``; 0 for 0, whose neighbours are too small to matter anywhere.
    """
    _, exponent = torch.frexp(values)
    # frexp's mantissa lies in [0.5, 1), so that the binade starts at 2**(exponent - 1).
    distance = torch.ldexp(torch.full_like(values, torch.finfo(dtype).eps), exponent - 1)
    return torch.where(values == 0, torch.zeros_like(distance), distance)


def perturb_weights(parameters: Mapping[str, Held], seed: int, dtype: torch.dtype) -> None:
    """Move every weight, in place, by one unit in the last place of ``dtype``, up or down at random.

    ``dtype`` is the compute dtype: kernels of another kind round activations at it, and a step of the fp32 masters
    would vanish when they are cast. The signs depend on ``seed`` and the parameter's name alone: the same on every
    rank, device and layout. A weight of 0 stays 0.
    """
    with torch.no_grad():
        for name, held in parameters.items():
            generator = parameter_generator(seed, f"perturbation/{name}")
            up = torch.randint(2, held.placement.full_shape, generator=generator, dtype=torch.int8)
            values = held.tensor
            sign = (2 * up[held.placement.slices()] - 1).to(values.device, values.dtype)
            values.add_(sign * unit_in_the_last_place(values, dtype))
