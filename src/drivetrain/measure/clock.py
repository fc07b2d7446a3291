"""The step clock: what each step took and did, and the two throughputs that follow from it.

*Steady* figures are over the steps of the steady state: after warm-up, and without a tag. *Wall* figures
are over everything since the clock was started, with the time between steps. Neither is ever called by
the other's name.

Warm-up is the first two steps of a segment (allocator, thread pools, first collectives); a step in which
something was compiled is tagged so by the loop, whenever it happens.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drivetrain.measure.flops import FLOPS_RULE
from drivetrain.measure.peaks import Peak
from drivetrain.measure.statistics import weighted_percentile

__all__ = [
    "MAINTENANCE_KINDS",
    "STEP_TAGS",
    "TOKEN_RULE",
    "WARMUP_STEPS",
    "StepClock",
    "StepTime",
    "Throughput",
    "WallThroughput",
]

STEP_TAGS = ("warmup", "compile", "checkpoint", "evaluation", "profile", "gc", "memory_count")
"""Tags that take a step out of the steady state."""
MAINTENANCE_KINDS = (
    "checkpoint",
    "evaluation",
    "profile",
    "compile",
    "memory_count",
    "weight_hash",
    "setup",
)
"""What the time between steps may be spent on."""
_STEADY_FIGURES = (
    "tokens_per_second",
    "effective_tokens_per_second",
    "mfu",
    "hfu",
    "effective_mfu",
    "flops_per_second_per_device",
    "step_time_s.p50",
    "step_time_s.p90",
    "step_time_s.max",
    "data_wait_frac",
    "communication_exposed_frac",
)
"""What is not known without a step of steady state."""
WARMUP_STEPS = 2
"""Steps at the start of a segment that are warm-up."""
TOKEN_RULE = "all tokens processed by all ranks, padding included; effective: tokens that carry loss"

_COLUMNS = (
    "num_steps",
    "duration_s",
    "data_wait_s",
    "exposed_comm_s",
    "tokens",
    "effective_tokens",
    "model_flops",
    "hardware_flops",
    "effective_flops",
)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step: median, 90th percentile, longest. None without a steady step."""

    p50: float | None
    p90: float | None
    max: float | None


@dataclass(frozen=True, slots=True)
class WallThroughput:
    """Over all steps and what lay between them."""

    seconds: float
    """All of it: steps, maintenance, and what is in neither when the caller knows the elapsed time."""
    steps_s: float
    maintenance_s: Mapping[str, float]
    """Seconds between steps, by kind."""
    tokens_per_second: float | None
    effective_tokens_per_second: float | None
    mfu: float | None
    hfu: float | None


@dataclass(frozen=True, slots=True)
class Throughput:
    """The steady figures of a run, the rules they were obtained by, and the wall figures beside them.

    Every figure that cannot be known is None; ``reasons`` says why, by name of the figure.
    """

    tokens_per_second: float | None
    """Of the whole job."""
    effective_tokens_per_second: float | None
    mfu: float | None
    """0 to 1."""
    hfu: float | None
    effective_mfu: float | None
    flops_per_second_per_device: float | None
    step_time_s: StepTime
    data_wait_frac: float | None
    """Share of the steady steps' time that went into waiting for data."""
    communication_exposed_frac: float | None
    """Share of the steady steps' time that went into waiting for collectives; None for one process."""
    num_steps: int
    """Steady steps."""
    window: str
    """For example ``steps 3-200 of steady state, 195 steps``."""
    wall: WallThroughput
    flops_rule: str
    token_rule: str
    peak_source: str | None
    reasons: Mapping[str, str]
    findings: tuple[str, ...]
    """Figures that cannot be true: MFU or HFU above 100%."""


class StepClock:
    """Collects one record per step (or per few steps) of one segment, as columns of numbers.

    Recording costs some microseconds and 73 bytes a record; nothing is computed until `summary`.
    """

    def __init__(self, warmup_steps: int = WARMUP_STEPS) -> None:
        assert warmup_steps >= 0
        self._warmup_steps = warmup_steps
        self._last_step = array("q")
        self._tags = array("B")
        self._columns: dict[str, array[float]] = {name: array("d") for name in _COLUMNS}
        self._has_exposed = array("b")
        self._steps_seen = 0
        self._maintenance_s: dict[str, float] = {}

    def record(
        self,
        step: int,
        duration_s: float,
        data_wait_s: float,
        exposed_comm_s: float | None,
        tokens: int,
        effective_tokens: int,
        model_flops: int,
        hardware_flops: int,
        tags: Sequence[str] = (),
        num_steps: int = 1,
    ) -> None:
        """Add a step, or `num_steps` steps that were timed together, ending with number `step`.

        Args:
            step: number of the (last) step; follows the previous record without gap or overlap.
            duration_s: wall time, of all `num_steps` together.
            data_wait_s: part of it spent waiting for batches.
            exposed_comm_s: part of it spent waiting for collectives; None where there are none.
            tokens: processed by all ranks, padding included.
            effective_tokens: those that carry loss.
            model_flops: of all ranks, by ``FLOPS_RULE``.
            hardware_flops: the same and what was recomputed.
            tags: from ``STEP_TAGS``. ``warmup`` is added here.
            num_steps: steps in this record.
        """
        assert num_steps >= 1
        assert duration_s >= 0
        assert 0 <= effective_tokens <= tokens
        if self._last_step:
            assert step == self._last_step[-1] + num_steps, (step, self._last_step[-1], num_steps)
        unknown = set(tags) - set(STEP_TAGS)
        assert not unknown, f"unknown step tags {sorted(unknown)}"
        bits = sum(1 << STEP_TAGS.index(tag) for tag in set(tags))
        if self.warming_up:
            bits |= 1 << STEP_TAGS.index("warmup")
        self._steps_seen += num_steps
        self._last_step.append(step)
        self._tags.append(bits)
        self._has_exposed.append(exposed_comm_s is not None)
        values = (
            num_steps,
            duration_s,
            data_wait_s,
            exposed_comm_s or 0.0,
            tokens,
            effective_tokens,
            model_flops,
            hardware_flops,
            model_flops * effective_tokens / tokens if tokens else 0.0,
        )
        for name, value in zip(_COLUMNS, values, strict=True):
            self._columns[name].append(value)

    @property
    def warmup_steps(self) -> int:
        """Steps at the start that are warm-up."""
        return self._warmup_steps

    @property
    def warming_up(self) -> bool:
        """Whether the next step that is recorded is warm-up."""
        return self._steps_seen < self._warmup_steps

    def durations_s(self, first: int, last: int, *, tags: Sequence[str] = ()) -> list[float]:
        """Seconds of each step from ``first`` to ``last`` that has exactly these tags, in order.

        Steps that were not recorded, or timed together with others, are left out.
        """
        bits = sum(1 << STEP_TAGS.index(tag) for tag in set(tags))
        durations, counts = self._columns["duration_s"], self._columns["num_steps"]
        return [
            durations[index]
            for index, step in enumerate(self._last_step)
            if first <= step <= last and self._tags[index] == bits and counts[index] == 1
        ]

    def maintenance(self, kind: str, seconds: float) -> None:
        """Add time between steps, in which training stood still: an evaluation, a checkpoint."""
        assert kind in MAINTENANCE_KINDS, f"unknown kind of maintenance {kind!r}"
        assert seconds >= 0
        self._maintenance_s[kind] = self._maintenance_s.get(kind, 0.0) + seconds

    def summary(
        self,
        world_size: int,
        peak_flops: Peak | None,
        *,
        elapsed_s: float | None = None,
        peak_reason: str | None = None,
    ) -> Throughput:
        """Steady and wall figures of what was recorded so far.

        Args:
            world_size: devices; one process each.
            peak_flops: dense peak of one device. None: no MFU.
            elapsed_s: wall time since the clock was started, where the caller knows it. Otherwise the wall
                time is the sum of steps and maintenance.
            peak_reason: why there is no peak.
        """
        assert world_size >= 1
        indices = [index for index, bits in enumerate(self._tags) if bits == 0]
        capacity = peak_flops.value * world_size if peak_flops is not None else None
        steady = _Rates(self, indices, self._sum("duration_s", indices), capacity)
        mfu, hfu = steady.utilisation("model_flops"), steady.utilisation("hardware_flops")
        flops_per_second = steady.rate("model_flops")
        communicates = world_size > 1 and all(self._has_exposed[index] for index in indices)
        return Throughput(
            tokens_per_second=steady.rate("tokens"),
            effective_tokens_per_second=steady.rate("effective_tokens"),
            mfu=mfu,
            hfu=hfu,
            effective_mfu=steady.utilisation("effective_flops"),
            flops_per_second_per_device=None if flops_per_second is None else flops_per_second / world_size,
            step_time_s=self._step_time(indices),
            data_wait_frac=steady.rate("data_wait_s"),
            communication_exposed_frac=steady.rate("exposed_comm_s") if communicates else None,
            num_steps=int(self._sum("num_steps", indices)),
            window=self._window(indices),
            wall=self._wall(elapsed_s, capacity),
            flops_rule=FLOPS_RULE,
            token_rule=TOKEN_RULE,
            peak_source=peak_flops.source if peak_flops is not None else None,
            reasons=self._reasons(indices, world_size, peak_flops, peak_reason),
            findings=_findings(mfu, hfu),
        )

    def _wall(self, elapsed_s: float | None, capacity: float | None) -> WallThroughput:
        everything = range(len(self._tags))
        steps_s = self._sum("duration_s", everything)
        known_s = steps_s + sum(self._maintenance_s.values())
        # A device's clock and the host's differ a little: what was recorded is never left out.
        seconds = known_s if elapsed_s is None else max(elapsed_s, known_s)
        rates = _Rates(self, everything, seconds, capacity)
        return WallThroughput(
            seconds=seconds,
            steps_s=steps_s,
            maintenance_s=dict(self._maintenance_s),
            tokens_per_second=rates.rate("tokens"),
            effective_tokens_per_second=rates.rate("effective_tokens"),
            mfu=rates.utilisation("model_flops"),
            hfu=rates.utilisation("hardware_flops"),
        )

    def _sum(self, column: str, indices: Sequence[int]) -> float:
        values = self._columns[column]
        return float(sum(values[index] for index in indices))

    def _step_time(self, steady: Sequence[int]) -> StepTime:
        if not steady:
            return StepTime(None, None, None)
        counts = [int(self._columns["num_steps"][index]) for index in steady]
        durations = self._columns["duration_s"]
        # Steps that were timed together can only be given their mean: dividing by the steps that elapsed,
        # not by the logging interval.
        times = [durations[index] / count for index, count in zip(steady, counts, strict=True)]
        return StepTime(
            p50=weighted_percentile(times, counts, 0.5),
            p90=weighted_percentile(times, counts, 0.9),
            max=max(times),
        )

    def _window(self, steady: Sequence[int]) -> str:
        if not steady:
            return "no step of steady state"
        first = self._last_step[steady[0]] - int(self._columns["num_steps"][steady[0]]) + 1
        count = int(self._sum("num_steps", steady))
        steps = "1 step" if count == 1 else f"{count} steps"
        return f"steps {first}-{self._last_step[steady[-1]]} of steady state, {steps}"

    def _reasons(
        self, steady: Sequence[int], world_size: int, peak: Peak | None, peak_reason: str | None
    ) -> dict[str, str]:
        reasons: dict[str, str] = {}
        if peak is None:
            no_peak = peak_reason or "the peak of the device is not known"
            reasons |= dict.fromkeys(("mfu", "hfu", "effective_mfu"), no_peak)
        if not steady:
            no_steady_step = (
                f"each of the {self._steps_seen} steps is tagged, or warm-up "
                f"(the first {self._warmup_steps} of a segment)"
                if self._steps_seen
                else "no step was recorded"
            )
            reasons |= dict.fromkeys(_STEADY_FIGURES, no_steady_step)
        if world_size == 1:
            reasons["communication_exposed_frac"] = "one process: nothing to communicate"
        elif steady and not all(self._has_exposed[index] for index in steady):
            reasons["communication_exposed_frac"] = "the wait for collectives was not measured in every step"
        return reasons


@dataclass(frozen=True, slots=True)
class _Rates:
    """Sums of columns over some records, per second."""

    clock: StepClock
    indices: Sequence[int]
    seconds: float
    capacity: float | None
    """FLOP/s of all devices at their peak."""

    def rate(self, column: str) -> float | None:
        """Of the column's unit per second; None when no time passed."""
        return self.clock._sum(column, self.indices) / self.seconds if self.seconds > 0 else None

    def utilisation(self, column: str) -> float | None:
        """Share of the peak; None without a peak."""
        rate = self.rate(column)
        return None if rate is None or self.capacity is None else rate / self.capacity


def _findings(mfu: float | None, hfu: float | None) -> tuple[str, ...]:
    return tuple(
        f"{name} of {value:.1%} is impossible: the peak, the time or the count is wrong"
        for name, value in (("MFU", mfu), ("HFU", hfu))
        if value is not None and value > 1
    )
