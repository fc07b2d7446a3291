"""Contradictory requests of recomputation are refused, each with the nearest legal value."""

import pytest

from drivetrain.config import LaunchFacts, load_config, violations
from drivetrain.errors import ConfigurationError

ON_CPU = LaunchFacts(device_type="cpu")
FULL, SELECTIVE, BUDGET = (f"memory.recompute_granularity={one}" for one in ("full", "selective", "budget"))
BROKEN = {
    "recompute-method-of-full": (
        [SELECTIVE, "memory.recompute_method=block", "memory.recompute_num_layers=1"],
        "leave recompute_method and recompute_num_layers out",
    ),
    "recompute-layers-exist": ([FULL, "memory.recompute_num_layers=99"], "the nearest legal value is 6"),
    "recompute-modules-of-selective": ([FULL, "memory.recompute_modules=mlp"], '"selective"'),
    "recompute-modules-apart": (
        [SELECTIVE, "memory.recompute_modules=norm,mlp,mlp_act"],
        "nearest legal value: norm,mlp",
    ),
    "recompute-modules-outside-graphs": (
        [SELECTIVE, "memory.recompute_modules=norm,core_attn", "fusion.compile=true"],
        '"core_attn"',
    ),
    "recompute-budget-of-budget": ([FULL, "memory.budget_bytes=1e9"], '"budget"'),
    "recompute-budget-known": ([BUDGET], "set it"),
    "recompute-budget-within-limit": (
        [BUDGET, "memory.budget_bytes=2e9", "memory.device_memory_limit_bytes=1e9"],
        "the nearest legal value is 1000000000",
    ),
    "recompute-without-zero-bubble": (
        [
            FULL,
            "parallelism.pipeline_model_parallel_size=2",
            "parallelism.pipeline_schedule=zbv",
        ],
        '"1f1b"',
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_contradiction_is_refused_with_what_would_be_legal(rule: str) -> None:
    overrides, message = BROKEN[rule]
    found = {one.rule: one.message for one in violations(load_config("llama-2m", overrides).config, ON_CPU)}
    assert message in found[rule]


@pytest.mark.parametrize(
    "overrides",
    [
        [FULL],
        [FULL, "memory.recompute_method=block", "memory.recompute_num_layers=2"],
        [FULL, "fusion.compile=true"],
        [SELECTIVE, "memory.recompute_modules=core_attn,mlp_act,norm"],
        [SELECTIVE, "fusion.compile=true"],
        [BUDGET, "memory.budget_bytes=1e9"],
        [BUDGET, "memory.device_memory_limit_bytes=1e9"],
    ],
)
def test_what_is_no_contradiction_passes(overrides: list[str]) -> None:
    found = violations(load_config("llama-2m", overrides).config, ON_CPU)
    assert [one for one in found if "recompute" in one.rule] == []


@pytest.mark.parametrize("modules", ["attention", "norm,", "norm;mlp", ""])
def test_a_module_that_is_none_is_refused_by_name(modules: str) -> None:
    with pytest.raises(ConfigurationError, match="recompute_modules"):
        load_config("llama-2m", [SELECTIVE, f"memory.recompute_modules={modules}"])
