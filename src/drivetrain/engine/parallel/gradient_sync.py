"""What the loop asks of data parallelism, whatever the ZeRO stage: one protocol, and what it speaks in.

The gradient of a step is that of the summed loss over the valid tokens of the *global* batch. Each rank differentiates
its own part of it, so gradients are summed over data-parallel ranks, never averaged.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.timing import Mark

__all__ = ["GradientSync", "Held", "kept_buffers"]


@dataclass(frozen=True)
class Held:
    """A tensor of this rank, and where its values lie in the tensor a single process would hold."""

    tensor: Tensor
    placement: Placement


def kept_buffers(module: nn.Module) -> list[str]:
    """Names of the buffers that a checkpoint would keep. Others are tables, which every rank makes alike."""
    return sorted(module.state_dict().keys() & dict(module.named_buffers()).keys())


class GradientSync(Protocol):
    """Sums gradients over data-parallel ranks, and keeps parameters equal on those that replicate them.

    One step is::

        for batch in micro_batches:
            with sync.micro_batch(last=...):
                (decoder.loss_sum(batch) / valid_tokens_of_the_global_batch).backward()
        sync.finish()
        ...  # clip sync.gradients() in place
        sync.step(optimizer)

    The optimizer is built over :meth:`updated`. Where something else runs the backward passes of a whole step (a
    pipeline schedule), all of it goes into one ``micro_batch(last=False)``: nothing travels before :meth:`finish`.
    """

    traffic: Traffic

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch. Gradients travel with the last one, or with each."""

    def finish(self) -> None:
        """Start whatever has not been started, and return when all gradients are reduced."""

    def wire_error(self) -> float | None:
        """How far the first reduction of this run was from one in full precision, ``‖g - g0‖ / ‖g0‖`` over all
        parameters; None where gradients travel as they are, or nothing was reduced yet. Collective
        where it is not None."""

    def settle(self) -> None:
        """Return when the parameters are those of the latest step: they may still be on their way to this rank. Needed
        before anything reads them but the module's own forward pass; :meth:`parameters` does it."""

    def exposed_wait(self) -> tuple[Mark, Mark] | None:
        """Two marks whose distance is the time for which the latest step had nothing to do but wait for gradients;
        None where it is not known, or where there is nobody to wait for."""

    def updated(self) -> Sequence[tuple[str, nn.Parameter]]:
        """What the optimizer of this rank updates, by global name: parameters, or this rank's rows of them."""

    def placements(self) -> Mapping[str, Placement]:
        """Where the tensors of :meth:`updated`, and so their gradients and moments, lie."""

    def gradients(self) -> Mapping[str, Held]:
        """The reduced gradients of :meth:`updated`, plain tensors. Valid from ``finish`` to ``step``; scaling them in
        place (clipping) scales what the optimizer sees."""

    def parameters(self) -> Mapping[str, Held]:
        """The parameters as this rank holds them between steps, plain tensors (no copies). Writing into them changes
        the model."""

    def moments(self, optimizer: torch.optim.Optimizer) -> Mapping[str, Held]:
        """The tensors of the optimizer's state that have a parameter's shape, plain and without copies, as
        ``<parameter name>/<key>``."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update, bring the updated parameters to the ranks that need them, and drop the gradients."""

    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients: ``step`` for a step that changes nothing. No communication; all ranks or none."""
