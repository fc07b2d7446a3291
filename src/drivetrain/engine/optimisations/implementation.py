"""What the code that does an optimisation looks like, and what it works on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from drivetrain.config import RunConfig
from drivetrain.engine.compilation import CompilationWatch
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.devices import Device
from drivetrain.engine.memory.offload_activations import ActivationOffload
from drivetrain.engine.memory.offload_copies import CopyEngine
from drivetrain.engine.memory.offload_embedding import EmbeddingOffload
from drivetrain.engine.memory.offload_optimizer import StateOffload
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.parts import Part
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.optimisations.service import Service
from drivetrain.engine.parallel.fused_calls import FusedCalls
from drivetrain.engine.parallel.tensor_parallel_overlap import WHOLE, Chunks, TunedChunks
from drivetrain.measure.flops import RepeatedLayers

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
        served: calls by backend, of an operator, on all ranks together.
    """

    active: bool
    reason: str | None = None
    served: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Building:
    """A run of this rank while it is built. What no optimisation has chosen is the plain way of doing it.

    Attributes:
        config: the run; what it requests is not changed here.
        device: of this rank.
        num_ranks: processes of the run.
        local_world_sizes: how many processes the machines have, each number once; empty: all are on one.
        compute_dtype: dtype of matrix products and activations.
        fused_update: whether the optimizer updates with one fused kernel.
        state_dtype: of the optimizer's moments between updates.
        tp_chunks: into how many pieces the collectives of tensor-parallel layers are cut.
        tuned_chunks: what was tuned of that; None: nothing was looked at.
        tp_async_input_gradient: whether gradients of their input travel while those of weights are computed.
        fused_calls: counts those of the fused operators of tensor-parallel layers; None: they are not used.
        bucket_size_mb: gradients are reduced in buckets of this size (MB, 1e6 bytes); None: when backward has ended.
        wire_dtype: that gradients have while they travel between data-parallel ranks; None: their own.
        overlap_param_gather: whether updated parameters travel while the next forward pass begins.
        prefetch_blocks: blocks whose shards are gathered ahead of their use; 0: each when it is used.
        ranks_per_host: data parallelism communicates in levels, over machines of this many ranks; None: in one.
        num_workers: processes that build batches; 0: this one does.
        prefetch_batches: micro-batches that a thread builds ahead, where there are no workers; 0: none.
        sample_cache: folder and bound (bytes) of finished sequences that are kept; None: none are.
        recomputed: of each layer of the model what a budget has backward compute again, None: all; None: no budget has.
        repeated: layers whose products backward computes again, in the whole model.
        async_save: whether a thread writes checkpoints while training goes on.
        offload: copies between device and host memory; None: nothing is offloaded.
        state_offload: the share of the optimizer's state that lives on the host; None: none does.
        embedding_offload: holds the input embedding on the host; None: it is where the other parameters are.
        activation_offload: of the first layers, from the stage ``model`` on; None: there is none.
        operators: who computes what the model is made of.
        service: what all ranks have counted of that; None until the end, or where this rank's own count is all.
        compilation: watches what torch.compile does; None: nothing is to be compiled.
        decoder: from the stage ``model`` on.
        loader: of the training batches, from the first step on.
    """

    config: RunConfig
    device: Device
    num_ranks: int
    local_world_sizes: frozenset[int] = frozenset()
    compute_dtype: torch.dtype = torch.float32
    fused_update: bool = False
    state_dtype: torch.dtype = torch.float32
    tp_chunks: Chunks = WHOLE
    tuned_chunks: TunedChunks | None = None
    tp_async_input_gradient: bool = False
    fused_calls: FusedCalls | None = None
    bucket_size_mb: float | None = None
    wire_dtype: torch.dtype | None = None
    overlap_param_gather: bool = False
    prefetch_blocks: int = 0
    ranks_per_host: int | None = None
    num_workers: int = 0
    prefetch_batches: int = 0
    sample_cache: tuple[Path, int] | None = None
    recomputed: Mapping[str, frozenset[Part] | None] | None = None
    repeated: RepeatedLayers = field(default_factory=RepeatedLayers)
    async_save: bool = False
    offload: CopyEngine | None = None
    state_offload: StateOffload | None = None
    embedding_offload: EmbeddingOffload | None = None
    activation_offload: ActivationOffload | None = None
    operators: Selection = field(default_factory=Selection)
    service: Service | None = None
    compilation: CompilationWatch | None = None
    decoder: Decoder | None = None
    loader: BatchLoader | None = None

    def copies(self) -> CopyEngine:
        """What copies between device and host memory: one for all that is offloaded."""
        if self.offload is None:
            self.offload = CopyEngine(self.device.torch_device)
        return self.offload

    @property
    def computes_in_one_piece(self) -> bool:
        """Whether no collective of a layer is under way while another part of it is computed."""
        return self.tp_chunks == WHOLE and not self.tp_async_input_gradient

    @property
    def decoder_is_compiled(self) -> bool:
        """Whether its blocks run in code of torch.compile, which counts no calls of operators."""
        return self.decoder is not None and self.decoder.blocks_are_compiled


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
