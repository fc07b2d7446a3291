"""ZeRO stage 3 by FSDP2: parameters, gradients and moments are cut by rows over the ranks of ``dp_shard``.

Each block is a unit: its parameters are gathered before it runs and dropped after. What is left (embeddings, final
norm, output) is one more unit, which stays gathered from the beginning of forward to the end of backward. Over
``dp_replicate`` the gradients of equal shards are summed (HSDP).

Four habits of FSDP2 are undone or used here: it averages gradients, and ours are sums; it takes ``forward`` alone for a
forward; after a forward without backward its root stays gathered; and what it communicates it tells nobody.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from drivetrain.engine.parallel.buckets import rows_of_part
from drivetrain.engine.parallel.gradient_sync import Held, kept_buffers
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.placement import Placement, Shard
from drivetrain.engine.parallel.sharded_collectives import ShardGather, ShardReduction
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.parallel.wire import WireError
from drivetrain.engine.timing import Mark

__all__ = ["FullySharded"]


class FullySharded:
    """Stage 3 over plain parameters, which become this rank's rows of them."""

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        mesh: Mesh,
        placements: Mapping[str, Placement],
        traffic: Traffic,
        *,
        stages: Sequence[tuple[nn.Module, Sequence[nn.Module]]] = (),
        forward_methods: Sequence[str] = ("loss_sum",),
        reduce_each_micro_batch: bool = False,
        wire_dtype: torch.dtype | None = None,
        prefetch_blocks: int = 0,
    ) -> None:
        """
        Args:
            module: its parameters are plain and of one dtype. Build the optimizer afterwards.
            blocks: submodules that are units of their own, in the order of use.
            placements: of its parameters over the other dimensions (tensor parallelism ...); whole where absent.
            stages: where a pipeline schedule runs parts of the module instead of the module: each part with the blocks
                in it. They share submodules with it, and no parameter with each other. Under a zero-bubble schedule
                the pipeline keeps them gathered during a step.
            forward_methods: methods besides ``forward`` by which the module is entered. No two of them may call each
                other.
            reduce_each_micro_batch: gradients travel with each micro-batch, so that whole ones never outlive it.
            wire_dtype: that gradients have while they travel between the ranks of ``dp_shard``; None: their own.
            prefetch_blocks: blocks that are gathered ahead of the one that computes, in forward and in backward; above
                0, gradients on a CPU travel behind backward too. Not where a schedule runs the module.
        """
        assert mesh.size("dp_shard") > 1, "there is nothing to shard"
        named = [
            (name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad
        ]
        assert not kept_buffers(module), "buffers are not kept equal over the ranks"
        self.traffic = traffic
        self._module = module
        self._names = [name for name, _ in named]
        self._each = reduce_each_micro_batch
        self._placements = {
            name: _cut_by_rows(placements.get(name, Placement(tuple(parameter.shape))), parameter, mesh)
            for name, parameter in named
        }
        self._scheduled = bool(stages)
        hybrid = mesh.size("dp_replicate") > 1
        assert not (prefetch_blocks and stages), "a schedule decides when a block is used"
        self._error = None if wire_dtype is None else WireError()
        self._shard_group = mesh.group("dp_shard")
        shards = mesh.counted("dp_shard", traffic)
        self._gather = ShardGather(shards, ahead=prefetch_blocks > 0)
        self._reduction = ShardReduction(
            shards,
            # Sums over replicas, and sums of several micro-batches, are made of the result at once.
            behind=prefetch_blocks > 0 and not hybrid and not reduce_each_micro_batch,
            wire_dtype=wire_dtype,
            error=self._error,
        )
        self._roots: list[FSDPModule] = []
        self._units: list[FSDPModule] = []
        device_mesh = mesh.submesh("dp_replicate", "dp_shard")
        for root, inner in stages or [(module, blocks)]:
            assert not any(isinstance(value, DTensor) for value in root.parameters()), (
                "two stages of this rank share a parameter, which cannot belong to both: a tied embedding whose both "
                "ends are on one rank"
            )
            for block in inner:
                fully_shard(block, mesh=device_mesh, reshard_after_forward=True)
            fully_shard(root, mesh=device_mesh, reshard_after_forward=False)
            assert isinstance(root, FSDPModule)
            self._roots.append(root)
            for unit in root.modules():
                if isinstance(unit, FSDPModule):
                    self._set_up(unit, hybrid=hybrid)
        if not stages:
            for method in forward_methods:
                register_fsdp_forward_method(module, method)
        if prefetch_blocks:
            _prefetch(self._roots[0], blocks, prefetch_blocks)

    def _set_up(self, unit: FSDPModule, *, hybrid: bool) -> None:
        """Each of these settings is that of one unit, not of the units in it."""
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_custom_all_gather(self._gather)  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(self._reduction)  # type: ignore[arg-type]
        self._units.append(unit)
        if hybrid:
            unit.set_all_reduce_hook(self._count_all_reduce)

    def _count_all_reduce(self, share: Tensor) -> None:
        self.traffic.record("dp_replicate", "all_reduce", share.nbytes)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch, or of all those that a schedule runs."""
        if not self._scheduled:
            for root in self._roots:
                root.set_requires_gradient_sync(last or self._each)
                root.set_is_last_backward(last)
        yield

    def finish(self) -> None:
        """Backward has waited for its reductions itself; what is left is to drop gathered parameters.

        The last micro-batch must have been announced as such: FSDP2 reduces in backward, never after it. A pipeline
        schedule does the announcing for its stages.
        """
        self._reduction.settle()
        self._reshard()

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def wire_error(self) -> float | None:
        """See :meth:`GradientSync.wire_error`."""
        return None if self._error is None else self._error.relative(self._shard_group)

    def settle(self) -> None:
        """They are: what a block needs is gathered when it is used."""

    def exposed_wait(self) -> tuple[Mark, Mark] | None:
        """Not known: FSDP2 waits inside backward, unit by unit."""
        return None

    def updated(self) -> Sequence[tuple[str, nn.Parameter]]:
        """The sharded parameters (DTensors), in the order of the module."""
        self._reshard()
        by_name = dict(self._module.named_parameters())
        return [(name, by_name[name]) for name in self._names]

    def placements(self) -> Mapping[str, Placement]:
        """Of parameters, gradients and moments alike."""
        return self._placements

    def gradients(self) -> Mapping[str, Held]:
        """This rank's rows."""
        found = {}
        for name, parameter in self.updated():
            assert parameter.grad is not None, f"{name} has no gradient"
            found[name] = Held(_local(parameter.grad), self._placements[name])
        return found

    def parameters(self) -> Mapping[str, Held]:
        """This rank's rows."""
        return {
            name: Held(_local(parameter.data), self._placements[name]) for name, parameter in self.updated()
        }

    def moments(self, optimizer: torch.optim.Optimizer) -> Mapping[str, Held]:
        """This rank's rows."""
        return {
            f"{name}/{key}": Held(
                _local(value) if isinstance(value, DTensor) else value, self._placements[name]
            )
            for name, parameter in self.updated()
            for key, value in optimizer.state[parameter].items()
            # On the host there are plain tensors: the rows themselves.
            if value.shape in (parameter.shape, _local(parameter.data).shape)
        }

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update and drop the gradients; the next forward gathers."""
        optimizer.step()
        self.skip(optimizer)

    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients."""
        optimizer.zero_grad(set_to_none=True)


def _prefetch(root: FSDPModule, blocks: Sequence[nn.Module], count: int) -> None:
    """Have each block ask for the ``count`` that are used after it, forward and backward, before it computes itself."""
    units: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    assert len(units) == len(blocks), "a block is a unit"
    root.set_modules_to_forward_prefetch(units[:count])
    root.set_modules_to_backward_prefetch(list(reversed(units[-count:])))
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + count])
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, place - count) : place])))


def _cut_by_rows(whole: Placement, parameter: Tensor, mesh: Mesh) -> Placement:
    first, count = rows_of_part(parameter.shape[0], mesh.index("dp_shard"), mesh.size("dp_shard"))
    cut = Shard("dp_shard", 0, whole.slices()[0].start + first, count)
    return whole.cut(cut).replicated_over("dp_replicate")


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
