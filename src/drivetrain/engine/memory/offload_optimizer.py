"""A share of AdamW's moments lives in host memory, and visits the device bucket by bucket to be updated.

Masters are the parameters here, so the moments are all the state there is: two numbers for each. Which parameters'
moments live on the host is decided once, for whole parameters (:func:`offloaded_parameters`).

**Where the update is done.** On the device. The same kernels as of the plain optimizer then compute the same numbers,
to the bit, and the host's cores, which feed the device, do nothing. It costs the link 16 bytes a fp32 element, both
moments there and back; an update on the host would cost 8 (the gradient there, the parameter back) and arithmetic of
its own.

**Staging.** Two buckets on the device: the moments of one arrive while those of the other are updated and go back. They
live from the beginning of an update to its end, when no activations do. Large parameters are cut into several buckets;
the cuts are multiples of ``ALIGNMENT`` elements, because a fused kernel on a CPU rounds the last few elements of what
it is given in another way.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.profiler import record_function

from drivetrain.engine.memory.offload_copies import CopyEngine
from drivetrain.engine.parallel.streams import Event

__all__ = [
    "ALIGNMENT",
    "OPTIMIZER_STATES_VISIT",
    "STAGING_BYTES",
    "OffloadedAdamW",
    "StateOffload",
    "offloaded_parameters",
    "update_tensors",
]

OPTIMIZER_STATES_VISIT = "drivetrain/offload/optimizer"
"""Span in which the states of a bucket are asked for, updated, and sent back."""
STAGING_BYTES = 64 * 2**20
"""Of both buckets together, at most."""
ALIGNMENT = 4096
"""Elements; see the module."""
_BUCKETS = 2


@dataclass
class StateOffload:
    """What is asked for, and what an optimizer made of it.

    Attributes:
        fraction: share of the moments' elements that lives on the host, 0 to 1.
        engine: carries them.
        staging_bytes: of both buckets on the device together; at least ``ALIGNMENT`` elements of each moment fit.
        host_bytes: of moments that live on the host, once there is an optimizer.
    """

    fraction: float
    engine: CopyEngine
    staging_bytes: int = STAGING_BYTES
    host_bytes: int = 0


def offloaded_parameters(sizes: Sequence[int], fraction: float) -> list[int]:
    """Which parameters' states live on the host: indices, ascending.

    The largest that still fits into the share is taken, until none does: the share is never exceeded, and what is left
    of it is less than the smallest parameter that was passed over.

    Args:
        sizes: elements of each parameter.
        fraction: 0 to 1.
    """
    room = fraction * sum(sizes)
    chosen = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if 0 < sizes[index] <= room:
            room -= sizes[index]
            chosen.append(index)
    return sorted(chosen)


@dataclass(frozen=True)
class _Piece:
    """Elements ``first`` up to ``end`` of what this rank holds of a parameter."""

    parameter: Tensor
    first: int
    end: int
    is_last: bool


@dataclass(frozen=True)
class _Bucket:
    """What visits the device together: elements ``first`` up to ``end`` of all that live on the host."""

    first: int
    end: int
    pieces: tuple[_Piece, ...]


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW with the moments of some parameters on the host.

    Its state has the names and shapes of the plain one's, so that a checkpoint of either is read by the other. Tensors
    on the host are read after :meth:`settle` alone.

    Args:
        groups: as of ``torch.optim.AdamW``; parameters are contiguous and of one dtype.
        offload: the share and who carries it.
        settings: others of ``torch.optim.AdamW``. Not ``amsgrad``, ``capturable`` and ``differentiable``.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], offload: StateOffload, **settings: Any) -> None:
        super().__init__(groups, **settings)
        assert not any(group["amsgrad"] or group["capturable"] for group in self.param_groups), (
            "not offloaded"
        )
        self._engine = offload.engine
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        local = [_local(parameter) for parameter in every]
        chosen = offloaded_parameters([one.numel() for one in local], offload.fraction)
        self._away = [every[index] for index in chosen]
        self._group_of = {parameter: group for group in self.param_groups for parameter in group["params"]}
        total = sum(local[index].numel() for index in chosen)
        self._dtype = local[0].dtype if local else torch.float32
        self._host = self._engine.host_zeros(2, total, dtype=self._dtype)
        width = 2 * self._host.element_size()
        capacity = max(offload.staging_bytes // (_BUCKETS * width), ALIGNMENT)
        self._buckets = _cut(self._away, capacity // ALIGNMENT * ALIGNMENT)
        self._returned: list[Event] = []
        self._hold_on_host(chosen, local)
        offload.host_bytes = self.host_bytes

    @property
    def host_bytes(self) -> int:
        """Of moments that live on the host."""
        return self._host.nbytes

    @property
    def staging_bytes(self) -> int:
        """Of the buckets on the device during an update."""
        return min(_BUCKETS, len(self._buckets)) * self._largest * 2 * self._host.element_size()

    @property
    def bytes_per_update(self) -> int:
        """Handed to copies in an update of all parameters: both moments there and back."""
        return 2 * self.host_bytes

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "the gradients are there"
        visits = [
            bucket for bucket in self._buckets if any(one.parameter.grad is not None for one in bucket.pieces)
        ]
        slots = [
            self._host.new_empty(2, self._largest, device=self._engine.device)
            for _ in range(min(_BUCKETS, len(visits)))
        ]
        arrivals = [self._fetch(bucket, slot, None) for bucket, slot in zip(visits, slots, strict=False)]
        # While the first of them are on their way.
        self._update_the_rest()
        returned: list[Event] = []
        for number, bucket in enumerate(visits):
            slot = slots[number % _BUCKETS]
            with record_function(OPTIMIZER_STATES_VISIT):
                self._engine.wait(arrivals[number])
                self._update(bucket, slot)
                returned.append(self._send_back(bucket, slot))
                if number + _BUCKETS < len(visits):
                    # Into the same bucket: after it has been carried away.
                    arrivals.append(self._fetch(visits[number + _BUCKETS], slot, returned[number]))
        for event in returned[-_BUCKETS:]:
            self._engine.wait(event)
        self._returned = returned[-_BUCKETS:]

    def settle(self) -> None:
        """Return when the state on the host is that of the latest update."""
        for event in self._returned:
            event.wait()
        self._returned = []

    def _hold_on_host(self, chosen: Sequence[int], local: Sequence[Tensor]) -> None:
        place = 0
        for index, parameter in zip(chosen, self._away, strict=True):
            shape, count = local[index].shape, local[index].numel()
            first, second = (row[place : place + count].view(shape) for row in self._host)
            # The fused kernel reads the step count on the device; the others on the host.
            fused = self._group_of[parameter]["fused"]
            step = torch.zeros((), dtype=torch.float32, device=local[index].device if fused else "cpu")
            self.state[parameter] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
            place += count

    @property
    def _largest(self) -> int:
        return max((bucket.end - bucket.first for bucket in self._buckets), default=0)

    def _fetch(self, bucket: _Bucket, slot: Tensor, after: Event | None) -> Event:
        return self._engine.to_device(self._pairs(bucket, slot), after)

    def _send_back(self, bucket: _Bucket, slot: Tensor) -> Event:
        return self._engine.to_host([(there, here) for here, there in self._pairs(bucket, slot)])

    def _pairs(self, bucket: _Bucket, slot: Tensor) -> list[tuple[Tensor, Tensor]]:
        size = bucket.end - bucket.first
        return [
            (row[bucket.first : bucket.end], there[:size])
            for row, there in zip(self._host, slot, strict=True)
        ]

    def _update(self, bucket: _Bucket, slot: Tensor) -> None:
        place = 0
        for piece in bucket.pieces:
            there = slice(place, place + piece.end - piece.first)
            place = there.stop
            if piece.parameter.grad is None:
                continue
            here = slice(piece.first, piece.end)
            step = self.state[piece.parameter]["step"]
            update_tensors(
                self._group_of[piece.parameter],
                [_local(piece.parameter).view(-1)[here]],
                [_local(piece.parameter.grad).contiguous().view(-1)[here]],
                [slot[0, there]],
                [slot[1, there]],
                # Each call counts; one update is one, into however many pieces it is cut.
                [step if piece.is_last else step.clone()],
            )

    def _update_the_rest(self) -> None:
        away = set(map(id, self._away))
        for group in self.param_groups:
            here = [one for one in group["params"] if id(one) not in away and one.grad is not None]
            if not here:
                continue
            states = [self.state[one] for one in here]
            update_tensors(
                group,
                here,
                [one.grad for one in here if one.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["step"] for state in states],
            )


def update_tensors(
    group: Mapping[str, Any],
    parameters: list[Tensor],
    gradients: list[Tensor],
    firsts: list[Tensor],
    seconds: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Update lists of tensors in place as ``torch.optim.AdamW.step`` does those of ``group``; ``steps`` count on."""
    beta1, beta2 = group["betas"]
    adamw(
        parameters,
        gradients,
        firsts,
        seconds,
        [],
        steps,
        foreach=group["foreach"],
        fused=group["fused"],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _cut(parameters: Sequence[Tensor], capacity: int) -> tuple[_Bucket, ...]:
    """Buckets of at most ``capacity`` elements: as many whole parameters as fit, or a part of one."""
    buckets: list[_Bucket] = []
    pieces: list[_Piece] = []
    first = place = 0

    def close() -> None:
        nonlocal first, pieces
        if pieces:
            buckets.append(_Bucket(first, place, tuple(pieces)))
        first, pieces = place, []

    for parameter in parameters:
        local = _local(parameter)
        assert local.is_contiguous(), "parts of a parameter are views"
        count = local.numel()
        if place - first + count > capacity:
            close()
        for start in range(0, count, capacity):
            end = min(start + capacity, count)
            pieces.append(_Piece(parameter, start, end, end == count))
            place += end - start
            if end < count:
                close()
    close()
    return tuple(buckets)


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows, where the tensor says that it is a part of one."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()
