"""What a run says of its data: the order it reads, what building batches takes, and which operation is the slow one."""

from collections.abc import Collection
from typing import Any

from drivetrain.config import DataConfig
from drivetrain.config.blend import transform_paths
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.data.timing import READ

__all__ = ["DataReport"]

WORTH_SAYING = 0.1
"""Share of the steps from which waiting for batches is a warning."""
WORTH_SAYING_S = 1e-3
"""Seconds of a step from which it is."""
STEPS_BEFORE = 10
"""Steady steps before which nothing is said."""


class DataReport:
    """Watches the loader of one segment's training batches.

    Attributes:
        waited_s, stepped_s: waiting for batches, and all time, of the steady steps that were recorded.
    """

    def __init__(self, loader: BatchLoader, data: DataConfig, start_sample: int) -> None:
        self._loader = loader
        self._data = data
        self._start_sample = start_sample
        self._transforms = (*transform_paths(data.transform), *transform_paths(data.batch_transform))
        self._before: dict[str, float] = {}
        self._steps = 0
        self._said = False
        self.waited_s = 0.0
        self.stepped_s = 0.0

    def at_start(self) -> dict[str, Any]:
        """Fields of the event ``data`` of a segment's start."""
        loader = self._loader
        return {
            "order_hash": loader.samples.order_hash(),
            "start_sample": self._start_sample,
            "samples_per_epoch": loader.samples_per_epoch,
            "tokens_per_epoch": loader.tokens_per_epoch,
            "packing": self._data.packing,
            "padding_frac": loader.samples.padding_fraction,
        }

    def at_end(self) -> dict[str, Any]:
        """Fields of the event ``data`` of a segment's end."""
        building = self._loader.building
        whole = sum(building.seconds.values())
        return {
            "data_wait_frac": self.data_wait_frac,
            "micro_batches": building.batches,
            "built_rows": building.built_rows,
            "cached_rows": building.cached_rows,
            "slowest": building.slowest,
            "operations": {
                name: {
                    "seconds_per_micro_batch": seconds / building.batches,
                    "share": seconds / whole if whole else 0.0,
                }
                for name, seconds in sorted(building.seconds.items(), key=lambda item: -item[1])
            },
        }

    @property
    def data_wait_frac(self) -> float | None:
        """Waiting for batches over the time of steady steps; None before the first of them."""
        return self.waited_s / self.stepped_s if self.stepped_s else None

    def metrics(
        self, steps: int, waited_s: float, stepped_s: float, tags: Collection[str]
    ) -> dict[str, float]:
        """Metrics of the batches taken since the last call, as a mean over ``steps``; the times are sums over them."""
        now = dict(self._loader.building.seconds)
        new = {name: seconds - self._before.get(name, 0.0) for name, seconds in now.items()}
        self._before = now
        if not tags:
            self.waited_s += waited_s
            self.stepped_s += stepped_s
            self._steps += steps
        return {
            "data/build_s": sum(new.values()) / steps,
            "data/read_s": new.get(READ, 0.0) / steps,
            "data/transform_s": sum(new.get(path, 0.0) for path in self._transforms) / steps,
        }

    def finding(self) -> str | None:
        """What is to be said of waiting for batches; None: it is nothing to speak of."""
        share, building = self.data_wait_frac, self._loader.building
        slowest = building.slowest
        if share is None or slowest is None or self._steps < STEPS_BEFORE:
            return None
        if share < WORTH_SAYING or self.waited_s < WORTH_SAYING_S * self._steps:
            return None
        milliseconds = 1e3 * building.seconds[slowest] / building.batches
        part = building.seconds[slowest] / sum(building.seconds.values())
        return (
            f"{share:.0%} of a step is waiting for batches; the slowest operation of building them is "
            f"{self._in_words(slowest)}: {milliseconds:.3g} ms a micro-batch, {part:.0%} of all"
        )

    def news(self) -> str | None:
        """:meth:`finding`, the first time there is one; None ever after. Costs nothing."""
        if self._said:
            return None
        found = self.finding()
        self._said = found is not None
        return found

    def _in_words(self, operation: str) -> str:
        for field, paths in (
            ("data.transform", transform_paths(self._data.transform)),
            ("data.batch_transform", transform_paths(self._data.batch_transform)),
        ):
            if operation in paths:
                return f"{operation} of {field}"
        return operation
