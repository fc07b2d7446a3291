"""What is paid once a forward and backward pass, whatever its number of sequences."""

from drivetrain.catalogue.time_models.facts import TimeFacts
from drivetrain.catalogue.time_models.model import TimeModel, mean_step, predicted
from drivetrain.config import RunConfig, num_microbatches
from drivetrain.config.layout import model_ranks
from drivetrain.measure.optimisation import NoPrediction, Prediction

__all__ = ["FEWER_PASSES"]

_BY_PASS = ("host.launch", "host.python")


def _fewer_passes(facts: TimeFacts, after: RunConfig) -> Prediction | NoPrediction:
    """Time h between operators is paid once a pass: of p passes that become p' is saved ``h (1 - p'/p)``. Kernels are
    as fast with more rows as with fewer."""
    step = mean_step(facts.account)
    if step is None:
        return NoPrediction("the account has no steps")
    if model_ranks(facts.config) > 1:
        return NoPrediction("ranks share a model: what they wait for each other depends on the schedule")
    if after.training.global_batch_size != facts.config.training.global_batch_size:
        return NoPrediction("a step of other tokens is no step with fewer passes")
    before = num_microbatches(facts.config, facts.launch.world_size)
    now = num_microbatches(after, facts.launch.world_size)
    if before == now:
        return NoPrediction("as many passes as before")
    paid = step.ns_of(_BY_PASS)
    return predicted(
        step,
        _BY_PASS,
        paid * (1 - now / before),
        f"{paid / 1e6:.3g} ms a step between operators are paid once a pass, of which {now} are left of {before}; "
        "kernels no faster and no slower with more rows",
    )


FEWER_PASSES = TimeModel(
    "launches and Python between operators are paid once a pass; kernels are as fast with more rows as with fewer",
    _fewer_passes,
)
