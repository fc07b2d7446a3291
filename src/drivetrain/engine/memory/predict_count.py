"""Which storages live when, while operators run on tensors without memory: the bookkeeping of a prediction.

Classes are decided when the step has ended, because what a storage is for shows in what becomes of it: a tensor that is
still there when a backward pass begins was saved for it, one that became a gradient was on its way to be one.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from drivetrain.measure.memory import CATEGORIES, Category

__all__ = ["Change", "LayerNames", "Storage", "StorageLog"]

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
"""Namespaces of the operators that hand tensors to other ranks."""

_WRAPPERS = ("torch/_dynamo/eval_frame.py", "torch/_compile.py")
"""Files with frames between the operator's caller and a mode."""


@dataclass
class Storage:
    """One storage that lived during the step.

    Attributes:
        nbytes: now; 0 once it is freed.
        layer: that was computing when it was made.
        in_backward: whether it was made by a backward pass.
        known: the category that its owner gives it; None: none does.
        travels: whether it was handed to a collective.
        outlived_forward: whether it was there when a backward pass began that followed its making.
        existed: whether it was there before the step.
    """

    nbytes: int
    layer: str
    in_backward: bool
    existed: bool
    known: Category | None = None
    travels: bool = False
    outlived_forward: bool = False
    death: "weakref.finalize[[int], torch.UntypedStorage] | None" = None

    @property
    def category(self) -> Category:
        """What it was, seen from the end of the step."""
        if self.known is not None:
            return self.known
        if self.outlived_forward:
            return "activations"
        return "communication" if self.travels else "temporaries"


@dataclass(frozen=True)
class Change:
    """An instant at which a storage grew or shrank.

    Attributes:
        storage: which one.
        delta: bytes, signed.
        phase: of the step.
        operator: that was at work.
    """

    storage: Storage
    delta: int
    phase: str
    operator: str


class LayerNames:
    """Which part of the model computes: told by hooks of its modules."""

    def __init__(self) -> None:
        self.current = "embedding"

    @contextmanager
    def watching(self, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Watch ``blocks``; what comes before the first of them is ``embedding``, behind the last ``output``."""
        handles: list[RemovableHandle] = []
        last = list(blocks)[-1] if blocks else ""
        for name, block in blocks.items():
            handles.append(block.register_forward_pre_hook(self._enters(f"layer {name}")))
            handles.append(
                block.register_forward_hook(
                    self._leaves("output" if name == last else "between layers"), always_call=True
                )
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def forward_has_ended(self) -> None:
        """A backward pass has begun: what is computed next is the beginning of the model."""
        self.current = "embedding"

    def _enters(self, name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            self.current = name

        return hook

    def _leaves(self, name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            self.current = name

        return hook


class _AttentionCalls(TorchFunctionMode):
    """Knows whether torch's attention is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.at_work = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.at_work = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.at_work = False


def _holders(tensor: Tensor) -> tuple[int, int]:
    """How often a tensor and its storage are held, those included that ask."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class _Sums(TorchDispatchMode):
    """Notes how often the first summand is held when two gradients meet."""

    holders = (0, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.add.Tensor:
            self.holders = _holders(args[0])
        return func(*args, **(kwargs or {}))


def _holders_of_one() -> tuple[int, int]:
    """:func:`_holders` of a gradient that nothing but the sum it enters holds."""
    x = torch.ones(1, requires_grad=True)
    y = x * 1.0
    # Each product has a gradient of its own for y.
    total = (y * 2.0) + (y * 3.0)
    with _Sums() as sums:  # type: ignore[no-untyped-call]
        total.backward()
    found: tuple[int, int] = sums.holders
    return found


def _called_by_engine() -> bool:
    """Whether the operator that is watched was called by autograd, and by no Python code of a function's backward."""
    frame = sys._getframe(3)
    # Modes are left out of torch.compile, by two wrappers of torch's own.
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"


class StorageLog(TorchDispatchMode):
    """While active, notes every storage that an operator reads or makes, until it is freed.

    A storage counts once, however many views it has, and is followed when it is resized. What a kernel allocates and
    frees inside an operator is not seen.

    Args:
        saved: whether it is looked at what a backward pass finds.

    Attributes:
        changes: what happened, in order.
    """

    def __init__(self, layers: LayerNames, *, saved: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changes: list[Change] = []
        self._layers = layers
        self._saved = saved
        self._live: dict[int, Storage] = {}
        self._phase = "before"
        self._operator = ""
        self._in_backward = False
        self._attention = _AttentionCalls()
        self._alone = _holders_of_one()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens in the block belongs to that phase, where no backward pass is running."""
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = outer

    def know(self, category: Category, tensor: Tensor, *, existed: bool = False) -> None:
        """``tensor``'s storage belongs to ``category``, from its beginning to its end."""
        storage = self._see(tensor, existed=existed)
        if storage.known is None or CATEGORIES.index(category) < CATEGORIES.index(storage.known):
            storage.known = category

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:
            # Its operators on the tensors inside of it come here again.
            return NotImplemented
        self._look_for_backward()
        self._operator = str(func)
        in_place = func is torch.ops.aten.add.Tensor and self._adds_in_place(args[0])
        given = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        for value in given:
            self._see(value, existed=True)
        result = func(*args, **kwargs)
        if in_place:
            in_place = self._take_place(args[0], result)
        made = [value for value in tree_iter(result) if isinstance(value, Tensor)]
        # The arguments once more: an operator may have resized one of them.
        for value in (*made, *(one for one in given if not (in_place and one is args[0]))):
            self._see(value)
        if func.namespace in _COLLECTIVES:
            for value in (*made, *given):
                self._see(value).travels = True
        return result

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._attention.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._attention.__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        for storage in self._live.values():
            assert storage.death is not None
            storage.death.detach()
        self._live.clear()

    def _adds_in_place(self, summand: Any) -> bool:
        """Whether torch would add to ``summand`` itself if no mode watched.

        Where one does, torch 2.13 makes a new tensor: of the masked scores of attention
        (``_scaled_dot_product_attention_math``), and of gradients that meet (``InputBuffer::accumulate``), unless
        somebody else holds the first of them.
        """
        if self._attention.at_work:
            return True
        return _called_by_engine() and isinstance(summand, Tensor) and _holders(summand) == self._alone

    def _take_place(self, summand: Tensor, total: Tensor) -> bool:
        """Have the sum be what its first summand was, from the beginning of that one; whether it can."""
        storage, former = total.untyped_storage(), summand.untyped_storage()
        if storage.nbytes() != former.nbytes():
            return False
        seen = self._live.pop(former._cdata)
        assert seen.death is not None
        seen.death.detach()
        self._follow(storage, seen)
        return True

    def _follow(self, storage: torch.UntypedStorage, seen: Storage) -> None:
        # The finalizer runs when the storage itself is freed: torch keeps its Python object until then.
        seen.death = weakref.finalize(storage, self._forget, storage._cdata)
        seen.death.atexit = False
        self._live[storage._cdata] = seen

    def _look_for_backward(self) -> None:
        running = torch._C._current_graph_task_id() != -1
        if running and not self._in_backward:
            for storage in self._live.values():
                storage.outlived_forward |= self._saved and not storage.existed and not storage.in_backward
            self._layers.forward_has_ended()
        self._in_backward = running

    def _see(self, tensor: Tensor, *, existed: bool = False) -> Storage:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        seen = self._live.get(key)
        if seen is None:
            seen = Storage(0, self._layers.current, self._in_backward, existed)
            self._follow(storage, seen)
        if seen.nbytes != nbytes:
            self._note(seen, nbytes - seen.nbytes)
        return seen

    def _forget(self, key: int) -> None:
        seen = self._live.pop(key)
        self._note(seen, -seen.nbytes)

    def _note(self, storage: Storage, delta: int) -> None:
        if not delta:
            return
        storage.nbytes += delta
        in_backward = torch._C._current_graph_task_id() != -1
        phase = "backward" if in_backward else self._phase
        self.changes.append(Change(storage, delta, phase, self._operator))
