"""What is paid for memory: forward work that backward repeats."""

from drivetrain.catalogue.time_models.facts import TimeFacts
from drivetrain.catalogue.time_models.model import TimeModel, mean_step, predicted
from drivetrain.config import RunConfig
from drivetrain.measure.optimisation import NoPrediction, Prediction
from drivetrain.measure.parameters import parameter_count

__all__ = ["REPEATED_FORWARD"]

_FORWARD_SHARE = 1 / 3
"""Of forward and backward: a backward pass multiplies twice what forward does (``docs/how-we-count.md``)."""
_PARTS = {
    "core_attn": "compute.attention",
    "mlp_act": "compute.activation",
    "norm": "compute.norm",
}


def _repeated_forward(facts: TimeFacts, after: RunConfig) -> Prediction | NoPrediction:
    """A third of the classes that are repeated is forward work, and is paid once more: the gain is below 1."""
    step = mean_step(facts.account)
    if step is None:
        return NoPrediction("the account has no steps")
    before, memory = facts.config.memory, after.memory
    if before.recompute_granularity != "none":
        return NoPrediction("what is repeated already is not told apart from what would be")
    if memory.recompute_granularity == "full" and memory.recompute_method != "block":
        parameters = parameter_count(facts.config.model)
        # The output matrix and the loss lie outside of the blocks.
        blocks = parameters.block_matrices / (parameters.block_matrices + parameters.output_product)
        products = blocks * step.ns_of(("compute.matmul",))
        classes = ("compute.attention", "compute.norm", "compute.activation", "compute.elementwise")
        repeated = products + step.ns_of(classes)
    elif memory.recompute_granularity == "selective":
        modules = (memory.recompute_modules or "core_attn").split(",")
        unknown = [name for name in modules if name.strip() not in _PARTS]
        if unknown:
            return NoPrediction(f"the time of {', '.join(unknown)} alone is not known from the account")
        repeated = step.ns_of([_PARTS[name.strip()] for name in modules])
    else:
        return NoPrediction("how much of the layers would be repeated is not known from the account")
    cost = _FORWARD_SHARE * repeated
    return predicted(
        step,
        (),
        -cost,
        f"a third of {repeated / 1e6:.3g} ms a step is forward work, and is repeated: {cost / 1e6:.3g} ms",
    )


REPEATED_FORWARD = TimeModel(
    "a cost: a third of the time of what is repeated is forward work, by the FLOPs of forward and backward",
    _repeated_forward,
)
