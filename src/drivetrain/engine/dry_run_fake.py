"""One rank of a world that is not there: its model and one step over tensors without memory, under torch's fake group.

The run's own code does it all: the groups of the mesh, the model's build, the step. Collectives return at once and
change nothing, so values mean nothing; what is held and what is handed over is counted. A process can be one rank only,
because torch has one default group.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.config import RunConfig, layout_of
from drivetrain.config.derive import microbatches_per_rank
from drivetrain.engine.dry_run_formulas import Amount, Traffic
from drivetrain.engine.dry_run_world import choices_of
from drivetrain.engine.memory.recompute import Plan, Recomputation
from drivetrain.engine.memory.recompute_budget import budget_of, plan_of_run
from drivetrain.engine.memory.recompute_choice import plan_of_config
from drivetrain.engine.model.batch import whole_sequences
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.gradient_sync import GradientSync, Held
from drivetrain.engine.parallel.local_model import build_local_model
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.pipeline import CountedStage, Pipeline
from drivetrain.engine.parallel.process_group import ProcessGroup, Ranks
from drivetrain.engine.step import Stepper

__all__ = ["Counted", "FloatsAreFake", "Parts", "PipelineAlone", "count_rank", "fake_group"]

_CPU = torch.device("cpu")

Parts = tuple[tuple[str, tuple[int, ...], tuple[tuple[int, int], ...]], ...]
"""Of each parameter the name, the shape in a single process, and of each dimension the first index that is held and one
past the last."""


@dataclass(frozen=True)
class Counted:
    """What was built of one rank, and what its step did.

    Attributes:
        gradients: once reduced; None where no step was run.
        traffic: of the step; None where none was run.
        parts: of the parameters, between steps.
    """

    parameters: Amount
    gradients: Amount | None
    moments: Amount
    traffic: Traffic | None
    parts: Parts


def count_rank(config: RunConfig, world_size: int, rank: int, *, with_step: bool) -> Counted:
    """Build what ``rank`` of ``world_size`` processes would hold and, ``with_step``, run a step of it.

    To be called once in a process.
    """
    building = choices_of(config, world_size)
    repeated = _recomputed(config, world_size, rank)
    with fake_group(rank, world_size) as group:
        mesh = Mesh.form(layout_of(config, world_size), rank)
        with FloatsAreFake():
            local = build_local_model(config, mesh, _CPU, building, pipeline_type=PipelineAlone)
            sync, decoder = local.sync, local.decoder
            optimizer = build_optimizer(
                sync.updated(),
                config.optimizer,
                fused=building.fused_update,
                state_dtype=building.state_dtype,
            )
            if repeated is not None:
                Recomputation(decoder, repeated, stops_early=building.computes_in_one_piece)
            parameters = _amount(sync.parameters().values())
            moments = _amount(sync.moments(optimizer).values())
            parts = tuple(_part(name, held) for name, held in sync.parameters().items())
            if not with_step:
                return Counted(parameters, None, moments, None, parts)
            stepper = Stepper(
                decoder=decoder,
                sync=sync,
                optimizer=optimizer,
                group=group,
                mesh=mesh,
                device=_CPU,
                num_microbatches=microbatches_per_rank(config, mesh.size("dp")),
                # The norm is taken all the same. To scale by it would mean to look at its value.
                max_norm=0.0,
                pipeline=local.pipeline,
            )
            tokens = torch.zeros(
                (config.training.micro_batch_size, config.model.seq_length), dtype=torch.int64
            )
            gradients: list[Amount] = []
            stepper.step(
                repeat(whole_sequences(tokens)),
                config.optimizer.lr,
                stop_requested=False,
                on_gradients=lambda: gradients.append(_gradients(decoder, sync)),
            )
            return Counted(parameters, gradients[0], moments, dict(sync.traffic.take()), parts)


def _recomputed(config: RunConfig, world_size: int, rank: int) -> Plan | None:
    """What backward computes again, collectives included; None: nothing."""
    if config.memory.recompute_granularity == "none":
        return None
    if config.memory.recompute_granularity == "budget":
        return plan_of_run(config, world_size, rank, budget_of(config)).plan
    return plan_of_config(config.memory)


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[ProcessGroup]:
    """The group of all ranks, of which this one alone is there."""
    if world_size > 1:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    yield ProcessGroup(Ranks(rank=rank, world_size=world_size))
    if world_size > 1:
        dist.destroy_process_group()


_MAKERS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("empty", "empty_strided", "zeros", "ones", "full"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)


class FloatsAreFake(TorchDispatchMode):
    """Floating-point tensors that are made have no memory; whole numbers (tokens, borders, indices) are real.

    Values of whole numbers steer the program: borders of documents, the number of a micro-batch.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _MAKERS and self._makes_floats_here(args, kwargs):
            with self._fake:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _makes_floats_here(args: Any, kwargs: Any) -> bool:
        like = next((value for value in args if isinstance(value, Tensor)), None)
        if isinstance(like, FakeTensor):
            return False  # It makes another one by itself.
        dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
        device = kwargs.get("device") or (_CPU if like is None else like.device)
        return bool(dtype.is_floating_point) and torch.device(device).type == "cpu"


class _AgreeingStage(CountedStage):
    """A stage whose neighbours, which are not there, would agree with it on shapes: all of ours declare them."""

    def _warmup_forward_vote(self, *_: Any, **__: Any) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, *_: Any, **__: Any) -> Tensor:
        return torch.ones(1, dtype=torch.int32)


class PipelineAlone(Pipeline):
    """The pipeline of a rank whose neighbours are not there."""

    stage_type = _AgreeingStage
    early_stage_type = None

    def _assert_whole_model(self, decoder: Decoder) -> None:
        """The own part of it: nobody tells what the others have built."""
        held, wanted = tuple(decoder.blocks), self.plan.layers_on(self._rank)
        assert held == wanted, f"rank {self._rank} holds layers {held} and should hold {wanted}"


def _part(name: str, held: Held) -> tuple[str, tuple[int, ...], tuple[tuple[int, int], ...]]:
    slices = held.placement.slices()
    return name, held.placement.full_shape, tuple((part.start, part.stop) for part in slices)


def _amount(held: Iterable[Held]) -> Amount:
    """Elements of the tensors; bytes of their storages, each once and whole."""
    tensors = [one.tensor for one in held]
    return Amount(sum(tensor.numel() for tensor in tensors), _storage_bytes(tensors))


def _gradients(decoder: Decoder, sync: GradientSync) -> Amount:
    """Of what the optimizer updates; in bytes, those of the model's parameters that are still there besides."""
    updated = [held.tensor for held in sync.gradients().values()]
    of_parameters = [_local(value.grad) for value in decoder.parameters() if value.grad is not None]
    return Amount(sum(tensor.numel() for tensor in updated), _storage_bytes([*updated, *of_parameters]))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {
        storage._cdata: storage.nbytes() for storage in (value.untyped_storage() for value in tensors)
    }
    return sum(storages.values())
