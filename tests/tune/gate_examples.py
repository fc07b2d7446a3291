"""Evidence of runs that never were: losses that fall, with whatever a test adds to them."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.tune.gate import Evidence, Leak, Point

CLEAN = Leak("clean", "no loss moved")
ENVIRONMENT = {"torch": "2.13.0", "device": "a processor", "dtype": "bf16"}
STEPS = 100
GRADIENTS: Mapping[str, NDArray[np.float32]] = {
    "weight": np.linspace(-1, 1, 64, dtype=np.float32),
    "norm": np.linspace(0.5, 1.5, 16, dtype=np.float32),
}


def losses(steps: int = STEPS) -> NDArray[np.float64]:
    return 3 + 5 * np.exp(-np.arange(steps) / 30)


def evidence(name: str = "run", **changes: Any) -> Evidence:
    """A finished run of 100 steps of 1,000 tokens; ``losses=``, ``norms=``, ``gradients=`` and any attribute."""
    values: Sequence[float] = changes.pop("losses", losses())
    norms: Sequence[float] = changes.pop("norms", [1.0] * len(values))
    tokens: int = changes.pop("tokens_per_step", 1000)
    gradients = changes.pop("gradients", GRADIENTS)
    points = tuple(
        Point(tokens * (step + 1), None if value is None else float(value), float(norm))
        for step, (value, norm) in enumerate(zip(values, norms, strict=True))
    )
    settings: dict[str, Any] = {
        "name": name,
        "end": "finished",
        "reason": "",
        "points": points,
        "environment": ENVIRONMENT,
        "dataset": "abc",
        "seed": 1,
        "data_seed": 1,
        "deterministic": True,
        "epsilon": 2.0**-7,
        "leak": CLEAN,
        "gradients": None if gradients is None else supplier(gradients),
        "held_out": 3.5,
        "held_out_tokens": 8192,
    }
    return Evidence(**(settings | changes))


def supplier(
    gradients: Mapping[str, NDArray[np.float32]],
) -> Callable[[], Mapping[str, NDArray[np.float32]]]:
    return lambda: gradients


def noisy(name: str, noise: int, size: float = 1e-3, growth: float = 0.03, **changes: Any) -> Evidence:
    """The run from weights that were moved a little: differences that grow as runs drift apart."""
    draw = np.random.default_rng(noise)
    scale = size * np.exp(growth * np.arange(STEPS))
    gradients = {
        key: (value + draw.normal(0, 1e-3, value.shape)).astype(np.float32)
        for key, value in GRADIENTS.items()
    }
    made = {
        "losses": losses() + scale * draw.normal(size=STEPS),
        "norms": np.exp(scale * draw.normal(size=STEPS)),
        "gradients": gradients,
    }
    return evidence(name, **(made | changes))


def is_finite_document(value: Any) -> bool:
    """Whether every number in a document can be written as plain JSON."""
    if isinstance(value, Mapping):
        return all(map(is_finite_document, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_finite_document, value))
    return not isinstance(value, float) or math.isfinite(value)
