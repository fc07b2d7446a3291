"""Updated parameters on their way to the ranks that need them, while the next forward pass begins to compute.

All buckets start when the optimizer has stepped, in the order in which forward comes to need them. At that time neither
activations nor (at stage 2) gradients are there, so that their buffers do not make the peak higher. Whoever is about to
read a parameter waits for its bucket: the module says when (``before_use``), and a module that does not say waits for
all of them before its forward pass.

Nothing is read before it has arrived, so this changes no value.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import nn
from torch.profiler import record_function

from drivetrain.engine.parallel.sharded_update import Gathering, ShardedUpdate

__all__ = ["OVERLAPPED_GATHER", "OverlappedGather", "TellsUse"]

OVERLAPPED_GATHER = "drivetrain/gather/overlapped"
"""Span of a wait for a bucket that began to travel before the forward pass that reads it."""


@runtime_checkable
class TellsUse(Protocol):
    """A module that says which of its parts it is about to read parameters of.

    Attributes:
        before_use: called with a module before any of its own or its submodules' parameters is read, each time; None:
            nobody wants to know.
    """

    before_use: Callable[[nn.Module], None] | None


class OverlappedGather:
    """The buckets that are still under way.

    Args:
        update: starts and ends each of them.
        module: is trained; ``parameters`` are its own, as ``update`` numbers them.
    """

    def __init__(self, update: ShardedUpdate, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._update = update
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._bucket_of: dict[int, int] = {}
        self._travelling: dict[int, Gathering] = {}
        self._needs: dict[int, list[int]] = {}
        self.waits_before_forward = not isinstance(module, TellsUse)
        if isinstance(module, TellsUse):
            assert module.before_use is None, "somebody else is told already"
            module.before_use = self.need

    def lay_out(self, buckets: Sequence[Sequence[int]]) -> None:
        """What travels together, as :meth:`ShardedUpdate.lay_out`."""
        assert not self._travelling, "buckets are under way"
        self._bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
        self._needs = {}

    def start(self) -> None:
        """Send all rows of this rank on their way."""
        assert not self._travelling, "the former ones have not arrived"
        for number in self._update.order_of_use:
            self._travelling[number] = self._update.start(number)

    def need(self, module: nn.Module) -> None:
        """Return when all parameters of ``module`` have arrived."""
        if not self._travelling:
            return
        if id(module) not in self._needs:
            indices = [self._index_of.get(id(one)) for one in module.parameters()]
            found = {self._bucket_of[index] for index in indices if index is not None}
            self._needs[id(module)] = [number for number in self._update.order_of_use if number in found]
        self._arrive(self._needs[id(module)])

    def settle(self) -> None:
        """Return when everything has arrived."""
        self._arrive(self._update.order_of_use)

    def _arrive(self, numbers: Sequence[int]) -> None:
        pending = [number for number in numbers if number in self._travelling]
        if not pending:
            return
        with record_function(OVERLAPPED_GATHER):
            for number in pending:
                self._update.arrive(self._travelling.pop(number))
