"""The factor that a loss is multiplied by before it is differentiated, so that small gradients survive in fp16.

fp16 holds no magnitude below 2^-24, and many gradients of a network lie there (Micikevicius et al. 2018, arXiv
1710.03740, section 3.2). Multiplied by a power of two they don't, and dividing the fp32 gradients by it again is exact.
A factor that is too large makes gradients overflow; such a step is skipped, and the factor falls.

When it falls and grows is Megatron-Core's ``DynamicGradScaler``: each overflow takes one from the hysteresis; with none
of it left the scale halves, down to the least; ``loss_scale_window`` steps in a row without overflow double it and
bring the hysteresis back. (Overflows need not follow each other to use it up: only growth restores it.)
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from drivetrain.config.execution import PrecisionConfig
from drivetrain.errors import CheckpointError

__all__ = ["GIVES_UP_AFTER", "LARGEST_SCALE", "LossScaler"]

GIVES_UP_AFTER = 3
"""Skipped steps in a row that no smaller scale can mend: at the least scale, or with a loss that is not finite."""

LARGEST_SCALE = 2.0**100
"""Where gradients are zero for ever nothing overflows: the scale stops before fp32 ends."""


@dataclass
class _State:
    """What a checkpoint keeps.

    Attributes:
        scale: that the coming step is scaled by.
        steps_without_overflow: since the last overflow, or since the scale last grew.
        hysteresis_left: overflows until the scale falls; not above 0: the next one does.
        skipped_steps: of the run.
        hopeless_overflows, hopeless_losses: skipped steps in a row at the least scale, and with a loss that is not
            finite.
    """

    scale: float
    steps_without_overflow: int = 0
    hysteresis_left: int = 1
    skipped_steps: int = 0
    hopeless_overflows: int = 0
    hopeless_losses: int = 0


class LossScaler:
    """The loss scale of a run in fp16. Plain numbers on the host, the same on every rank."""

    def __init__(self, precision: PrecisionConfig) -> None:
        """Dynamic from ``initial_loss_scale`` on, or constant where ``loss_scale`` is given."""
        self._constant = precision.loss_scale
        self._least = precision.min_loss_scale if self._constant is None else self._constant
        self._window = precision.loss_scale_window
        self._hysteresis = precision.hysteresis
        start = precision.initial_loss_scale if self._constant is None else self._constant
        self._state = _State(scale=start, hysteresis_left=self._hysteresis)

    @property
    def scale(self) -> float:
        """What the loss of the coming step is multiplied by: a power of two."""
        return self._state.scale

    @property
    def skipped_steps(self) -> int:
        """Steps of the run that overflowed, and changed no weight."""
        return self._state.skipped_steps

    @property
    def hysteresis_left(self) -> int:
        """Overflows after which the scale falls, counting the one that makes it fall; at least 1."""
        return max(1, self._state.hysteresis_left)

    @property
    def failure(self) -> str | None:
        """Why no smaller scale can help any more; None: training goes on."""
        state = self._state
        if state.hopeless_losses >= GIVES_UP_AFTER:
            return (
                f"the loss was not finite in {state.hopeless_losses} steps in a row, which no loss scale mends: what "
                "the model computes does not fit fp16, whose largest number is 65504; use precision.params_dtype=bf16"
            )
        if state.hopeless_overflows >= GIVES_UP_AFTER:
            given = (
                f"precision.min_loss_scale = {self._least:g}"
                if self._constant is None
                else f"precision.loss_scale = {self._least:g}, which never falls"
            )
            return (
                f"gradients overflowed in {state.hopeless_overflows} steps in a row at the least loss scale ({given}); "
                "lower it or optimizer.lr, or use precision.params_dtype=bf16"
            )
        return None

    def update(self, *, overflow: bool, finite_loss: bool = True) -> None:
        """Take what became of a step that was scaled by :attr:`scale`.

        Args:
            overflow: its gradients were not finite somewhere, and it was skipped.
            finite_loss: its loss was, on every rank.
        """
        state = self._state
        if not overflow:
            state.hopeless_overflows = state.hopeless_losses = 0
            state.steps_without_overflow += 1
            # A checkpoint may come from a run with a longer window.
            if state.steps_without_overflow >= self._window:
                state.steps_without_overflow = 0
                state.hysteresis_left = self._hysteresis
                if self._constant is None:
                    state.scale = min(2.0 * state.scale, LARGEST_SCALE)
            return
        state.skipped_steps += 1
        state.hopeless_losses = 0 if finite_loss else state.hopeless_losses + 1
        state.hopeless_overflows = state.hopeless_overflows + 1 if state.scale <= self._least else 0
        state.steps_without_overflow = 0
        state.hysteresis_left -= 1
        if state.hysteresis_left <= 0:
            state.scale = max(0.5 * state.scale, self._least)

    def to_dict(self) -> dict[str, int | float]:
        """The state as JSON holds it."""
        return asdict(self._state)

    def restore(self, saved: Mapping[str, object]) -> None:
        """Go on from the state of a checkpoint. A constant scale stays what it is; a dynamic one is at least the least.

        Raises:
            CheckpointError: a number is missing, or is none.
        """
        values: dict[str, int | float] = {}
        for field in fields(_State):
            value = saved.get(field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise CheckpointError(
                    f"the checkpoint's loss scaler has {field.name}={value!r}; a number is expected"
                )
            values[field.name] = float(value) if field.name == "scale" else int(value)
        self._state = _State(**values)  # type: ignore[arg-type]
        self._state.scale = max(self._state.scale, self._least) if self._constant is None else self._constant
