"""AdamW's moments are kept in bf16, updated in fp32 and rounded at random."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Optimisation
from drivetrain.config import LaunchFacts, Rule, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "precision.optimizer_state_dtype"
_UPDATE = "drivetrain/optimizer/bf16_state"
_OPTIMIZER = "drivetrain/optimizer"
_ALONE = ("parallelism.tensor_model_parallel_size", "parallelism.pipeline_model_parallel_size")
_MOST_STAGE = 2


def _unmet(config: RunConfig) -> list[str]:
    """Settings that it does not go with, as the assignments that mend them."""
    parallelism = config.parallelism
    found = []
    if parallelism.tensor_model_parallel_size > 1:
        found.append(f"{_ALONE[0]}=1")
    if parallelism.pipeline_model_parallel_size > 1:
        found.append(f"{_ALONE[1]}=1")
    if parallelism.zero_stage > _MOST_STAGE:
        found.append(f"parallelism.zero_stage={_MOST_STAGE}")
    return found


def _in_data_parallelism(config: RunConfig, _: LaunchFacts) -> str | None:
    unmet = _unmet(config)
    if not unmet:
        return None
    return (
        "what is rounded at random is numbered by whole rows and a name on its rank, so that parameters which ranks of "
        f"one model both hold could be rounded apart; set {', '.join(unmet)}, or {_FIELD}=fp32"
    )


def _on(config: RunConfig, _facts: LaunchFacts) -> Mapping[str, Any] | None:
    nothing = config.precision.optimizer_state_dtype == "bf16" or _unmet(config)
    if nothing or config.memory.optimizer_offload_fraction:
        return None
    return {_FIELD: "bf16"}


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    found = seen.ranges.get(_UPDATE)
    if found is not None:
        per_step = found.calls / max(seen.num_steps, 1)
        return Evidence("shown", f"{per_step:.3g} parameters a step were updated with moments in bf16")
    if _OPTIMIZER in seen.ranges:
        return Evidence("absent", "updates were recorded, and none with moments in bf16")
    return Evidence("unknown", "the trace has no spans of a step")


ENTRY = Optimisation(
    name="optimizer_state_dtype",
    summary="AdamW's moments in bf16, updated in fp32 and rounded at random: half the bytes of the optimizer's state",
    sources=(
        "Croci et al. 2022, Stochastic rounding, arXiv 2103.10365",
        "DeepSeek-AI 2024 (DeepSeek-V3, moments in bf16), arXiv 2412.19437",
        "Megatron-LM, --use-precision-aware-optimizer",
    ),
    field=_FIELD,
    requested=lambda config: config.precision.optimizer_state_dtype == "bf16",
    on=_on,
    off=lambda _config: {_FIELD: "fp32"},
    # A step size is off by a percent or so, at random. Whether training is as good is what the gate has to see.
    numerics="statistical",
    treats=(),
    relieves=("optimizer",),
    evidence=_evidence,
    no_prediction=("what rounding at random costs is not measured; the bytes that it saves are few"),
    conflicts=("optimizer_offload",),
    requires=(
        Rule(
            "low-precision-state-in-data-parallelism",
            (_FIELD, *_ALONE, "parallelism.zero_stage"),
            _in_data_parallelism,
            "optimizer_state_dtype = bf16 goes with data parallelism at zero_stage 0 to 2, and no other parallelism.",
        ),
    ),
    evidence_rule=(
        "shown: updates with moments in bf16 were recorded in the window; absent: updates without any. What it saves "
        "is the category `optimizer` of `drivetrain memory`"
    ),
)
