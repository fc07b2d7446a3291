"""What the ranks of a group must agree upon, compared between them: a mistake here would train something else.

Values are compared by a sketch: 64 weighted sums of every 64th element, which differ about as much as the tensors do,
whatever their size. One all-reduce of the sketch and its negative gives the largest and the smallest of all ranks.
"""

import warnings
from binascii import crc32
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.engine.parallel.collectives import Group
from drivetrain.engine.parallel.parallelize_text import listed
from drivetrain.errors import ConfigurationError

__all__ = ["FirstStep", "require_same_module"]

_SUMS = 64
_EQUAL = 1e-9
"""Relative spread of what is the same to the bit: sketches may be summed up in another order on another device."""
_ALIKE = 1e-2
"""Relative spread of what was computed alike: round-off of any dtype is below, a missing summand far above."""


def _sketch(values: Tensor) -> Tensor:
    """(64,) fp64."""
    # Masks have infinities, of which a sum is none; any three numbers do.
    flat = values.detach().flatten().double().nan_to_num(nan=1.0, posinf=2.0, neginf=3.0)
    rows = torch.cat([flat, flat.new_zeros(-flat.numel() % _SUMS)]).view(-1, _SUMS)
    # Weighted by their place, or rows in another order would look the same.
    return torch.arange(len(rows), dtype=torch.float64, device=rows.device).cos() @ rows


def _spread(sketches: Tensor, group: Group) -> list[float]:
    """Of (N, 64): for each row the largest difference between ranks over the largest norm. Collective."""
    extremes = group.all_reduce(torch.stack([sketches, -sketches]), dist.ReduceOp.MAX)
    between = (extremes[0] + extremes[1]).norm(dim=1)
    largest = extremes.abs().amax(dim=0).norm(dim=1)
    return [float(value) for value in (between / largest.clamp_min(torch.finfo(torch.float64).tiny)).tolist()]


def _same_number(number: int, device: torch.device, group: Group) -> bool:
    """Whether all ranks have the same. Collective."""
    both = torch.tensor([number, -number], dtype=torch.int64, device=device)
    largest, smallest = group.all_reduce(both, dist.ReduceOp.MAX).tolist()
    return bool(largest == -smallest)


def require_same_module(
    module: nn.Module, plan: Iterable[tuple[str, str]], device: torch.device, group: Group
) -> None:
    """Every rank has the same parameters, by name, shape and (but on the meta device) value, and the same plan.

    Collective: every rank of the group calls it, before anything is cut.

    Raises:
        ConfigurationError: on every rank: they have not.
    """
    named = list(module.named_parameters())
    described = repr(([(name, tuple(value.shape), str(value.dtype)) for name, value in named], sorted(plan)))
    if not _same_number(crc32(described.encode()), device, group):
        raise ConfigurationError(
            f"the {group.size} ranks of {group.name!r} have different modules or plans: parameters must have equal "
            "names, shapes and dtypes on all of them"
        )
    values = [(name, value) for name, value in named if not value.is_meta]
    if not values:
        return
    spreads = _spread(torch.stack([_sketch(value).to(device) for _, value in values]), group)
    differing = [name for (name, _), spread in zip(values, spreads, strict=True) if spread > _EQUAL]
    if differing:
        raise ConfigurationError(
            f"the {group.size} ranks of {group.name!r} have different weights in {listed(differing)}: each would cut "
            "its part out of another model; set the same seed before building it, or load the same weights"
        )


class FirstStep:
    """Compares what enters the first forward pass, and the first gradients of what all ranks hold alike.

    Hooks of the whole module and of its parameters, which go when they have done their work. Parameters are looked up
    when the first pass with gradients begins: weights that are made after the module was cut are other objects.
    """

    def __init__(self, module: nn.Module, alike: Sequence[str], group: Group) -> None:
        """``alike``: names of the parameters whose gradient every rank has in whole."""
        self._alike = frozenset(alike)
        self._group = group
        self._inputs_seen = False
        self._hook = module.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._inputs_seen:
            self._inputs_seen = True
            self._compare_inputs([*_tensors(args), *_tensors(kwargs)], next(module.parameters()).device)
        if torch.is_grad_enabled():
            self._hook.remove()
            self._watch(module)

    def _compare_inputs(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        same = _same_number(crc32(repr([tuple(one.shape) for one in tensors]).encode()), device, self._group)
        if same and tensors:
            sketches = torch.stack([_sketch(one).to(device) for one in tensors])
            same = all(spread <= _EQUAL for spread in _spread(sketches, self._group))
        if not same:
            raise ConfigurationError(
                f"the {self._group.size} ranks of {self._group.name!r} were given different inputs: they share the "
                "work on one batch; let the data-parallel index choose the samples, not the rank"
            )

    def _watch(self, module: nn.Module) -> None:
        unseen = []
        for name, parameter in module.named_parameters():
            if hasattr(parameter, "to_local"):
                unseen.append(name)
            elif name in self._alike and parameter.requires_grad:
                handles: list[RemovableHandle] = []
                handles.append(parameter.register_hook(partial(self._compare_gradient, name, handles)))
        if unseen:
            warnings.warn(
                f"gradients of {listed(unseen)} are not compared between the ranks of {self._group.name!r}: FSDP2 "
                "shows none before it has cut them",
                stacklevel=2,
            )

    def _compare_gradient(self, name: str, handles: list[RemovableHandle], gradient: Tensor) -> None:
        for handle in handles:
            handle.remove()
        (spread,) = _spread(_sketch(gradient)[None], self._group)
        if spread > _ALIKE:
            raise ConfigurationError(
                f"the gradient of {name} differs between the {self._group.size} ranks of {self._group.name!r}, which "
                "hold it alike: its module computes something else on each. Give the module 'sequence' if it has a "
                "part of the sequence, 'shared' if it has heads of its own; if it has neither, random numbers may "
                "differ (set the same seed on all ranks), or the loss is computed from a cut output"
            )


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _tensors(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
