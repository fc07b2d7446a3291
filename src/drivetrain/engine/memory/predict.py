"""Live bytes of a step by category before anything is run: one rank's own code over tensors without memory.

The model, the data parallelism, the optimizer and the step are the run's own (:mod:`drivetrain.engine.dry_run_fake`);
floating-point tensors have no memory, and collectives return at once. The first step is thrown away: buckets are cut
and state is made in it. The second stands for the steady state.

Nothing here is used to measure: that is ``measured.py``, and the arithmetic of ``measure/memory_events.py``.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed.tensor import DTensor

from drivetrain.config import RunConfig, layout_of
from drivetrain.config.derive import microbatches_per_rank
from drivetrain.engine.devices import Device
from drivetrain.engine.dry_run_fake import FloatsAreFake, PipelineAlone, fake_group
from drivetrain.engine.memory.predict_count import Change, LayerNames, Storage, StorageLog
from drivetrain.engine.memory.recompute_budget import budget_of, plan_of_run
from drivetrain.engine.model.batch import Batch
from drivetrain.engine.operators_of_run import tuned_file_of
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.optimisations.implementation import Building
from drivetrain.engine.optimisations.in_effect import Optimisations
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.local_model import LocalModel, build_local_model
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.step import Stepper
from drivetrain.errors import ConfigurationError
from drivetrain.measure.memory import CATEGORIES, MemoryByCategory, timeline_of

__all__ = ["batch_of_borders", "predict_memory", "whole_rows"]

_CPU = torch.device("cpu")

Borders = Sequence[int]
"""Of the documents of one micro-batch: from 0 to all of its tokens."""


def predict_memory(
    config: RunConfig,
    world_size: int = 1,
    rank: int = 0,
    *,
    documents: Sequence[Borders] | None = None,
    left_out: frozenset[str] = frozenset(),
) -> MemoryByCategory:
    """What ``rank`` of ``world_size`` processes holds during a step. With several to be called once in a process.

    Args:
        config: the rules must hold.
        documents: borders of the documents in each micro-batch of a step; rows of one document each where absent.
        left_out: categories whose owner is not asked: what belongs to them is then counted as something else, or not at
            all. For tests that a wrong prediction shows.

    Raises:
        ConfigurationError: the step of this configuration cannot be taken without memory.
    """
    eager = _all_on_device(_without_compile(config))
    building = Building(
        config=eager,
        device=Device("cpu", "dry run", _CPU, 1),
        num_ranks=world_size,
        operators=Selection(allow_fallback=eager.fusion.allow_fallback),
    )
    if eager.memory.recompute_granularity == "budget":
        building.recomputed = plan_of_run(eager, world_size, rank, budget_of(eager)).choices
    optimisations = Optimisations(building)
    optimisations.prepare("choices")
    with fake_group(rank, world_size) as group:
        mesh = Mesh.form(layout_of(eager, world_size), rank)
        with FloatsAreFake():
            local = build_local_model(eager, mesh, _CPU, building, pipeline_type=PipelineAlone)
            optimizer = build_optimizer(
                local.sync.updated(),
                eager.optimizer,
                fused=building.fused_update,
                state_dtype=building.state_dtype,
            )
            _make_steps_real(optimizer)
            building.decoder = local.decoder
            optimisations.prepare("model")
            num_microbatches = microbatches_per_rank(eager, mesh.size("dp"))
            stepper = Stepper(
                decoder=local.decoder,
                sync=local.sync,
                optimizer=optimizer,
                group=group,
                mesh=mesh,
                device=_CPU,
                num_microbatches=num_microbatches,
                # The norm is taken all the same. To scale by it would mean to look at its value.
                max_norm=0.0,
                pipeline=local.pipeline,
            )
            borders = documents or [whole_rows(eager)] * num_microbatches
            assert len(borders) == num_microbatches, (
                f"{num_microbatches} micro-batches, {len(borders)} borders"
            )
            log = _count(
                stepper, local, optimizer, [batch_of_borders(eager, one) for one in borders], left_out
            )
    return _record(log, rank, world_size, _not_counted(config, world_size, documents is not None))


def whole_rows(config: RunConfig) -> list[int]:
    """The borders of a micro-batch whose rows are one document each."""
    length = config.model.seq_length
    return list(range(0, config.training.micro_batch_size * length + 1, length))


def batch_of_borders(config: RunConfig, borders: Borders) -> Batch:
    """A micro-batch of zeros with these documents, all of whose tokens carry loss."""
    shape = (config.training.micro_batch_size, config.model.seq_length)
    lengths = [last - first for first, last in pairwise(borders)]
    positions = torch.cat([torch.arange(length) for length in lengths]).view(shape)
    return Batch(
        token_ids=torch.zeros(shape, dtype=torch.int64),
        labels=torch.zeros(shape, dtype=torch.int64),
        loss_mask=torch.ones(shape, dtype=torch.bool),
        position_ids=positions,
        cu_seqlens=torch.tensor(list(borders), dtype=torch.int32),
        num_valid_tokens=shape[0] * shape[1],
        sum_squared_lengths=sum(length**2 for length in lengths),
    )


def _without_compile(config: RunConfig) -> RunConfig:
    """Compiled code is not seen: its blocks are run eagerly."""
    return config.model_copy(update={"fusion": config.fusion.model_copy(update={"compile": False})})


def _all_on_device(config: RunConfig) -> RunConfig:
    """Tensors without memory cannot be copied to the host: what is offloaded is counted where it is not."""
    stays = {"cpu_offloading_num_layers": 0, "optimizer_offload_fraction": 0.0, "offload_embedding": False}
    return config.model_copy(update={"memory": config.memory.model_copy(update=stays)})


def _count(
    stepper: Stepper,
    local: LocalModel,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    left_out: frozenset[str],
) -> StorageLog:
    """Two steps, of which the second is noted."""
    layers = LayerNames()
    log = StorageLog(layers, saved="activations" not in left_out)
    try:
        stepper.step(iter(batches), 1e-4, stop_requested=False)
        with (
            _without_garbage(),
            layers.watching(dict(local.decoder.blocks)),
            log,
            _owners(log, local, optimizer, left_out),
        ):
            with ExitStack() as phases:
                phases.enter_context(log.phase("forward"))
                stepper.step(
                    iter(batches),
                    1e-4,
                    stop_requested=False,
                    on_gradients=lambda: phases.enter_context(log.phase("optimizer")),
                )
            # Gathers that the next forward pass would wait for.
            local.sync.settle()
    except DataDependentOutputException as error:
        raise ConfigurationError(
            f"the memory of this configuration cannot be predicted: {error.func} looks at values, and tensors without "
            "memory have none; measure it: drivetrain memory CONFIG --measure"
        ) from error
    return log


@contextmanager
def _without_garbage() -> Iterator[None]:
    """The collector would end storages at instants of its own; the training loop switches it off, too."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _make_steps_real(optimizer: torch.optim.Optimizer) -> None:
    """Without a fused kernel the number of the update is read on the host."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not group["fused"] and "step" in state:
                state["step"] = torch.from_numpy(np.zeros((), dtype=np.float32))


@contextmanager
def _owners(
    log: StorageLog, local: LocalModel, optimizer: torch.optim.Optimizer, left_out: frozenset[str]
) -> Iterator[None]:
    """Tell ``log`` whose storages are whose: those that are there, and gradients as they arrive."""
    decoder = local.decoder
    if "parameters" not in left_out:
        held = [one.tensor for one in local.sync.parameters().values()]
        updated = [parameter for _, parameter in local.sync.updated()]
        for tensor in (*held, *updated, *decoder.buffers()):
            log.know("parameters", _plain(tensor), existed=True)
    if "optimizer" not in left_out:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    log.know("optimizer", _plain(value), existed=True)

    def gradient_is_there(parameter: Tensor) -> None:
        # It may be on its way to other ranks already.
        if parameter.grad is not None:
            log.know("gradients", _plain(parameter.grad), existed=True)

    def update_begins(*_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient_is_there(parameter)

    with ExitStack() as hooks:
        if "gradients" not in left_out:
            for parameter in decoder.parameters():
                hooks.callback(parameter.register_post_accumulate_grad_hook(gradient_is_there).remove)
            hooks.callback(optimizer.register_step_pre_hook(update_begins).remove)
        yield


def _plain(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _not_counted(config: RunConfig, world_size: int, documents_known: bool) -> tuple[str, ...]:
    lines = [
        "batches of tokens, which come from the loader",
        "what a kernel allocates and frees inside one operator",
    ]
    if not documents_known:
        lines.append("borders inside of rows: each row is taken for one document")
    if config.fusion.compile:
        lines.append(
            "compiled code: blocks are counted as they run eagerly, with what it fuses away and without its own buffers"
        )
    memory = config.memory
    if memory.cpu_offloading_num_layers or memory.optimizer_offload_fraction or memory.offload_embedding:
        lines.append("offload: what it moves is counted as if it stayed on the device")
    if config.run.device == "cuda":
        lines.append("operators of a CUDA device where they save other tensors than those of a CPU")
    if world_size > 1:
        lines.append("buffers inside of the communication library")
    place = tuned_file_of(config)
    if place is not None and place.is_read:
        lines.append(f"choices of {place.path}: operators are those that serve where nothing was tuned")
    return tuple(lines)


def _record(log: StorageLog, rank: int, world_size: int, not_counted: tuple[str, ...]) -> MemoryByCategory:
    """The peaks and the course of what was noted."""
    changes = [change for change in log.changes if _is_counted(change.storage)]
    begun: set[int] = set()
    live: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    later: list[Change] = []
    for change in changes:
        # What existed was there from the beginning, whenever an operator first read it.
        if change.storage.existed and id(change.storage) not in begun:
            live[change.storage.category] += change.delta
        else:
            later.append(change)
        begun.add(id(change.storage))
    layers: dict[str, int] = {}
    own_peaks, at_peak, peak, by_layer = dict(live), dict(live), sum(live.values()), layers
    phase, after = "between steps", "nothing"
    instants: list[tuple[float, str, tuple[int, ...]]] = [(0.0, phase, tuple(live.values()))]
    for number, change in enumerate(later, start=1):
        category = change.storage.category
        live[category] += change.delta
        if category == "activations":
            layers[change.storage.layer] = layers.get(change.storage.layer, 0) + change.delta
        if live[category] > own_peaks[category]:
            own_peaks[category] = live[category]
            if category == "activations":
                by_layer = {name: held for name, held in layers.items() if held}
        total = sum(live.values())
        if total > peak:
            peak, at_peak, phase, after = total, dict(live), change.phase, change.operator
        instants.append((float(number), change.phase, tuple(live.values())))
    return MemoryByCategory(
        rank=rank,
        world_size=world_size,
        source="predicted",
        peak_bytes=peak,
        at_peak=at_peak,
        own_peaks=own_peaks,
        phase=phase,
        peak_after=after,
        by_layer=_in_order(by_layer),
        timeline=timeline_of("allocations", instants, float(len(later) + 1)),
        not_counted=not_counted,
    )


def _is_counted(storage: Storage) -> bool:
    """What was there before the step and belongs to nobody is the batch, or the like."""
    return not storage.existed or storage.known is not None


def _in_order(by_layer: Mapping[str, int]) -> dict[str, int]:
    """Embedding, layers by number, output."""

    def place(name: str) -> tuple[int, int, str]:
        kind, _, number = name.partition(" ")
        if kind == "layer" and number.isdigit():
            return (1, int(number), name)
        return (0 if name == "embedding" else 2, 0, name)

    return {name: by_layer[name] for name in sorted(by_layer, key=place)}
