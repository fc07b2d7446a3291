"""Gradients of a scaled loss: divided by the scale again, and looked through for what is not finite.

All ranks must come to one decision, or some would update weights and others wait. Where gradients are reduced over all
ranks one rank's infinity reaches every other; where a layout cuts the model (tensor and pipeline parallelism, shards)
it doesn't, so the answer is summed over all ranks of the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain.engine.parallel.gradient_sync import Held
from drivetrain.engine.parallel.process_group import ProcessGroup

__all__ = ["Overflow", "look_for_overflow"]


@dataclass(frozen=True)
class Overflow:
    """What any rank found.

    Attributes:
        found: an element of a gradient is infinite or not a number.
        finite_loss: the loss is a number on every rank.
    """

    found: bool
    finite_loss: bool


@torch.no_grad()
def look_for_overflow(
    gradients: Mapping[str, Held], loss_sum: Tensor, scale: float, group: ProcessGroup
) -> Overflow:
    """Divide ``gradients`` in place by ``scale``, and say whether any of any rank was not finite. Collective over the
    run, and the one place of a step where the host waits for the device.

    A scale that is a power of two changes no digit, but where a gradient falls below 2^-126.

    Args:
        gradients: reduced, of what this rank updates, fp32.
        loss_sum: of this rank's batches, a scalar.
    """
    found = torch.zeros((), dtype=torch.float32, device=loss_sum.device)
    tensors = [held.tensor for held in gradients.values() if held.tensor.numel()]
    if tensors:
        inverse = torch.full((), 1.0 / scale, dtype=torch.float32, device=loss_sum.device)
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, inverse)
    flags = torch.stack([found, (~loss_sum.isfinite()).to(found.dtype)])
    group.sum_(flags)
    of_gradients, of_losses = flags.tolist()
    return Overflow(found=of_gradients > 0, finite_loss=of_losses == 0)
