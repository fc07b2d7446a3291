"""Counting the bytes of live tensor storages while operators run."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from drivetrain.errors import OutOfMemory

__all__ = ["Category", "LiveBytes"]

Category = Literal["parameters", "gradients", "optimizer", "activations"]


@dataclass
class _Live:
    """One storage that is alive."""

    nbytes: int
    category: Category
    death: "weakref.finalize[[int], torch.UntypedStorage]"


class LiveBytes(TorchDispatchMode):
    """While active, counts each storage that an operator reads or makes, until the storage is freed.

    A storage counts once, however many views it has, with all its bytes, and is followed when it is resized.
    Tensors that exist before are counted when :meth:`track` names them or when an operator first reads them.
    A storage that an operator allocates and frees before it returns is not seen (workspaces of a library).
    Compiled code is not seen at all: it must run eagerly under this mode.

    Args:
        limit_bytes: an allocation that brings the live bytes above it raises OutOfMemory; None: only counts.

    Attributes:
        live_bytes: bytes alive now.
        peak_bytes: the most that were alive.
        peak_by_category: how the peak was made up; the values sum to ``peak_bytes``.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._limit_bytes = limit_bytes
        self._by_category: dict[Category, int] = dict.fromkeys(get_args(Category), 0)
        self.peak_by_category: dict[Category, int] = dict(self._by_category)
        self._storages: dict[int, _Live] = {}
        self._phase: Category = "activations"

    def track(self, category: Category, tensors: Mapping[str, Tensor]) -> None:
        """Count tensors that exist already. The names are for the message of OutOfMemory."""
        for name, tensor in tensors.items():
            self._see(tensor, category, name)

    def recategorise(self, tensor: Tensor, category: Category) -> None:
        """From here on, the bytes of ``tensor``'s storage belong to ``category``."""
        self._see(tensor, category, "")
        live = self._storages[tensor.untyped_storage()._cdata]
        self._by_category[live.category] -= live.nbytes
        self._by_category[category] += live.nbytes
        live.category = category

    @contextmanager
    def phase(self, category: Category) -> Iterator[None]:
        """What is allocated in the block belongs to ``category`` (outside, to activations)."""
        outer, self._phase = self._phase, category
        try:
            yield
        finally:
            self._phase = outer

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for value in tree_iter((args, kwargs)):
            if isinstance(value, Tensor):
                self._see(value, "activations", f"read by {func}")
        result = func(*args, **kwargs)
        # The arguments once more: an operator may have resized one of them.
        for value in tree_iter((result, args, kwargs)):
            if isinstance(value, Tensor):
                self._see(value, self._phase, f"made by {func}")
        return result

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        for live in self._storages.values():
            live.death.detach()
        self._storages.clear()

    def _see(self, tensor: Tensor, category: Category, origin: str) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        live = self._storages.get(key)
        if live is None:
            # The finalizer runs when the storage itself is freed: torch keeps its Python object until then.
            death = weakref.finalize(storage, self._forget, key)
            death.atexit = False
            self._storages[key] = live = _Live(0, category, death)
        if live.nbytes != nbytes:
            self._grow(live, nbytes - live.nbytes, tensor, origin)

    def _grow(self, live: _Live, nbytes: int, tensor: Tensor, origin: str) -> None:
        live.nbytes += nbytes
        self._by_category[live.category] += nbytes
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.peak_by_category = dict(self._by_category)
        if nbytes > 0 and self._limit_bytes is not None and self.live_bytes > self._limit_bytes:
            dtype = str(tensor.dtype).removeprefix("torch.")
            description = f"{dtype} tensor of shape {tuple(tensor.shape)}, {origin}"
            raise OutOfMemory(live.category, description, self.live_bytes, self._limit_bytes)

    def _forget(self, key: int) -> None:
        live = self._storages.pop(key)
        self._by_category[live.category] -= live.nbytes
        self.live_bytes -= live.nbytes
