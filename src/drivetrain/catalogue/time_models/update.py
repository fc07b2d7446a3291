"""The optimizer's update, and saving what it leaves, by passes over memory."""

from drivetrain.catalogue.time_models.facts import TimeFacts
from drivetrain.catalogue.time_models.model import TimeModel, mean_step, predicted
from drivetrain.config import RunConfig
from drivetrain.config.layout import model_ranks
from drivetrain.measure.optimisation import NoPrediction, Prediction
from drivetrain.measure.parameters import parameter_count

__all__ = ["BACKGROUND_SAVE", "FUSED_UPDATE"]

_OPTIMIZER = ("compute.optimizer",)
_UNFUSED_PASSES = 20
"""Tensors of the parameters' size that torch's AdamW reads and writes, one operator for each term: decay 2, first
moment 3, second moment 2 + 3, its root 2, correction 2, epsilon 2, update 4 (``torch/optim/adamw.py``)."""
_FUSED_PASSES = 7
"""Parameter, gradient and both moments read; all but the gradient written."""
_CLIP_PASSES = 3
"""Gradients read for their norm; read and written to be scaled."""
_SAVED_BYTES = 24
"""Of a parameter: itself and two moments, fp32, read and written once to be copied."""
_CHECKPOINT = "drivetrain/checkpoint"


def _fused_update(facts: TimeFacts, after: RunConfig) -> Prediction | NoPrediction:
    """An update of t ns moves 20 tensors of the parameters' size, and 3 more for the norm and the clipping of
    gradients; fused it moves 7 and 3: ``t 10 / 23``. At best clipping counts elsewhere: ``t 7 / 20``."""
    del after
    step = mean_step(facts.account)
    if step is None:
        return NoPrediction("the account has no steps")
    update = step.ns_of(_OPTIMIZER)
    if not update:
        return NoPrediction("no time of the profiled steps is the update's")
    if (
        facts.config.precision.optimizer_state_dtype != "fp32"
        or facts.config.memory.optimizer_offload_fraction
    ):
        return NoPrediction("its passes are counted for moments in fp32 on the device")
    clips = facts.config.training.clip_grad > 0
    extra = _CLIP_PASSES if clips else 0
    left = update * (_FUSED_PASSES + extra) / (_UNFUSED_PASSES + extra)
    best = update * _FUSED_PASSES / _UNFUSED_PASSES
    return predicted(
        step,
        _OPTIMIZER,
        update - left,
        f"{update / 1e6:.3g} ms a step for {_UNFUSED_PASSES + extra} passes over the parameters, of which "
        f"{_FUSED_PASSES + extra} are left",
        low_ns=update - left,
        high_ns=update - best,
    )


def _background_save(facts: TimeFacts, after: RunConfig) -> Prediction | NoPrediction:
    """Of the c ns that checkpoints take only copies to host memory stay: 24 bytes of a parameter over the measured
    bandwidth."""
    del after
    step = mean_step(facts.account)
    if step is None:
        return NoPrediction("the account has no steps")
    treats = ("maintenance.checkpoint",)
    cost = step.ns_of(treats)
    seen = None if facts.observed is None else facts.observed.ranges.get(_CHECKPOINT)
    if not cost or seen is None or facts.observed is None:
        return NoPrediction("no checkpoint was saved in the profiled steps")
    if facts.memory_bandwidth is None:
        return NoPrediction("memory bandwidth of this machine is not measured: drivetrain bench memory")
    state = _SAVED_BYTES * parameter_count(facts.config.model).total / model_ranks(facts.config)
    saves = seen.calls / max(1, facts.observed.num_steps)
    copies = 1e9 * saves * state / facts.memory_bandwidth
    return predicted(
        step,
        treats,
        cost - copies,
        f"checkpoints take {cost / 1e6:.3g} ms a step, copies of what they save {copies / 1e6:.3g} ms",
    )


FUSED_UPDATE = TimeModel(
    "by passes over tensors of the parameters' size: 20 of one operator for each term, 7 fused, and 3 for clipping "
    "either way",
    _fused_update,
)
BACKGROUND_SAVE = TimeModel(
    "what checkpoints take in the profiled steps, less a copy of the state by measured bandwidth",
    _background_save,
)
