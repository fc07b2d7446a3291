"""Rules of the loss scale."""

import math
from collections.abc import Mapping

from drivetrain.config.leaves import leaves
from drivetrain.config.rules import LaunchFacts, Rule
from drivetrain.config.schema import RunConfig

__all__ = ["PRECISION_RULES", "SCALING_FIELDS", "given_scaling"]

_DYNAMIC = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
SCALING_FIELDS = tuple(f"precision.{name}" for name in ("loss_scale", *_DYNAMIC))
"""Leaves that say how the loss is scaled."""


def given_scaling(config: RunConfig) -> Mapping[str, object]:
    """Leaves of the loss scale that have another value than their default."""
    found = {path: getattr(config.precision, leaves()[path].name) for path in SCALING_FIELDS}
    return {path: value for path, value in found.items() if value != leaves()[path].default}


def _scaling_needs_fp16(config: RunConfig, _: LaunchFacts) -> str | None:
    given = given_scaling(config)
    if config.precision.params_dtype == "fp16" or not given:
        return None
    dtype = config.precision.params_dtype
    return (
        f"{', '.join(given)} {'scales' if len(given) == 1 else 'scale'} the loss, which params_dtype = {dtype} does "
        f"not need: it has the range of fp32; leave out {', '.join(given)}, or use precision.params_dtype=fp16"
    )


def _constant_or_dynamic(config: RunConfig, _: LaunchFacts) -> str | None:
    constant = config.precision.loss_scale
    dynamic = [path for path in given_scaling(config) if path != "precision.loss_scale"]
    if constant is None or not dynamic or config.precision.params_dtype != "fp16":
        return None
    return (
        f"{constant:g} is a constant loss scale, and {', '.join(dynamic)} "
        f"{'is' if len(dynamic) == 1 else 'are'} of a dynamic one; leave out precision.loss_scale, or leave out "
        f"{', '.join(dynamic)}"
    )


def _least_below_initial(config: RunConfig, _: LaunchFacts) -> str | None:
    precision = config.precision
    least, initial = precision.min_loss_scale, precision.initial_loss_scale
    if least <= initial or precision.params_dtype != "fp16" or precision.loss_scale is not None:
        return None
    return (
        f"{least:g} is above initial_loss_scale = {initial:g}; nearest legal values: min_loss_scale = {initial:g}; "
        f"initial_loss_scale = {least:g}"
    )


def _powers_of_two(config: RunConfig, _: LaunchFacts) -> str | None:
    if config.precision.params_dtype != "fp16":
        return None
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
        value = getattr(config.precision, name)
        if value is None or math.frexp(value)[0] == 0.5:
            continue
        below = 2.0 ** math.floor(math.log2(value))
        return (
            f"precision.{name} = {value:g} is no power of two, so that scaling would round every gradient; nearest "
            f"legal values: {below:.0f} and {2 * below:.0f}"
        )
    return None


PRECISION_RULES: tuple[Rule, ...] = (
    Rule(
        "loss-scale-needs-fp16",
        SCALING_FIELDS,
        _scaling_needs_fp16,
        "Fields of the loss scale have other values than their defaults with params_dtype = fp16 alone.",
    ),
    Rule(
        "loss-scale-constant-or-dynamic",
        SCALING_FIELDS,
        _constant_or_dynamic,
        "With loss_scale, which is constant, the fields of the dynamic loss scale are left at their defaults.",
    ),
    Rule(
        "min-loss-scale-below-initial",
        ("precision.min_loss_scale", "precision.initial_loss_scale"),
        _least_below_initial,
        "min_loss_scale is at most initial_loss_scale.",
    ),
    Rule(
        "loss-scales-are-powers-of-two",
        ("precision.initial_loss_scale", "precision.min_loss_scale", "precision.loss_scale"),
        _powers_of_two,
        "Loss scales are powers of two: multiplying and dividing by them changes no digit.",
    ),
)
