"""Stretches of a forward pass whose tensors backward computes again, when it first asks for one of them.

A :class:`Segment` is one call of a function. What autograd saves inside goes through hooks
(``torch.autograd.graph.saved_tensors_hooks``), and a policy decides of each tensor: it stays, it is moved away, or it
is dropped and a place is left. When a place is asked for its tensor, the function runs once more with the same inputs
and random numbers and fills all places that are still there; it ends as soon as the last one is full. That is
``torch.utils.checkpoint`` without re-entrance, and one thing more: the segment's **outputs** can be dropped too. A norm
or an activation, whose output the next product saves, gives back that memory alone (Megatron-LM calls it checkpointing
without output). Whoever saves an output is seen by the hooks of a :class:`Layer` around its segments, which know an
output by its storage; an input of a segment that is another one's dropped output is held as its place.

The repeated pass is the same code on the same numbers, so gradients are equal to the bit. Collectives inside are
repeated as well; places are asked for in the order of backward, which is the same on all ranks.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, Protocol, Self, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = [
    "RECOMPUTE_SPAN",
    "Away",
    "Decision",
    "Layer",
    "MovedAway",
    "SavedTensor",
    "Segment",
    "TensorPolicy",
]

RECOMPUTE_SPAN: Final = "drivetrain/recompute/"
"""Begins the name of the region of a profile in which a forward pass is repeated; the segment's name follows."""

Decision: TypeAlias = Literal["keep", "recompute", "offload"]
"""What becomes of a tensor that backward needs: it stays; it is dropped and computed again; it is moved to host memory
and brought back."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that autograd is about to save.

    Attributes:
        segment: name of the segment it was made in, or None: it is saved outside and no segment's output.
        index: how many tensors its segment has saved before it; of an output, which one it is.
        is_output: it is saved outside of the segment, and has the storage of one of its outputs.
        shape, dtype, nbytes: of the tensor, which may be a part of a larger storage.
    """

    segment: str | None
    index: int
    is_output: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


TensorPolicy = Callable[[SavedTensor], Decision]
"""Decides of each tensor. What no segment has made cannot be computed again: ``keep`` or ``offload``."""


class MovedAway(Protocol):
    """A tensor that lies elsewhere."""

    def get(self) -> Tensor:
        """It, with the same shape, strides, dtype, device and values."""


class Away(Protocol):
    """Where the tensors of one layer are put."""

    def put(self, tensor: Tensor) -> MovedAway | Tensor:
        """What is left of ``tensor``; the tensor itself where it is to stay."""


class _Place:
    """What is left of a tensor that was dropped."""

    def __init__(self, segment: "Segment", tensor: Tensor) -> None:
        self._segment = segment
        self._kind = (tuple(tensor.shape), tensor.dtype)
        self._value: Tensor | None = None

    def fill(self, tensor: Tensor) -> None:
        kind = (tuple(tensor.shape), tensor.dtype)
        assert kind == self._kind, (
            f"the repeated {self._segment.name} saves {kind} where the first one saved {self._kind}"
        )
        self._value = tensor

    def get(self) -> Tensor:
        """The tensor; the place forgets it, so that it lives no longer than whoever asked."""
        if self._value is None:
            self._segment.repeat()
        value, self._value = self._value, None
        assert value is not None, f"the repeated {self._segment.name} saves less than the first one did"
        return value


class _OutputPlace(_Place):
    """The same of what has the storage of an output: it, or a view of it."""

    def __init__(self, segment: "Segment", tensor: Tensor) -> None:
        super().__init__(segment, tensor)
        self._view = (tensor.shape, tensor.stride(), tensor.storage_offset())

    def fill_from(self, output: Tensor) -> None:
        self.fill(output.as_strided(*self._view))


@dataclass(frozen=True)
class _Input:
    """A tensor that a segment was called with."""

    tensor: Tensor | _OutputPlace
    requires_grad: bool

    def again(self) -> Tensor:
        tensor = self.tensor.get() if isinstance(self.tensor, _OutputPlace) else self.tensor
        return tensor.detach().requires_grad_(self.requires_grad)


class _Enough(Exception):
    """Ends a repeated pass that has filled all places."""


class Segment:
    """One call of a function, made at once, that can be repeated.

    Args:
        name: for profiles and messages.
        function: positional arguments to a tensor or a tuple of them.
        arguments: tensors at the top level; what else there is, tensors in it too, is the same again.
        places: of arguments that are dropped outputs of other segments, by position.
        policy: decides of what is saved inside.
        away: where tensors are put that are moved away; needed where the policy asks for it.
        draws: whether the function draws random numbers, which must be the same again.
        stops_early: whether a repeated pass may be left in the middle; not where collectives may be under way then.

    Attributes:
        result: of the call; None once :meth:`forget_result` was called.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        policy: TensorPolicy,
        places: Mapping[int, _OutputPlace] | None = None,
        away: Away | None = None,
        draws: bool = False,
        stops_early: bool = True,
    ) -> None:
        self.name = name
        self._function = function
        self._policy = policy
        self._away = away
        self._stops_early = stops_early
        self._device = next((one.device for one in arguments if isinstance(one, Tensor)), torch.device("cpu"))
        self._random = _random_state(self._device) if draws else None
        # Weak: once autograd has let go of a place nobody needs its tensor, and with the last place the segment goes.
        self._places: list[weakref.ref[_Place] | None] = []
        self._output_places: dict[int, list[weakref.ref[_OutputPlace]]] = {}
        self._arguments = [
            _Input((places or {}).get(index, one.detach()), one.requires_grad)
            if isinstance(one, Tensor)
            else one
            for index, one in enumerate(arguments)
        ]
        with saved_tensors_hooks(self._pack, _unpack):
            self.result = function(*arguments)

    def forget_result(self) -> Any:
        """The result, which the segment no longer holds: its outputs live as long as others need them."""
        result, self.result = self.result, None
        return result

    def output_place(self, index: int, tensor: Tensor) -> _OutputPlace:
        """A place for ``tensor``, which has the storage of output ``index``."""
        place = _OutputPlace(self, tensor)
        self._output_places.setdefault(index, []).append(weakref.ref(place))
        return place

    def repeat(self) -> None:
        """Run the forward pass again; fill the places that are left."""
        arguments = [one.again() if isinstance(one, _Input) else one for one in self._arguments]
        wanted = [None if place is None else place() for place in self._places]
        last = max((index for index, place in enumerate(wanted) if place is not None), default=-1)
        outputs = [
            (index, place)
            for index, places in self._output_places.items()
            for reference in places
            if (place := reference()) is not None
        ]
        saved = 0

        def fill(tensor: Tensor) -> None:
            nonlocal saved
            index, saved = saved, saved + 1
            assert index < len(wanted), f"the repeated {self.name} saves more than the first one did"
            place = wanted[index]
            if place is not None:
                place.fill(tensor)
            if index == last and not outputs and self._stops_early:
                raise _Enough

        with (
            torch.profiler.record_function(RECOMPUTE_SPAN + self.name),
            _drawing_from(self._random, self._device),
            torch.enable_grad(),
            saved_tensors_hooks(fill, _never),
        ):
            try:
                result = self._function(*arguments)
            except _Enough:
                return
        found = _outputs(result)
        for index, output_place in outputs:
            output_place.fill_from(found[index].detach())

    def _pack(self, tensor: Tensor) -> Any:
        decision = self._policy(_described(tensor, self.name, len(self._places)))
        if decision == "recompute":
            place = _Place(self, tensor)
            self._places.append(weakref.ref(place))
            return place
        self._places.append(None)
        return _kept(tensor, decision, self._away)


class Layer:
    """Around the forward pass of a layer that has segments in it: sees who saves their outputs.

    Args:
        policy: decides of everything that is saved in the layer.
        away: where tensors are put that are moved away; needed where the policy asks for it.
    """

    def __init__(self, policy: TensorPolicy, away: Away | None = None) -> None:
        self._policy = policy
        self._away = away
        # Held until the layer has ended: another tensor cannot get the storage of one that was freed meanwhile.
        self._outputs: dict[int, tuple[Segment, int, Tensor]] = {}
        self._saved_outside = 0
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(exc_type, exc_value, traceback)
        self._outputs.clear()

    def run(
        self, name: str, function: Callable[..., Any], *arguments: Any, draws: bool, stops_early: bool
    ) -> Any:
        """``function(*arguments)`` as a segment of the layer."""
        places = {}
        for index, one in enumerate(arguments):
            if isinstance(one, Tensor) and (place := self._dropped(one)) is not None:
                places[index] = place
        segment = Segment(
            name,
            function,
            arguments,
            places=places,
            policy=self._policy,
            away=self._away,
            draws=draws,
            stops_early=stops_early,
        )
        result = segment.forget_result()
        for index, output in enumerate(_outputs(result)):
            self._outputs[_storage(output)] = (segment, index, output)
        return result

    def _pack(self, tensor: Tensor) -> Any:
        if (place := self._dropped(tensor)) is not None:
            return place
        index, self._saved_outside = self._saved_outside, self._saved_outside + 1
        decision = self._policy(_described(tensor, None, index))
        assert decision != "recompute", "what no segment has made cannot be computed again"
        return _kept(tensor, decision, self._away)

    def _dropped(self, tensor: Tensor) -> _OutputPlace | None:
        """The place of a segment's output that is not to stay."""
        found = self._outputs.get(_storage(tensor))
        if found is None:
            return None
        segment, index, _ = found
        if self._policy(_described(tensor, segment.name, index, is_output=True)) != "recompute":
            return None
        return segment.output_place(index, tensor)


def _described(tensor: Tensor, segment: str | None, index: int, *, is_output: bool = False) -> SavedTensor:
    return SavedTensor(segment, index, is_output, tuple(tensor.shape), tensor.dtype, tensor.nbytes)


def _kept(tensor: Tensor, decision: Decision, away: Away | None) -> Any:
    if decision == "keep":
        return tensor
    assert away is not None, "nothing moves tensors away"
    return away.put(tensor)


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    tensor: Tensor = packed.get()
    return tensor


def _never(_packed: object) -> NoReturn:
    raise AssertionError("the graph of a repeated forward pass is for nothing but its tensors")


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _random_state(device: torch.device) -> Tensor | None:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state() if device.type == "cpu" else None


@contextmanager
def _drawing_from(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Random numbers of ``device`` go on from ``state`` in the block, and behind it from where they were."""
    if state is None:
        yield
        return
    before = _random_state(device)
    assert before is not None
    _set_random_state(state, device)
    try:
        yield
    finally:
        _set_random_state(before, device)


def _set_random_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
