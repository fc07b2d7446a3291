"""Whether several processes train what one does: gradients of the first step, losses, and weights after a few steps.

Another layout adds up the same numbers in another order, so that bits differ and nothing else may. How far that goes is
known of gradients: 1e-5 of their norm in fp32, two epsilons of a narrower compute dtype. Losses and weights follow from
the optimizer as well, and AdamW turns an element whose gradient is mere round-off into a step of full size. Where a
difference is above its tolerance, runs of one process from weights that were moved by one unit in the last place say
what round-off does to this training: three times as much as the worst of them is allowed, as in the gate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from drivetrain.tune.gate_roundoff import FACTOR, GRADIENT_EPSILONS, LEAST_PERTURBATIONS

__all__ = [
    "LEAST_PERTURBATIONS",
    "TOLERANCE",
    "Comparison",
    "Difference",
    "TrainedSteps",
    "compare_with_one_process",
]

TOLERANCE = 1e-5
"""Relative difference that always counts as round-off of fp32 sums."""
_ROUND_OFF_OF_NORM = 100 * 2.0**-23
"""Share of the norm of all gradients below which one gradient is nothing but round-off."""
_NOISE = 1.0
"""A limit of the whole norm or more: the quantity is noise already in one process, and compares with nothing."""
_AT_ONCE = 1 << 20

What = Literal["loss", "gradient", "parameter"]
Arrays = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class TrainedSteps:
    """What a short run leaves to be compared.

    Attributes:
        losses: nats per token, by step; None where no token of a step carries loss.
        gradients: of step 1 before clipping, whole, fp32, by parameter name.
        parameters: after the last step, whole, fp32, by the same names.
    """

    losses: Sequence[float | None]
    gradients: Arrays
    parameters: Arrays


@dataclass(frozen=True)
class Difference:
    """One quantity of several processes against that of one.

    Attributes:
        name: of the parameter; ``step 2`` for a loss.
        value: relative difference: of a tensor ``|t - t0| / |t0|`` in the 2-norm; infinite where one is missing or not
            a number.
        limit: what counts as round-off.
    """

    what: What
    name: str
    value: float
    limit: float

    @property
    def is_within(self) -> bool:
        """Whether it counts as round-off."""
        return math.isfinite(self.value) and self.value <= self.limit

    @property
    def share(self) -> float:
        """How much of its limit it uses."""
        if not math.isfinite(self.value):
            return math.inf
        return self.value / self.limit if math.isfinite(self.limit) else 0.0

    @property
    def is_noise(self) -> bool:
        """Whether one process, disturbed by round-off, changes it as much as it is large."""
        return self.limit >= _NOISE

    def to_document(self) -> dict[str, Any]:
        """For ``--json``; infinite numbers are null."""
        return {"name": self.name, "difference": _finite(self.value), "limit": _finite(self.limit)}


@dataclass(frozen=True)
class Comparison:
    """All differences, and what they say.

    Attributes:
        differences: losses by step, then gradients and parameters in the order of the run of one process.
        verdict: ``undecided``: something exceeds its tolerance, and there is no envelope of perturbed runs yet;
            ``withheld``: with it most gradients are noise.
        why: in words.
    """

    differences: Sequence[Difference]
    verdict: Literal["agree", "differ", "undecided", "withheld"]
    why: str

    def of(self, what: What) -> list[Difference]:
        """Differences of one kind, the one that uses most of its limit first."""
        return sorted((one for one in self.differences if one.what == what), key=lambda one: -one.share)


def compare_with_one_process(
    alone: TrainedSteps, several: TrainedSteps, perturbed: Sequence[TrainedSteps] = (), *, epsilon: float
) -> Comparison:
    """Hold ``several`` against ``alone``.

    Args:
        perturbed: runs of one process from perturbed weights: none, or :data:`LEAST_PERTURBATIONS` at least.
        epsilon: distance from 1 to the next number of the compute dtype.
    """
    assert not perturbed or len(perturbed) >= LEAST_PERTURBATIONS, f"{len(perturbed)} runs make no envelope"
    found = _relative_differences(alone, several)
    scattered = [_relative_differences(alone, run) for run in perturbed]
    differences = []
    for (what, name), value in found.items():
        limit = max(TOLERANCE, GRADIENT_EPSILONS * epsilon if what == "gradient" else 0.0)
        if scattered:
            limit = max(limit, FACTOR * max(one.get((what, name), 0.0) for one in scattered))
        differences.append(Difference(what, name, value, limit))
    return _judge(differences, len(perturbed))


def _judge(differences: Sequence[Difference], perturbations: int) -> Comparison:
    beyond = [one for one in differences if not one.is_within]
    gradients = [one for one in differences if one.what == "gradient"]
    noise = sum(one.is_noise for one in gradients)
    if 2 * noise > len(gradients):
        why = (
            f"{noise} of {len(gradients)} gradients change by their whole size when one process starts from weights "
            "moved by one unit in the last place: they compare with nothing"
        )
        return Comparison(differences, "withheld", why)
    if beyond:
        worst = max(beyond, key=lambda one: one.share)
        what = "the loss of" if worst.what == "loss" else f"the {worst.what}"
        why = (
            f"{len(beyond)} of {len(differences)} quantities differ by more than round-off, most of all {what} "
            f"{worst.name}, by {worst.value:.2g} where {worst.limit:.2g} is allowed"
        )
        return Comparison(differences, "differ" if perturbations else "undecided", why)
    measure = (
        f"what {perturbations} perturbed runs of one process allow" if perturbations else "the tolerances"
    )
    why = f"losses, gradients of step 1 and parameters are within {measure}"
    noisy = [
        f"{count} {what}s"
        for what in ("gradient", "parameter")
        if (count := sum(one.is_noise for one in differences if one.what == what))
    ]
    if noisy:
        why += f"; {' and '.join(noisy)} compare with nothing: they are noise in one process as well"
    return Comparison(differences, "agree", why)


def _relative_differences(reference: TrainedSteps, other: TrainedSteps) -> dict[tuple[What, str], float]:
    found: dict[tuple[What, str], float] = {}
    for step in range(1, max(len(reference.losses), len(other.losses)) + 1):
        pair = [run.losses[step - 1] if step <= len(run.losses) else math.nan for run in (reference, other)]
        found["loss", f"step {step}"] = _of_losses(*pair)
    for name, value in _of_tensors(reference.gradients, other.gradients, gradients=True).items():
        found["gradient", name] = value
    for name, value in _of_tensors(reference.parameters, other.parameters, gradients=False).items():
        found["parameter", name] = value
    return found


def _of_losses(reference: float | None, other: float | None) -> float:
    if reference is None and other is None:
        return 0.0
    if reference is None or other is None or not math.isfinite(reference) or not math.isfinite(other):
        return math.inf
    return abs(other - reference) / max(abs(reference), 1e-12)


def _of_tensors(reference: Arrays, other: Arrays, *, gradients: bool) -> dict[str, float]:
    """A gradient that is zero but for round-off is held against the norm of all of them."""
    norms = {name: _norm(value) for name, value in reference.items()}
    norm_of_all = math.sqrt(sum(norm**2 for norm in norms.values()))
    found = {}
    for name in [*reference, *(name for name in other if name not in reference)]:
        if name not in reference or name not in other or reference[name].shape != other[name].shape:
            found[name] = math.inf
            continue
        distance, norm = _norm(reference[name], other[name]), norms[name]
        if gradients and norm < _ROUND_OFF_OF_NORM * norm_of_all:
            norm = norm_of_all
        ratio = 0.0 if distance == 0 else distance / norm if norm else math.inf
        found[name] = ratio if math.isfinite(ratio) else math.inf
    return found


def _norm(values: NDArray[np.float32], minus: NDArray[np.float32] | None = None) -> float:
    """2-norm of ``values``, or of their difference to ``minus``, in fp64 a part at a time."""
    flat, other = values.reshape(-1), None if minus is None else minus.reshape(-1)
    total = 0.0
    for first in range(0, flat.size, _AT_ONCE):
        part = flat[first : first + _AT_ONCE].astype(np.float64)
        if other is not None:
            part -= other[first : first + _AT_ONCE]
        total += float(part @ part)
    return math.sqrt(total)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
