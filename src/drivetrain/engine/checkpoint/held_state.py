"""What a rank holds of a run's weights and optimizer state, by global name, and where it lies in the whole."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drivetrain.engine.memory.offload_optimizer import OffloadedAdamW
from drivetrain.engine.optimizer import optimizer_state
from drivetrain.engine.parallel.gradient_sync import GradientSync, Held
from drivetrain.engine.parallel.placement import Placement

__all__ = ["HeldState", "held_state", "whole_state", "whole_weights"]


@dataclass(frozen=True)
class HeldState:
    """This rank's part of a run's tensors, without copies.

    Attributes:
        weights: by the names of a single process' decoder.
        optimizer: as ``<parameter>/exp_avg``, ``<parameter>/exp_avg_sq`` (parts of the parameter's shape) and
            ``<parameter>/step`` (whole, of shape ()).
    """

    weights: Mapping[str, Held]
    optimizer: Mapping[str, Held]


def held_state(sync: GradientSync, optimizer: torch.optim.Optimizer) -> HeldState:
    """What this rank holds, whatever the layout: as its data parallelism tells it."""
    if isinstance(optimizer, OffloadedAdamW):
        optimizer.settle()
    steps = {
        f"{name}/step": Held(_plain(optimizer.state[parameter]["step"]), Placement(()))
        for name, parameter in sync.updated()
    }
    return HeldState(sync.parameters(), {**sync.moments(optimizer), **steps})


def whole_state(decoder: nn.Module, optimizer: torch.optim.AdamW) -> HeldState:
    """The state of a model that this rank holds whole."""
    return HeldState(whole_weights(decoder), _whole(optimizer_state(optimizer)))


def whole_weights(decoder: nn.Module) -> Mapping[str, Held]:
    """The weights of a model that this rank holds whole."""
    return _whole(dict(_parameters(decoder)))


def _parameters(decoder: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in decoder.named_parameters():
        yield name, parameter.data


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Held]:
    return {name: Held(tensor, Placement(tuple(tensor.shape))) for name, tensor in tensors.items()}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
