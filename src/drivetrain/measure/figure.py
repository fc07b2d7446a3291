"""One training figure – so many tokens in so much time on such devices – under every rule.

This is the arithmetic of ``drivetrain mfu``: our own count, other tools' counts with what they are worth,
and whether the figure can be true at all.
"""

from dataclasses import dataclass

from drivetrain.config.model import ModelConfig
from drivetrain.errors import DrivetrainError
from drivetrain.measure.flops import FlopCount, Recompute, hardware_flops, model_flops
from drivetrain.measure.peaks import Peak
from drivetrain.measure.rules_of_others import RULES_OF_OTHERS, judge

__all__ = ["FigureUnderRule", "TrainingFigure", "UtilisationAnswer", "utilisation"]

_RATES_AGREE_WITHIN = 0.02
"""Step time and tokens/s are printed with two or three digits; a larger difference is a contradiction."""
_LARGEST_COUNT = 10**15
_SMALLEST_RATE, _LARGEST_RATE = 1e-18, 1e24
"""Bounds far outside anything real, within which no product or quotient overflows a float."""
_CREDIBLE = 0.9
"""Best sustained matrix products measured on any device of the table: 87% of the data sheet (A100-SXM,
ml-engineering's MAMF). A whole training step above 90% is a mistake, even below 100%."""


@dataclass(frozen=True, slots=True)
class TrainingFigure:
    """A claim about a training run. At least one of `step_time_s` and `tokens_per_second` is given."""

    model: ModelConfig
    seq_length: int
    """Tokens in a sequence."""
    global_batch_size: int
    """Sequences in a step, over all devices."""
    devices: int
    peak: Peak
    recompute: Recompute = "none"
    step_time_s: float | None = None
    tokens_per_second: float | None = None
    """Of the whole job, not of one device."""

    def __post_init__(self) -> None:
        rates = {"step time": self.step_time_s, "tokens per second": self.tokens_per_second}
        if all(value is None for value in rates.values()):
            raise DrivetrainError(
                "neither a step time nor tokens per second is given: one of them is needed, "
                "for example --step-time 2.4 (seconds)"
            )
        counts = {
            "sequence length": self.seq_length,
            "global batch size": self.global_batch_size,
            "number of devices": self.devices,
        }
        for name, count in counts.items():
            if count < 1:
                raise DrivetrainError(f"a {name} of {count}: it must be at least 1")
            if count > _LARGEST_COUNT:
                raise DrivetrainError(
                    f"a {name} of more than {_LARGEST_COUNT:g}: the most is {_LARGEST_COUNT:g}"
                )
        for name, value in rates.items():
            if value is not None and not _SMALLEST_RATE <= value <= _LARGEST_RATE:
                raise DrivetrainError(
                    f"a {name} of {value}: it must be a positive number, "
                    f"between {_SMALLEST_RATE:g} and {_LARGEST_RATE:g}"
                )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.seq_length * self.global_batch_size

    @property
    def seconds(self) -> float:
        """Time of one step: as given, or from tokens per second."""
        if self.step_time_s is not None:
            return self.step_time_s
        assert self.tokens_per_second is not None
        return self.tokens_per_step / self.tokens_per_second


@dataclass(frozen=True, slots=True)
class FigureUnderRule:
    """The same figure as another rule has it."""

    rule: str
    text: str
    used_by: str
    mfu: float
    verdict: str


@dataclass(frozen=True, slots=True)
class UtilisationAnswer:
    """What the figure amounts to. Utilisations are shares (1 is the peak)."""

    causal: FlopCount
    """Model FLOPs of a step, by our rule."""
    full_attention: FlopCount
    """The same with attention over the whole square."""
    hardware: FlopCount
    """Model FLOPs (causal) and what is recomputed."""
    mfu_causal: float
    mfu_full_attention: float
    hfu: float
    tokens_per_second: float
    others: tuple[FigureUnderRule, ...]
    impossible_because: tuple[str, ...]
    """Why the figure cannot be true; empty when it can."""
    doubtful_because: tuple[str, ...]
    """Why nobody should believe it, though no law forbids it."""

    @property
    def impossible(self) -> bool:
        """Whether anything contradicts the figure."""
        return bool(self.impossible_because)

    @property
    def findings(self) -> tuple[str, ...]:
        """All that is wrong with the figure, each with the word for it."""
        return (
            *(f"impossible: {reason}" for reason in self.impossible_because),
            *(f"not credible: {reason}" for reason in self.doubtful_because),
        )

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.findings:
            return "; ".join(self.findings)
        if self.mfu_full_attention > 1:
            return "possible; only the count with full attention exceeds 100%, by work that is masked out"
        return "possible"


def utilisation(figure: TrainingFigure) -> UtilisationAnswer:
    """MFU and HFU of `figure` under every rule, and whether it can be true."""
    tokens = figure.tokens_per_step
    squares = tokens * figure.seq_length
    causal = model_flops(figure.model, tokens=tokens, sum_squared_lengths=squares)
    full = model_flops(figure.model, tokens=tokens, sum_squared_lengths=squares, causal=False)
    hardware = hardware_flops(
        figure.model, tokens=tokens, sum_squared_lengths=squares, recompute=figure.recompute
    )
    capacity = figure.seconds * figure.devices * figure.peak.value
    mfu, hfu = causal.total / capacity, hardware.total / capacity
    return UtilisationAnswer(
        causal=causal,
        full_attention=full,
        hardware=hardware,
        mfu_causal=mfu,
        mfu_full_attention=full.total / capacity,
        hfu=hfu,
        tokens_per_second=tokens / figure.seconds,
        others=_others(figure, capacity),
        impossible_because=(*_contradiction(figure), *_above_peak(figure, mfu, hfu)),
        doubtful_because=_above_credible(mfu, hfu),
    )


def _others(figure: TrainingFigure, capacity: float) -> tuple[FigureUnderRule, ...]:
    found = []
    for rule in RULES_OF_OTHERS:
        flops = rule.flops_per_token(figure.model, figure.seq_length) * figure.tokens_per_step
        _, verdict = judge(rule, figure.model, figure.seq_length)
        share = flops / capacity
        if share > 1:
            verdict += f"; a figure of {share:.0%} is impossible"
        found.append(FigureUnderRule(rule.name, rule.text, rule.used_by, share, verdict))
    return tuple(found)


def _contradiction(figure: TrainingFigure) -> tuple[str, ...]:
    """Step time and tokens/s of the same run fix the tokens of a step; they must be those of the batch."""
    if figure.step_time_s is None or figure.tokens_per_second is None:
        return ()
    implied = figure.step_time_s * figure.tokens_per_second
    if abs(implied / figure.tokens_per_step - 1) <= _RATES_AGREE_WITHIN:
        return ()
    return (
        f"{figure.tokens_per_second:,.6g} tokens/s and {figure.step_time_s:.6g} s a step are {implied:,.0f} "
        f"tokens a step, but {figure.global_batch_size:,} x {figure.seq_length:,} are "
        f"{figure.tokens_per_step:,}",
    )


def _above_peak(figure: TrainingFigure, mfu: float, hfu: float) -> tuple[str, ...]:
    remedy = "check the time, the batch, the number of devices and the peak"
    if mfu > 1:
        return (f"MFU {mfu:.1%}: more than the devices can do; {remedy}",)
    if hfu > 1:
        return (
            f"HFU {hfu:.1%}: MFU {mfu:.1%} alone would be possible, but with {figure.recompute} "
            f"recomputation the devices would have done more than they can; {remedy}",
        )
    return ()


def _above_credible(mfu: float, hfu: float) -> tuple[str, ...]:
    if max(mfu, hfu) > 1:
        return ()
    name, share = ("MFU", mfu) if mfu > _CREDIBLE else ("HFU", hfu)
    if share <= _CREDIBLE:
        return ()
    return (
        f"{name} {share:.1%} of a data-sheet peak: no device was measured above 87% even in a single large "
        "matrix product (a measured peak may be reached more closely)",
    )
