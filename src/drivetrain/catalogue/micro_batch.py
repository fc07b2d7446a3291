"""Several sequences share a forward and backward pass, instead of one pass for each."""

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.catalogue.entry import Knob, Optimisation
from drivetrain.catalogue.time_models.passes import FEWER_PASSES
from drivetrain.config import LaunchFacts, RunConfig, data_parallel_size
from drivetrain.config.nearest_values import divisors
from drivetrain.config.stages import legal_micro_batches
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY", "micro_batch_sizes"]

_FIELD = "training.micro_batch_size"
_FORWARD = "drivetrain/forward"
_MOST = 1024
_DROPOUTS = ("hidden_dropout", "attention_dropout")


def micro_batch_sizes(config: RunConfig, facts: LaunchFacts) -> list[int]:
    """Sequences of a pass, ascending, with which the global batch stays what it is: those that divide what a
    data-parallel rank has of it, into as many passes as the pipeline's schedule can run."""
    ranks = data_parallel_size(config, facts.world_size)
    if config.training.global_batch_size % ranks:
        return []
    share = config.training.global_batch_size // ranks
    parallelism = config.parallelism
    stages = parallelism.pipeline_model_parallel_size
    return [
        size
        for size in divisors(share)
        if size <= _MOST
        and (stages == 1 or legal_micro_batches(parallelism.pipeline_schedule, stages, share // size))
    ]


def _applies(config: RunConfig, facts: LaunchFacts) -> str | None:
    if len(micro_batch_sizes(config, facts)) > 1:
        return None
    return (
        f"training.global_batch_size = {config.training.global_batch_size} leaves no choice of the micro-batch on "
        f"{data_parallel_size(config, facts.world_size)} data-parallel ranks"
    )


def _on(config: RunConfig, facts: LaunchFacts) -> Mapping[str, Any] | None:
    if config.training.micro_batch_size > 1 or _refused(config, facts) is not None:
        return None
    return {_FIELD: next(size for size in micro_batch_sizes(config, facts) if size > 1)}


def _refused(config: RunConfig, facts: LaunchFacts) -> str | None:
    """Masks are drawn of a pass, so that with dropout another size is another training, not another rounding."""
    drop = next((name for name in _DROPOUTS if getattr(config.model, name) > 0), None)
    if drop is not None:
        return (
            f"with model.{drop} = {getattr(config.model, drop):g} a micro-batch of another size draws other masks, "
            "which is more than round-off (recompute:larger_batch has the gate for that)"
        )
    if config.data.batch_transform is not None:
        return f"data.batch_transform = {config.data.batch_transform} sees the sequences of a pass together"
    return _applies(config, facts)


def _sizes(config: RunConfig, facts: LaunchFacts) -> Sequence[float]:
    return micro_batch_sizes(config, facts)


def _evidence(config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    if config.parallelism.pipeline_model_parallel_size > 1:
        return Evidence("unknown", "a pipeline's passes are not counted by micro-batch")
    if "ranges" in seen.missing:
        return Evidence("unknown", "the trace has no annotated ranges, by which passes would be counted")
    if _FORWARD not in seen.ranges:
        return Evidence("unknown", "no forward pass was recorded in the window")
    passes = seen.ranges[_FORWARD].calls / max(seen.num_steps, 1)
    size, batch = config.training.micro_batch_size, config.training.global_batch_size
    words = f"{passes:.3g} forward passes a step on a rank, {batch} sequences on all"
    # How many ranks share them is not known here: a whole number of them does if passes have the size asked for.
    ranks = batch / (passes * size)
    if ranks >= 1 and ranks == round(ranks):
        return Evidence("shown" if size > 1 else "absent", f"{words}: {size} in each")
    return Evidence("absent", f"{words}, which is not {size} in each")


ENTRY = Optimisation(
    name="micro_batch",
    summary="several sequences share a forward and backward pass, of the same global batch",
    sources=("Narayanan et al. 2021, arXiv 2104.04473, section 3.4", "Megatron-LM, --micro-batch-size"),
    field=_FIELD,
    requested=lambda config: config.training.micro_batch_size > 1,
    on=_on,
    off=lambda _config: {_FIELD: 1},
    # The same FLOPs of the same tokens; gradients are summed over other groups of sequences, and products of other
    # shapes may be other kernels'.
    numerics="round-off",
    # What is paid once a pass, and products of few rows; a smaller one fills a pipeline.
    treats=("compute.matmul", "host", "bubble"),
    evidence=_evidence,
    time_model=FEWER_PASSES,
    applies=_applies,
    knobs=(
        Knob(_FIELD, 1, _MOST, whole=True, scale="log", values=_sizes, refused=_refused, moves_memory=True),
    ),
    # With whole layers recomputed, what is left of a limit is shared out between the two.
    interacts_with=((_FIELD, "memory.recompute_num_layers"),),
    evidence_rule=(
        "shown: as many forward passes a step on a rank as the micro-batch makes of the global batch on a whole number "
        "of data-parallel ranks; absent: another number, or one sequence in each; unknown in pipelines"
    ),
)
