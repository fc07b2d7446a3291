"""AdamW whose moments are kept in bf16: half the bytes of its state.

Masters and gradients stay fp32, and so does the arithmetic: piece by piece the moments are widened, updated by the
plain optimizer's kernels, and rounded again.

**Rounded at random**, up or down with the probability that makes the mean exact (Croci et al. 2022, arXiv:2103.10365,
section 2). To the nearest, a second moment would stand still: with beta2 = 0.999 it changes by a thousandth a step, and
bf16 has a 256th. What is drawn is a function of the parameter's name, the number of the update and the element's place
in the whole parameter, so that a run that goes on from a checkpoint, replicas that update the same parameter, and ranks
that update rows of it, draw the same, and no generator's state changes.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from drivetrain.engine.memory.offload_optimizer import update_tensors
from drivetrain.engine.parallel.placement import Placement

__all__ = ["LOW_PRECISION_UPDATE", "PIECE", "LowPrecisionAdamW", "first_elements", "rounded_at_random"]

LOW_PRECISION_UPDATE = "drivetrain/optimizer/bf16_state"
"""Span in which the moments of one parameter are widened, updated and rounded."""
PIECE = 2**20
"""Elements that are widened at once, at most: beside the state 32 MiB are alive during an update."""
_BITS = 16
"""That fp32 has more than bf16."""


class LowPrecisionAdamW(torch.optim.AdamW):
    """AdamW over fp32 parameters with moments in bf16, of the plain one's names and shapes.

    Args:
        groups: as of ``torch.optim.AdamW``, of named parameters that are contiguous and fp32.
        first: by name, the number of a parameter's first element in the whole one (:func:`first_elements`); 0 for
            others.
        settings: others of ``torch.optim.AdamW``. Not ``amsgrad``, ``capturable`` and ``differentiable``.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, first: Mapping[str, int] | None = None, **settings: Any
    ) -> None:
        super().__init__(groups, **settings)
        self._first = first or {}
        assert not any(group["amsgrad"] or group["capturable"] for group in self.param_groups), "not there"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "the gradients are there"
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is not None:
                    with record_function(LOW_PRECISION_UPDATE):
                        self._update(group, name, parameter)

    def _update(self, group: dict[str, Any], name: str, parameter: Tensor) -> None:
        state = self.state[parameter]
        assert parameter.grad is not None
        assert parameter.is_contiguous(), "parts of a parameter are views"
        master, gradient = parameter.detach().view(-1), parameter.grad.contiguous().view(-1)
        moments = [state[key].view(-1) for key in ("exp_avg", "exp_avg_sq")]
        count, before = master.numel(), self._first.get(name, 0)
        # A rank without rows of it counts the update like the others.
        for first in range(0, max(count, 1), PIECE):
            here = slice(first, min(first + PIECE, count))
            wide = [one[here].float() for one in moments]
            # Each call counts; one update is one, into however many pieces it is cut.
            step = state["step"] if here.stop == count else state["step"].clone()
            update_tensors(group, [master[here]], [gradient[here]], [wide[0]], [wide[1]], [step])
            noise = _noise(name, step, range(before + here.start, before + here.stop), master.device)
            for one, updated, drawn in zip(moments, wide, noise, strict=True):
                one[here] = rounded_at_random(updated, drawn)


def first_elements(placements: Mapping[str, Placement]) -> dict[str, int]:
    """Number of the first element that a rank holds in each whole tensor, row by row; what it holds are whole rows."""
    found = {}
    for name, place in placements.items():
        number = 0
        for held, size in zip(place.slices(), place.full_shape, strict=True):
            number = number * size + held.start
        found[name] = number
    return found


def rounded_at_random(x: Tensor, noise: Tensor) -> Tensor:
    """``x`` in bf16: a neighbour on either side, the nearer with the larger probability, so that the mean is ``x``.

    Args:
        x: fp32. What bf16 has stays as it is, and what is not finite too.
        noise: int32 of its shape, each of 0 to 65,535 equally likely.
    """
    bits = x.view(torch.int32) + noise
    rounded = (bits & -(1 << _BITS)).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x).to(torch.bfloat16)


def _noise(name: str, step: Tensor, elements: range, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two draws of 0 to 65,535 for each of the elements with these numbers, int32.

    Args:
        step: (), number of the update, read on its device.
    """
    # A number for each parameter and update, mixed before elements are counted from it.
    seed = _mixed(step.to(torch.int64) + (zlib.crc32(name.encode()) << 24))
    numbers = torch.arange(elements.start + 1, elements.stop + 1, dtype=torch.int64, device=device)
    word = _mixed(numbers * _GOLDEN + seed)
    low, high = word & 0xFFFF, (word >> _BITS) & 0xFFFF
    return low.to(torch.int32), high.to(torch.int32)


def _signed(constant: int) -> int:
    """A 64-bit constant as torch's int64 has it."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _mixed(word: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of each int64; products wrap."""
    word = _shifted(word, 30) * _FIRST
    word = _shifted(word, 27) * _SECOND
    return _shifted(word, 31)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """``word ^ (word >> bits)`` of unsigned words; torch's shift of int64 copies the sign."""
    return word ^ ((word >> bits) & ((1 << (64 - bits)) - 1))
