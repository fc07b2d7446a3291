"""What the entries of all operators have in common: how one is asked for, and how a profile shows it."""

from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.catalogue.entry import Numerics, Optimisation
from drivetrain.config import LaunchFacts, RunConfig, chosen_backend
from drivetrain.config.fusion import AUTO, OFF
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Count, Evidence, Observation

__all__ = ["calls_by_backend", "evidence_of_regions", "operator_entry"]

_REGION = "drivetrain/operator/"
"""Begins the names of the regions that ``engine/ops/selection.py`` opens; operator and backend follow."""


def operator_entry(
    name: str,
    *,
    summary: str,
    sources: tuple[str, ...],
    treats: tuple[str, ...],
    applies: Callable[[RunConfig, LaunchFacts], str | None] = lambda _config, _facts: None,
    numerics: Numerics = "round-off",
    relieves: tuple[str, ...] = (),
) -> Optimisation:
    """The entry of the operator ``name``, whose field is ``fusion.<name>``.

    Args:
        summary, sources, treats, applies, numerics, relieves: as of :class:`Optimisation`.
    """
    field = f"fusion.{name}"

    def on(config: RunConfig, facts: LaunchFacts) -> Mapping[str, Any] | None:
        if chosen_backend(config.fusion, name) != OFF or applies(config, facts) is not None:
            return None
        # The level is one move for all of them, and who serves which call is the offline tuner's affair.
        return None if config.fusion.level == OFF else {field: AUTO}

    def evidence(config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
        return _evidence(config, seen, name)

    return Optimisation(
        name=name,
        summary=summary,
        sources=sources,
        field=field,
        requested=lambda config: chosen_backend(config.fusion, name) != OFF,
        on=on,
        off=lambda _config: {field: OFF},
        numerics=numerics,
        treats=treats,
        relieves=relieves,
        evidence=evidence,
        no_prediction=(
            "a trace does not tell its work from that of other operators of its class, and what a backend of it takes "
            "`drivetrain ops tune` measures (fusion_level has a model of all operators together)"
        ),
        applies=applies,
        effective=lambda config: chosen_backend(config.fusion, name),
        evidence_rule=(
            f"shown: regions `{_REGION}{name}/<backend>` in the window, of the backend that was asked for; absent: "
            "forward passes without any; unknown inside code of torch.compile, which opens none, and in a pipeline, "
            "where another stage may have them"
        ),
    )


def calls_by_backend(seen: Observation, operator: str) -> dict[str, Count]:
    """The regions of an operator that were recorded, by backend."""
    begin = f"{_REGION}{operator}/"
    return {name.removeprefix(begin): count for name, count in seen.ranges.items() if name.startswith(begin)}


def _evidence(config: RunConfig, seen: Observation, operator: str) -> Evidence:
    found = calls_by_backend(seen, operator)
    asked = chosen_backend(config.fusion, operator)
    words = ", ".join(f"{count.calls} by {backend}" for backend, count in sorted(found.items()))
    if found and asked not in (AUTO, OFF) and asked not in found:
        return Evidence("absent", f"calls were served by others than {asked}: {words}")
    if found:
        return Evidence("shown", f"calls: {words}")
    return evidence_of_regions(config, seen)


def evidence_of_regions(config: RunConfig, seen: Observation) -> Evidence:
    """What the lack of an operator's regions says."""
    if "ranges" in seen.missing:
        return Evidence("unknown", "the trace has no ranges, by which operators would show")
    if config.fusion.compile:
        return Evidence("unknown", "code of torch.compile opens no regions")
    if config.parallelism.pipeline_model_parallel_size > 1:
        return Evidence("unknown", "a stage of a pipeline makes no calls of what another stage holds")
    if "drivetrain/forward" in seen.ranges:
        return Evidence("absent", "forward passes were recorded, and no call of it")
    return Evidence("unknown", "no forward pass was recorded in the window")
