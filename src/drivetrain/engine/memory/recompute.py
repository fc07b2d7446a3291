"""Recomputation of layers, or of parts of them, put upon a decoder that is built: the model knows nothing of it.

The decoder runs its layers through :class:`Recomputation`, and its layers their named parts. Whole layers are segments
of one or several; selected parts are segments inside a layer. See :mod:`drivetrain.engine.memory.recompute_segments`
for what a segment is, and :mod:`drivetrain.engine.memory.recompute_choice` for what a run asks for.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.memory.recompute_segments import (
    Away,
    Decision,
    Layer,
    SavedTensor,
    Segment,
    TensorPolicy,
)
from drivetrain.engine.model.decoder import Block, Decoder
from drivetrain.engine.model.parts import Part

__all__ = ["WHOLE", "Plan", "Recomputation", "Share", "drop_segments"]

WHOLE = "block"
"""Name of the segment that whole layers are."""


def drop_segments(saved: SavedTensor) -> Decision:
    """The policy of a plain recomputation: what a segment has made is computed again, all else stays.

    The output of an MLP stays where somebody saves it: it would cost the last product and its collective.
    """
    if saved.segment is None or (saved.is_output and saved.segment == "mlp"):
        return "keep"
    return "recompute"


@dataclass(frozen=True)
class Share:
    """Neighbouring layers that are treated alike.

    Attributes:
        layers: names, in model order.
        whole: they are one segment.
        parts: the segments in each of them; none where ``whole``.
        policy: decides of each tensor that they save; None: they are left alone.
    """

    layers: tuple[str, ...]
    whole: bool = False
    parts: frozenset[Part] = frozenset()
    policy: TensorPolicy | None = None

    def __post_init__(self) -> None:
        assert not (self.whole and self.parts)
        assert self.policy is not None or not (self.whole or self.parts)


EnterAway = Callable[[], AbstractContextManager[Away | None]]

Plan = Callable[[Sequence[str]], Sequence[Share]]
"""From the layers that run one after the other on a rank (a stage) to shares of them, in order."""


class Recomputation:
    """Runs the layers of a decoder as a plan says.

    Args:
        decoder: is changed in place; after tensor parallelism and compilation.
        plan: what becomes of which layers.
        away: what a layer, or a segment of several, is run in, and where its tensors are put then that a policy moves
            away (:mod:`drivetrain.engine.memory.offload_activations`); None: no policy does.
        stops_early: whether repeated passes may be left in the middle; not with collectives in chunks, which are under
            way while others begin.
    """

    def __init__(
        self, decoder: Decoder, plan: Plan, *, away: EnterAway | None = None, stops_early: bool = True
    ) -> None:
        assert decoder.run_layers is None, "somebody else runs the layers already"
        model = decoder.model
        self._plan = plan
        self._enter_away: EnterAway = nullcontext if away is None else away
        self._stops_early = stops_early
        self._shares: dict[tuple[str, ...], Sequence[Share]] = {}
        self._draws = {
            WHOLE: bool(model.hidden_dropout or model.attention_dropout),
            "core_attn": bool(model.attention_dropout),
        }
        self._layer: Layer | None = None
        self._parts: frozenset[Part] = frozenset()
        decoder.run_layers = self._run_layers
        for share in plan(tuple(decoder.blocks)):
            for name in share.layers:
                self._attach(decoder.blocks[name], share.parts, compiled=decoder.blocks_are_compiled)

    def _attach(self, block: Any, parts: frozenset[Part], *, compiled: bool) -> None:
        assert isinstance(block, Block)
        if parts:
            # Each asks for the parts that it has.
            block.ways = block.mlp.ways = {part: self._way(part, compiled=compiled) for part in parts}

    def _way(self, part: Part, *, compiled: bool) -> Callable[..., Any]:
        def run(function: Callable[..., Any], *arguments: Any) -> Any:
            # No layer is around it in evaluation, and while a segment is repeated.
            if self._layer is None or part not in self._parts:
                return function(*arguments)
            return self._layer.run(
                part,
                function,
                *arguments,
                draws=self._draws.get(part, False),
                stops_early=self._stops_early,
            )

        return torch.compiler.disable(run) if compiled else run

    def _run_layers(self, names: Sequence[str], run: Callable[[str, Tensor], Tensor], x_TD: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return _in_turn(names, run, x_TD)
        key = tuple(names)
        if key not in self._shares:
            self._shares[key] = self._plan(key)
        for share in self._shares[key]:
            if share.whole:
                x_TD = self._as_segment(share, run, x_TD)
            elif share.policy is not None:
                x_TD = self._with_segments(share, run, x_TD)
            else:
                x_TD = _in_turn(share.layers, run, x_TD)
        return x_TD

    def _as_segment(self, share: Share, run: Callable[[str, Tensor], Tensor], x_TD: Tensor) -> Tensor:
        assert share.policy is not None
        with self._enter_away() as away:
            segment = Segment(
                WHOLE,
                lambda x: _in_turn(share.layers, run, x),
                (x_TD,),
                policy=share.policy,
                away=away,
                draws=self._draws[WHOLE],
                stops_early=self._stops_early,
            )
        out_TD: Tensor = segment.forget_result()
        return out_TD

    def _with_segments(self, share: Share, run: Callable[[str, Tensor], Tensor], x_TD: Tensor) -> Tensor:
        assert share.policy is not None
        for name in share.layers:
            with self._enter_away() as away, Layer(share.policy, away) as layer:
                self._layer, self._parts = layer, share.parts
                try:
                    x_TD = run(name, x_TD)
                finally:
                    self._layer, self._parts = None, frozenset()
        return x_TD


def _in_turn(names: Sequence[str], run: Callable[[str, Tensor], Tensor], x_TD: Tensor) -> Tensor:
    for name in names:
        x_TD = run(name, x_TD)
    return x_TD
