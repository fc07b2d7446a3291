"""The input embedding lives in host memory, and the rows that are used visit the device."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Optimisation
from drivetrain.catalogue.offload_evidence import evidence_of_copies
from drivetrain.config import LaunchFacts, Rule, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "memory.offload_embedding"
_OFF = f"nearest legal value: {_FIELD} = false"


def _is_only_looked_up(config: RunConfig, _facts: LaunchFacts) -> str | None:
    if not config.memory.offload_embedding or config.model.untie_embeddings_and_output_weights:
        return None
    return (
        f"{_FIELD} = true with a tied embedding: the output layer uses every row of it at every step, so that nothing "
        f"would stay on the host; nearest legal values: {_FIELD} = false; "
        "model.untie_embeddings_and_output_weights = true"
    )


def _is_whole(config: RunConfig, _facts: LaunchFacts) -> str | None:
    if not config.memory.offload_embedding:
        return None
    parallelism = config.parallelism
    if parallelism.tensor_model_parallel_size > 1:
        size = parallelism.tensor_model_parallel_size
        return (
            f"{_FIELD} = true with tensor_model_parallel_size = {size}, whose ranks hold parts of the vocabulary; "
            f"{_OFF}"
        )
    if parallelism.zero_stage == 3:
        return (
            f"{_FIELD} = true with zero_stage = 3, whose ranks hold parts of every parameter; "
            f"{_OFF}, or zero_stage = 2"
        )
    return None


def _goes_together(config: RunConfig, _facts: LaunchFacts) -> str | None:
    if not config.memory.offload_embedding:
        return None
    if config.memory.optimizer_offload_fraction:
        return (
            f"{_FIELD} = true with memory.optimizer_offload_fraction = {config.memory.optimizer_offload_fraction}: the "
            f"one updates on the host, the other on the device; {_OFF}, or memory.optimizer_offload_fraction = 0"
        )
    if config.precision.params_dtype == "fp16":
        return (
            f"{_FIELD} = true with precision.params_dtype = fp16: the gradients' scale is taken out on one device "
            f"alone; {_OFF}, or precision.params_dtype = bf16"
        )
    return None


def _on(config: RunConfig, facts: LaunchFacts) -> Mapping[str, Any] | None:
    if config.memory.offload_embedding:
        return None
    asked = config.model_copy(update={"memory": config.memory.model_copy(update={"offload_embedding": True})})
    if any(rule(asked, facts) is not None for rule in (_is_only_looked_up, _is_whole, _goes_together)):
        return None
    return {_FIELD: True}


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    return evidence_of_copies(
        seen, "drivetrain/offload/embedding", "rows of the embedding were picked for a micro-batch"
    )


ENTRY = Optimisation(
    name="embedding_offload",
    summary="the input embedding lives in host memory; the rows that a micro-batch uses visit the device",
    sources=(
        "Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv 2104.07857",
        "SOURCES D4",
    ),
    field=_FIELD,
    requested=lambda config: config.memory.offload_embedding,
    on=_on,
    off=lambda _config: {_FIELD: False},
    numerics="exact",
    treats=(),
    relieves=("parameters", "gradients", "optimizer"),
    evidence=_evidence,
    no_prediction="at what rate device and host memory exchange data is not among the measured ceilings",
    requires=(
        Rule(
            "offloaded-embedding-is-only-looked-up",
            (_FIELD, "model.untie_embeddings_and_output_weights"),
            _is_only_looked_up,
            "offload_embedding needs an output matrix of its own.",
        ),
        Rule(
            "offloaded-embedding-is-whole",
            (_FIELD, "parallelism.tensor_model_parallel_size", "parallelism.zero_stage"),
            _is_whole,
            "offload_embedding needs tensor_model_parallel_size = 1 and zero_stage below 3.",
        ),
        Rule(
            "offloaded-embedding-goes-together",
            (_FIELD, "memory.optimizer_offload_fraction", "precision.params_dtype"),
            _goes_together,
            "offload_embedding does not go with optimizer_offload_fraction above 0 or fp16.",
        ),
    ),
    evidence_rule=(
        "shown: rows that were picked for a micro-batch were recorded in the window; absent: steps without any. What "
        "travels, and how long it was waited for, are the metrics `offload/moved_bytes` and `offload/exposed_s`"
    ),
)
