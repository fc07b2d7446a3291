"""What a profiled window needs beside the allocator's own records, so that these can be told apart by category.

The profiler records addresses and sizes and knows nothing of models. While it records, marks are left between its
records: a range of no length whose name holds an address, so that it is on the profiler's clock and in its order. What
is there before and after a step is listed once, by address.

On CUDA the caching allocator's snapshot tells how much is reserved and in no block. Never run on a CUDA device by our
tests, which give :func:`fragmentation_of` a snapshot as torch documents it.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from drivetrain.engine.parallel.gradient_sync import GradientSync

__all__ = ["MARK", "MemoryMarks", "fragmentation_of", "resident_memory"]

MARK = "drivetrain/memory/"
"""Begins the names of marks: ``gradient/<address>/<bytes>`` and ``layer/<name>`` follow."""


class MemoryMarks:
    """Leaves marks from :meth:`begin` to :meth:`end`.

    Args:
        blocks: layers by name; their beginnings are marked, unless they are compiled: hooks would be in their graphs.
    """

    def __init__(
        self,
        decoder: nn.Module,
        optimizer: torch.optim.Optimizer,
        sync: GradientSync,
        blocks: Mapping[str, nn.Module],
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._optimizer = optimizer
        self._sync = sync
        self._blocks = blocks
        self._device = device
        self._hooks = ExitStack()

    def begin(self) -> None:
        """Leave marks from here on."""
        hooks = self._hooks
        for parameter in self._decoder.parameters():
            hooks.callback(parameter.register_post_accumulate_grad_hook(_mark_gradient).remove)
        hooks.callback(self._optimizer.register_step_pre_hook(self._mark_updates).remove)
        last = list(self._blocks)[-1] if self._blocks else ""
        for name, block in self._blocks.items():
            hooks.callback(block.register_forward_pre_hook(_marks_layer(f"layer {name}")).remove)
            after = "output" if name == last else "between layers"
            hooks.callback(block.register_forward_hook(_marks_layer(after)).remove)

    def end(self) -> None:
        """Leave no more."""
        self._hooks.close()

    def document(self) -> dict[str, Any]:
        """What the trace says of it, under ``memory``: blocks that outlive steps, and what the system counts."""
        held: dict[int, tuple[str, int]] = {}

        def note(category: str, tensor: Tensor) -> None:
            storage = _plain(tensor).untyped_storage()
            if storage.nbytes():
                held.setdefault(storage.data_ptr(), (category, storage.nbytes()))

        for one in self._sync.parameters().values():
            note("parameters", one.tensor)
        for _, parameter in self._sync.updated():
            note("parameters", parameter)
        for buffer in self._decoder.buffers():
            note("parameters", buffer)
        for state in self._optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.device.type == self._device.type:
                    note("optimizer", value)
        return {
            "held": [[category, address, nbytes] for address, (category, nbytes) in held.items()],
            "device": self._device.type,
            "layers": bool(self._blocks),
            **resident_memory(),
            **self._of_allocator(),
        }

    def _of_allocator(self) -> dict[str, int]:
        if self._device.type != "cuda":
            return {}
        return fragmentation_of(torch.cuda.memory._snapshot(self._device))

    def _mark_updates(self, *_: Any) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                _mark_gradient(parameter)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _mark_gradient(parameter: Tensor) -> None:
    # It may have been sent to other ranks and dropped.
    if parameter.grad is None:
        return
    storage = _plain(parameter.grad).untyped_storage()
    with record_function(f"{MARK}gradient/{storage.data_ptr()}/{storage.nbytes()}"):
        pass


def _marks_layer(name: str) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        with record_function(f"{MARK}layer/{name}"):
            pass

    return hook


def resident_memory() -> dict[str, int]:
    """The resident set of this process now and at its most, in bytes; nothing where the system does not tell."""
    found = {}
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM") and value.split()[1:] == ["kB"]:
            found[{"VmRSS": "resident_bytes", "VmHWM": "peak_resident_bytes"}[name]] = (
                int(value.split()[0]) * 1024
            )
    return found


def fragmentation_of(snapshot: Mapping[str, Any]) -> dict[str, int]:
    """What a caching allocator has reserved, and how much of that lies in no block that is in use.

    Args:
        snapshot: of ``torch.cuda.memory._snapshot``: ``segments``, each with ``total_size`` and ``active_size``.
    """
    segments = snapshot["segments"]
    reserved = sum(int(one["total_size"]) for one in segments)
    return {
        "reserved_bytes": reserved,
        "fragmentation_bytes": reserved - sum(int(one["active_size"]) for one in segments),
    }
