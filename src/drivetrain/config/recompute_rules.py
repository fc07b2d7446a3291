"""The rules of recomputation. What concerns one granularity alone is refused with another, never ignored."""

from drivetrain.config.layout import stage_plan
from drivetrain.config.rules import LaunchFacts, Rule
from drivetrain.config.schema import RunConfig
from drivetrain.config.stages import ZERO_BUBBLE
from drivetrain.errors import ConfigurationError

__all__ = ["RECOMPUTE_RULES"]

_GRANULARITY = "memory.recompute_granularity"
_METHOD = "memory.recompute_method"
_LAYERS = "memory.recompute_num_layers"
_MODULES = "memory.recompute_modules"
_BUDGET = "memory.budget_bytes"


def _method_is_of_full(config: RunConfig, _: LaunchFacts) -> str | None:
    memory = config.memory
    if memory.recompute_granularity == "full":
        return None
    given = {
        "recompute_method": memory.recompute_method,
        "recompute_num_layers": memory.recompute_num_layers,
    }
    named = [f"{name} = {value}" for name, value in given.items() if value is not None]
    if not named:
        return None
    return (
        f'{" and ".join(named)}: of recompute_granularity = "full" alone, and it is "{memory.recompute_granularity}"; '
        f'set {_GRANULARITY} = "full", or leave {" and ".join(n for n, v in given.items() if v is not None)} out'
    )


def _layers_are_there(config: RunConfig, _: LaunchFacts) -> str | None:
    memory = config.memory
    if memory.recompute_granularity != "full" or memory.recompute_num_layers is None:
        return None
    try:
        most = max(stage_plan(config).layers_per_stage)
    except ConfigurationError:
        return None  # A rule of its own says what is wrong.
    if memory.recompute_num_layers <= most:
        return None
    return (
        f"{memory.recompute_num_layers} is more than the {most} layers of the largest stage; the nearest legal value "
        f"is {most}"
    )


def _modules_are_of_selective(config: RunConfig, _: LaunchFacts) -> str | None:
    memory = config.memory
    if memory.recompute_modules is None or memory.recompute_granularity == "selective":
        return None
    return (
        f'{memory.recompute_modules}: of recompute_granularity = "selective" alone, and it is '
        f'"{memory.recompute_granularity}"; set {_GRANULARITY} = "selective", or leave recompute_modules out'
    )


def _modules_do_not_overlap(config: RunConfig, _: LaunchFacts) -> str | None:
    memory = config.memory
    if memory.recompute_granularity != "selective":
        return None
    parts = memory.recomputed_parts
    if len(set(parts)) < len(parts):
        return f"{','.join(parts)} names a part twice; nearest legal value: {','.join(dict.fromkeys(parts))}"
    if {"mlp", "mlp_act"} <= set(parts):
        without = ",".join(part for part in parts if part != "mlp_act")
        return f"{','.join(parts)}: mlp recomputes mlp_act as well; nearest legal value: {without}"
    return None


def _modules_are_outside_of_graphs(config: RunConfig, _: LaunchFacts) -> str | None:
    if config.memory.recompute_granularity != "selective" or not config.fusion.compile:
        return None
    inside = [part for part in config.memory.recomputed_parts if part != "core_attn"]
    if not inside:
        return None
    return (
        f"{','.join(inside)}: with fusion.compile the compiler decides what of these its graphs keep; attention alone "
        f'is outside of them. Nearest legal values: {_MODULES} = "core_attn"; {_GRANULARITY} = "full"; '
        "fusion.compile = false"
    )


def _budget_is_of_budget(config: RunConfig, _: LaunchFacts) -> str | None:
    memory = config.memory
    if memory.budget_bytes is None or memory.recompute_granularity == "budget":
        return None
    return (
        f'{memory.budget_bytes}: nothing chooses by it while recompute_granularity is "'
        f'{memory.recompute_granularity}"; set {_GRANULARITY} = "budget", or leave budget_bytes out '
        "(memory.device_memory_limit_bytes limits without choosing)"
    )


def _budget_is_known(config: RunConfig, facts: LaunchFacts) -> str | None:
    memory = config.memory
    if memory.recompute_granularity != "budget":
        return None
    if memory.budget_bytes is not None or memory.device_memory_limit_bytes is not None:
        return None
    on_cpu = config.run.device == "cpu" or facts.device_type == "cpu"
    if not on_cpu:
        return None  # The device's memory; where auto finds none, the start says so.
    return (
        f"absent, and a CPU has no limit of its own; set it, or {_GRANULARITY} to another value than budget"
    )


def _budget_is_within_limit(config: RunConfig, _: LaunchFacts) -> str | None:
    budget, limit = config.memory.budget_bytes, config.memory.device_memory_limit_bytes
    if config.memory.recompute_granularity != "budget" or budget is None or limit is None or budget <= limit:
        return None
    return f"{budget} is more than memory.device_memory_limit_bytes = {limit}; the nearest legal value is {limit}"


def _no_zero_bubble(config: RunConfig, _: LaunchFacts) -> str | None:
    parallelism = config.parallelism
    schedule = parallelism.pipeline_schedule
    if config.memory.recompute_granularity == "none" or parallelism.pipeline_model_parallel_size == 1:
        return None
    if schedule not in ZERO_BUBBLE:
        return None
    return (
        f"{config.memory.recompute_granularity} with {schedule}: the schedule goes through backward twice, for "
        "activations and for weights, and each time would compute again what was dropped; nearest legal values: "
        f'{_GRANULARITY} = "none"; parallelism.pipeline_schedule = "1f1b" or "interleaved_1f1b"'
    )


RECOMPUTE_RULES: tuple[Rule, ...] = (
    Rule(
        "recompute-method-of-full",
        (_METHOD, _LAYERS, _GRANULARITY),
        _method_is_of_full,
        "recompute_method and recompute_num_layers are given with recompute_granularity = full alone.",
    ),
    Rule(
        "recompute-layers-exist",
        (_LAYERS, "model.num_layers"),
        _layers_are_there,
        "recompute_num_layers is at most the number of layers of the largest stage.",
    ),
    Rule(
        "recompute-modules-of-selective",
        (_MODULES, _GRANULARITY),
        _modules_are_of_selective,
        "recompute_modules is given with recompute_granularity = selective alone.",
    ),
    Rule(
        "recompute-modules-apart",
        (_MODULES,),
        _modules_do_not_overlap,
        "recompute_modules names each part once, and not mlp_act beside mlp.",
    ),
    Rule(
        "recompute-modules-outside-graphs",
        (_MODULES, "fusion.compile"),
        _modules_are_outside_of_graphs,
        "With fusion.compile, recompute_modules is core_attn.",
    ),
    Rule(
        "recompute-budget-of-budget",
        (_BUDGET, _GRANULARITY),
        _budget_is_of_budget,
        "budget_bytes is given with recompute_granularity = budget alone.",
    ),
    Rule(
        "recompute-budget-known",
        (_BUDGET, _GRANULARITY),
        _budget_is_known,
        "On a CPU recompute_granularity = budget needs budget_bytes or device_memory_limit_bytes.",
    ),
    Rule(
        "recompute-budget-within-limit",
        (_BUDGET, "memory.device_memory_limit_bytes"),
        _budget_is_within_limit,
        "budget_bytes is at most device_memory_limit_bytes.",
    ),
    Rule(
        "recompute-without-zero-bubble",
        (_GRANULARITY, "parallelism.pipeline_schedule"),
        _no_zero_bubble,
        "Schedules that halve backward (zero bubble) recompute nothing.",
    ),
)
"""Part of ``BASIC_RULES``."""
