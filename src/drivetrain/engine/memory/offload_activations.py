"""Activations of the first layers wait for their backward pass in host memory.

What autograd saves while a block runs is noted by hooks of saved tensors. When the block has run, each *storage* that
was noted is copied to the host, once, however many of its views were saved: by then everything that was written into it
is there. Parameters stay where they are, and so do small tensors.

**Memory.** The copies travel while the next block computes, and when that has run they are waited for and the storages
let go: the activations of one layer at most are on their way out while another computes. In backward a layer is fetched
when the one after it begins to be used: one at most is on its way in while another is used. What was not let go when
backward comes for it is used where it is.

**Exactness.** Bytes are copied, nothing is computed: gradients are equal to the bit. What a compiled block saves
between its two graphs passes the same hooks.

For a policy tensor by tensor there is :meth:`ActivationOffload.put`, which gathers what it is given to groups of some
size; a group is to it what a layer is above.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function

from drivetrain.engine.memory.offload_copies import CopyEngine
from drivetrain.engine.parallel.streams import Event

__all__ = ["ACTIVATIONS_LEAVE", "GROUP_BYTES", "LEAST_BYTES", "ActivationOffload", "LayerTensors", "Parked"]

ACTIVATIONS_LEAVE = "drivetrain/offload/activations"
"""Span in which the copies of a layer's activations are begun."""
LEAST_BYTES = 1024
"""Of a storage that is worth a copy."""
GROUP_BYTES = 32 * 2**20
"""From which on a group of tensors that were put away one by one begins to leave."""


class _Stored:
    """One storage, as bytes: on the device, on the host, or both."""

    __slots__ = ("__weakref__", "device", "host", "layer", "nbytes")

    def __init__(self, layer: "LayerTensors", device: Tensor) -> None:
        self.layer = layer
        self.device: Tensor | None = device
        self.host: Tensor | None = None
        self.nbytes = device.nbytes


class Parked:
    """A tensor that was put away: a view of a storage. With the last one of a storage its copies go."""

    __slots__ = ("_dtype", "_shape", "_stored")

    def __init__(self, tensor: Tensor, stored: _Stored) -> None:
        self._stored = stored
        self._dtype = tensor.dtype
        self._shape = tensor.storage_offset(), tensor.shape, tensor.stride()

    def restore(self) -> Tensor:
        """The tensor as it was: values, dtype, shape, strides and offset, on the device."""
        self._stored.layer.arrive()
        device = self._stored.device
        assert device is not None, "a layer that has arrived is on the device"
        view = torch.empty(0, dtype=self._dtype, device=device.device)
        return view.set_(device.untyped_storage(), *self._shape)


class LayerTensors:
    """What was put away together, and travels together.

    Args:
        kept: tensors whose storages stay on the device; asked for when the first tensor comes: under ZeRO 3 the
            parameters of a block are other tensors while it runs.
        before: what left before this and is therefore used after it: fetched when this one is used.
    """

    def __init__(
        self,
        engine: CopyEngine,
        kept: Callable[[], Iterable[Tensor]] = tuple,
        before: "LayerTensors | None" = None,
    ) -> None:
        self._engine = engine
        self._ask_kept = kept
        self._kept: frozenset[int] | None = None
        # Weak: a layer goes with the last of its tensors that somebody may still ask for.
        self._before = None if before is None else weakref.ref(before)
        self._noted: dict[int, _Stored] = {}
        self._stored: list[weakref.ref[_Stored]] = []
        self._copied: Event | None = None
        self._arriving: list[tuple[Tensor, Tensor]] = []
        self._arrival: Event | None = None
        self.nbytes = 0

    def put(self, tensor: Tensor) -> Parked | Tensor:
        """Note ``tensor``, until the layer leaves; the tensor itself where it is to stay."""
        assert self._copied is None, "it has left"
        if not self._moves(tensor):
            return tensor
        key = tensor.untyped_storage()._cdata
        stored = self._noted.get(key)
        if stored is None:
            stored = _Stored(self, _bytes_of(tensor))
            # Noted, it is alive: no other storage can have its address.
            self._noted[key] = stored
            self.nbytes += stored.nbytes
        return Parked(tensor, stored)

    def leave(self) -> None:
        """Begin to copy what was put in to the host."""
        pairs = []
        for stored in self._noted.values():
            stored.host = self._engine.host_empty(stored.nbytes)
            assert stored.device is not None
            pairs.append((stored.device, stored.host))
            self._stored.append(weakref.ref(stored))
        if pairs:
            with record_function(ACTIVATIONS_LEAVE):
                self._copied = self._engine.to_host(pairs)

    def let_go(self) -> None:
        """Wait for the copies, and hold nothing on the device any more."""
        if self._noted and self._copied is not None:
            self._engine.wait(self._copied)
            for stored in self._noted.values():
                stored.device = None
        self._noted = {}

    def fetch(self) -> None:
        """Begin to bring back what is still asked for and was let go."""
        if self._arriving:
            return
        alive = [stored for one in self._stored if (stored := one()) is not None and stored.device is None]
        for stored in alive:
            assert stored.host is not None
            stored.device = torch.empty(stored.nbytes, dtype=torch.uint8, device=self._engine.device)
            self._arriving.append((stored.host, stored.device))
        if self._arriving:
            self._arrival = self._engine.to_device(self._arriving, after=self._copied)

    def arrive(self) -> None:
        """Return when everything is on the device (CUDA: what is computed from now on comes after that), and fetch what
        is used next."""
        # What was not let go by now is used where it is, and goes with who asks for it.
        self._noted = {}
        self.fetch()
        if self._arriving:
            assert self._arrival is not None
            self._engine.wait(self._arrival)
            self._arriving, self._arrival = [], None
        if self._before is not None:
            before, self._before = self._before(), None
            if before is not None:
                before.fetch()

    def _moves(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return False
        storage = tensor.untyped_storage()
        if tensor.device.type != self._engine.device.type or storage.nbytes() < LEAST_BYTES:
            return False
        if self._kept is None:
            self._kept = frozenset(one.untyped_storage().data_ptr() for one in self._ask_kept())
        return storage.data_ptr() not in self._kept


class ActivationOffload:
    """The activations of a model's first layers, and whatever else is put away.

    Args:
        engine: copies.
        blocks: by name, which is a layer's number in the whole model.
        num_layers: so many first layers of the model are moved; 0: none.

    Attributes:
        layers_moved: how often a layer or a group has left with something.
    """

    def __init__(
        self, engine: CopyEngine, blocks: "nn.ModuleDict | None" = None, num_layers: int = 0
    ) -> None:
        self._engine = engine
        self._blocks = blocks
        self._num_layers = num_layers
        self._leaving: LayerTensors | None = None
        self._group: LayerTensors | None = None
        self.layers_moved = 0

    def run_layers(self, names: Sequence[str], run: Callable[[str, Tensor], Tensor], x_TD: Tensor) -> Tensor:
        """Run neighbouring layers one after the other, (T, D) to (T, D), and move away what those save that are to be
        moved. Without gradients nothing is saved, and nothing moves."""
        before: LayerTensors | None = None
        for name in names:
            if not torch.is_grad_enabled() or int(name) >= self._num_layers:
                x_TD = run(name, x_TD)
                if before is not None and x_TD.requires_grad:
                    # Called when backward reaches the end of this layer: what was moved last is needed after it.
                    x_TD.register_hook(_Fetch(before))
                    before = None
                self._let_go()
                continue
            with self._layer(name, before) as layer:
                x_TD = run(name, x_TD)
            before = layer
        return x_TD

    def put(self, tensor: Tensor) -> "Parked | _Unmoved":
        """Move ``tensor`` away; its ``restore()`` gives it back. It must not be written into any more."""
        if self._group is None:
            self._group = LayerTensors(self._engine, before=self._leaving)
        parked = self._group.put(tensor)
        if self._group.nbytes >= GROUP_BYTES:
            self.flush()
        return _Unmoved(parked) if isinstance(parked, Tensor) else parked

    def flush(self) -> None:
        """Have what was put away one by one leave now, as few as it is."""
        group, self._group = self._group, None
        if group is not None:
            self._leave(group)

    @contextmanager
    def _layer(self, name: str, before: LayerTensors | None) -> Iterator[LayerTensors]:
        assert self._blocks is not None, "whose layers?"
        layer = LayerTensors(self._engine, self._blocks[name].parameters, before)
        with saved_tensors_hooks(layer.put, _restored):
            yield layer
        self._leave(layer)

    def _leave(self, layer: LayerTensors) -> None:
        layer.leave()
        self.layers_moved += layer.nbytes > 0
        # The one before has travelled while this one ran.
        self._let_go()
        self._leaving = layer

    def _let_go(self) -> None:
        if self._leaving is not None:
            self._leaving.let_go()
            self._leaving = None


class _Fetch:
    """A hook of a gradient. Knows its layer as long as somebody may ask for its tensors, and keeps none of them."""

    def __init__(self, layer: LayerTensors) -> None:
        self._layer = weakref.ref(layer)

    def __call__(self, _gradient: Tensor) -> None:
        if (layer := self._layer()) is not None:
            layer.fetch()


class _Unmoved:
    """A tensor that was not worth it, or could not be moved."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def restore(self) -> Tensor:
        """It."""
        return self._tensor


def _restored(saved: Parked | Tensor) -> Tensor:
    return saved.restore() if isinstance(saved, Parked) else saved


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of ``tensor``, as (nbytes,) uint8."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
