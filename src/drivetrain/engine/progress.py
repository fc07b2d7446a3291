"""How far a run has come: the counters that a checkpoint keeps and a resumed run continues."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from drivetrain.errors import CheckpointError

__all__ = ["LOSS_EMA_DECAY", "Progress"]

LOSS_EMA_DECAY = 0.98
"""The smoothed loss looks back over about fifty steps."""


@dataclass
class Progress:
    """Counters over all ranks since the run's first step.

    Attributes:
        step: optimizer steps done.
        samples: sequences consumed.
        tokens: tokens processed.
        effective_tokens: tokens that carried loss.
        model_flops: model FLOPs spent (rule: ``measure.flops.FLOPS_RULE``).
        loss_ema_sum, loss_ema_weight: numerator and denominator of the smoothed loss.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    effective_tokens: int = 0
    model_flops: int = 0
    loss_ema_sum: float = 0.0
    loss_ema_weight: float = 0.0

    def smooth(self, loss: float) -> float:
        """Take a step's loss into the moving average; returns the average, free of start-up bias."""
        self.loss_ema_sum = LOSS_EMA_DECAY * self.loss_ema_sum + (1 - LOSS_EMA_DECAY) * loss
        self.loss_ema_weight = LOSS_EMA_DECAY * self.loss_ema_weight + (1 - LOSS_EMA_DECAY)
        return self.loss_ema_sum / self.loss_ema_weight

    def to_dict(self) -> dict[str, int | float]:
        """The counters as JSON holds them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, object]) -> "Progress":
        """The counters of a checkpoint; CheckpointError names one that is missing or no number."""
        values: dict[str, int | float] = {}
        for field in fields(cls):
            value = state.get(field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise CheckpointError(
                    f"the checkpoint's state has {field.name}={value!r}; a number is expected"
                )
            values[field.name] = float(value) if field.name.startswith("loss_") else int(value)
        return cls(**values)  # type: ignore[arg-type]
