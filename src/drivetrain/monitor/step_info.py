"""The facts of one step, in one frozen object."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["StepInfo"]


@dataclass(frozen=True)
class StepInfo:
    """One optimizer step as the monitor sees it.

    Attributes:
        step: number of optimizer steps done, counting this one.
        total_steps: steps the run will have at its end.
        samples: sequences consumed so far over all ranks.
        global_batch_size: sequences in this step.
        metrics: values by key of the metric registry; ``None`` where a value is unknown.
        tags: why the step is no steady state (``warmup``, ``compile``, ``gc``, ...), empty otherwise; of all steps
            since the last record.
    """

    step: int
    total_steps: int
    samples: int
    global_batch_size: int
    metrics: Mapping[str, float | None]
    tags: tuple[str, ...] = field(default=())
