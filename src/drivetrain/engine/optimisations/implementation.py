"""What the code that does an optimisation looks like, and what it works on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from drivetrain.config import RunConfig
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.devices import Device
from drivetrain.engine.model.decoder import Decoder

__all__ = ["Building", "Implementation", "Stage", "Status"]

Stage = Literal["choices", "model"]
"""When an optimisation is put into effect: before anything is built, by what it chooses for the build; or when the
model has its weights, by what it does to the model."""


@dataclass(frozen=True)
class Status:
    """What became of a request.

    Attributes:
        active: whether it is in effect.
        reason: why it is not, or what is to be known although it is; None otherwise.
    """

    active: bool
    reason: str | None = None


@dataclass
class Building:
    """A run of this rank while it is built. What no optimisation has chosen is the plain way of doing it.

    Attributes:
        config: the run; what it requests is not changed here.
        device: of this rank.
        num_ranks: processes of the run.
        compute_dtype: dtype of matrix products and activations.
        fused_update: whether the optimizer updates with one fused kernel.
        bucket_size_mb: gradients are reduced in buckets of this size (MB, 1e6 bytes); None: when backward has ended.
        num_workers: processes that build batches; 0: this one does.
        async_save: whether a thread writes checkpoints while training goes on.
        decoder: from the stage ``model`` on.
        loader: of the training batches, from the first step on.
    """

    config: RunConfig
    device: Device
    num_ranks: int
    compute_dtype: torch.dtype = torch.float32
    fused_update: bool = False
    bucket_size_mb: float | None = None
    num_workers: int = 0
    async_save: bool = False
    decoder: Decoder | None = None
    loader: BatchLoader | None = None


@dataclass(frozen=True)
class Implementation:
    """How the engine does what one entry of the catalogue describes. Nothing here is called unless it is requested
    and applies.

    Attributes:
        prepare: puts it into effect, or says why it cannot be; the run then goes on without it.
        stage: when ``prepare`` is called.
        at_start: looks again when the loader is there and the first step is about to begin; None: as prepared.
        at_end: looks again when steps were trained; None: as before.
    """

    prepare: Callable[[Building], Status]
    stage: Stage = "choices"
    at_start: Callable[[Building], Status] | None = None
    at_end: Callable[[Building], Status] | None = None
