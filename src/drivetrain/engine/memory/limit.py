"""``memory.device_memory_limit_bytes`` on a CPU: the live bytes of one untimed step.

Timed steps run without the count: the dispatch mode costs several percent and switches compilation off. One
step per set of shapes is enough, because a step of the same shapes allocates the same.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.engine.memory.live import Category, LiveBytes
from drivetrain.engine.random_state import capture_random_state, restore_random_state

__all__ = ["MemoryCount", "count_step", "unseen_with_compile"]


@dataclass(frozen=True)
class MemoryCount:
    """The peak of one step.

    Attributes:
        peak_bytes: most bytes of tensor storage alive at once.
        by_category: how the peak was made up; the values sum to it. ``parameters`` includes buffers,
            ``activations`` everything that is none of the others, the batch and temporaries included.
    """

    peak_bytes: int
    by_category: Mapping[Category, int]


def unseen_with_compile() -> str:
    """What :func:`count_step` does not see when ``fusion.compile`` is on, in words for the run's record."""
    return (
        "counted with the blocks run eagerly: buffers that compiled code allocates are not seen, and buffers "
        "that it fuses away are counted"
    )


def count_step(
    step_fn: Callable[[], object],
    *,
    decoder: nn.Module,
    optimizer: torch.optim.Optimizer,
    limit_bytes: int | None,
) -> MemoryCount:
    """Run one step, untimed, count its live bytes, and leave no trace of it.

    Whether it succeeds or raises, parameters, buffers, optimizer state, learning rate and random generators
    are put back to the bit afterwards, and gradients are None. The copies kept for that are not counted.

    Args:
        step_fn: forward, backward, clipping and ``optimizer.step()`` on a batch of the shapes to be counted.
        decoder: the model that ``step_fn`` trains, uncompiled or compiled in place.
        optimizer: over ``decoder``'s parameters.
        limit_bytes: None only counts.

    Raises:
        OutOfMemory: at the first allocation that brings the live bytes above ``limit_bytes``.
    """
    saved = _Saved.of(decoder, optimizer)
    live = LiveBytes(limit_bytes)
    for parameter in decoder.parameters():
        parameter.grad = None
    try:
        # Without the stance a block that is first called under a dispatch mode stays uncompiled for good.
        with torch.compiler.set_stance("force_eager"), live, _categories(live, decoder, optimizer):
            live.track("parameters", dict(decoder.named_parameters()))
            live.track("parameters", dict(decoder.named_buffers()))
            live.track("optimizer", _state_tensors(decoder, optimizer))
            step_fn()
    finally:
        saved.restore(decoder, optimizer)
    return MemoryCount(live.peak_bytes, dict(live.peak_by_category))


def _state_tensors(decoder: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in decoder.named_parameters()}
    return {
        f"{names[parameter]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


@contextmanager
def _categories(live: LiveBytes, decoder: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Tell ``live`` which storages become gradients and when the optimizer is at work."""

    optimizer_at_work = ExitStack()

    def gradient_is_ready(parameter: Tensor) -> None:
        assert parameter.grad is not None
        live.recategorise(parameter.grad, "gradients")

    def optimizer_starts(*_: object) -> None:
        optimizer_at_work.enter_context(live.phase("optimizer"))

    def optimizer_is_done(*_: object) -> None:
        optimizer_at_work.close()

    with ExitStack() as hooks, optimizer_at_work:
        for parameter in decoder.parameters():
            hook: RemovableHandle = parameter.register_post_accumulate_grad_hook(gradient_is_ready)
            hooks.callback(hook.remove)
        hooks.callback(optimizer.register_step_pre_hook(optimizer_starts).remove)
        hooks.callback(optimizer.register_step_post_hook(optimizer_is_done).remove)
        yield


@dataclass(frozen=True)
class _Saved:
    """Copies of everything that a step changes."""

    tensors: list[tuple[Tensor, Tensor]]
    states: dict[Tensor, dict[str, Any]]
    hyperparameters: list[dict[str, Any]]
    random_state: dict[str, Tensor] = field(default_factory=capture_random_state)

    @classmethod
    def of(cls, decoder: nn.Module, optimizer: torch.optim.Optimizer) -> "_Saved":
        originals = [*decoder.parameters(), *decoder.buffers()]
        originals += [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        return cls(
            tensors=[(tensor, tensor.detach().clone()) for tensor in originals],
            states={parameter: dict(state) for parameter, state in optimizer.state.items()},
            hyperparameters=[
                {name: value for name, value in group.items() if name != "params"}
                for group in optimizer.param_groups
            ],
        )

    @torch.no_grad()
    def restore(self, decoder: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in decoder.parameters():
            parameter.grad = None
        for original, copy in self.tensors:
            original.copy_(copy)
        optimizer.state.clear()
        optimizer.state.update(self.states)
        for group, saved in zip(optimizer.param_groups, self.hyperparameters, strict=True):
            group.update(saved)
        restore_random_state(self.random_state)
