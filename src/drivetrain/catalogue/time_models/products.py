"""Matrix products and activations in 16 bits instead of 32."""

from drivetrain.catalogue.time_models.facts import TimeFacts
from drivetrain.catalogue.time_models.model import TimeModel, mean_step, predicted
from drivetrain.config import RunConfig, num_microbatches, tokens_per_step
from drivetrain.config.layout import model_ranks
from drivetrain.measure.flops import model_flops
from drivetrain.measure.optimisation import NoPrediction, Prediction
from drivetrain.measure.parameters import parameter_count

__all__ = ["SIXTEEN_BITS"]

_MEMORY_BOUND = ("compute.norm", "compute.activation", "compute.elementwise")
_TREATS = ("compute.matmul", "compute.attention", *_MEMORY_BOUND)
_CAST_BYTES = 12
"""Of a weight and a micro-batch: 4 read and 2 written on its way into the product, 2 and 4 for its gradient."""


def _sixteen_bits(facts: TimeFacts, after: RunConfig) -> Prediction | NoPrediction:
    """Products of F model FLOPs in t ns, at sustained A32 and A16 FLOP/s of this machine.

    * products: at best all of t shrinks, ``t A32 / A16``; at worst only what the ceiling accounts for,
      ``t - F/A32 + F/A16``, because what a product loses to its shape is lost in any dtype
    * attention: at best as the products, at worst not at all
    * memory-bound classes: at best half the bytes and half the time, at worst none, where what is kept wide dominates
    * casts of weights and their gradients: 12 bytes of a weight and micro-batch over the measured bandwidth, on top

    The expectation lies in the middle of both ends.
    """
    old, new = facts.config.precision.params_dtype, after.precision.params_dtype
    if old != "fp32":
        return NoPrediction(f"there is a model of the way from fp32, not from {old}")
    step = mean_step(facts.account)
    if step is None:
        return NoPrediction("the account has no steps")
    seen = {} if facts.observed is None else facts.observed.matmul_dtypes
    if "tf32" in seen:
        return NoPrediction("products ran in tf32, whose ceiling is not measured")
    wide, narrow = facts.matmul_flops.get("fp32"), facts.matmul_flops.get(new)
    if wide is None or narrow is None:
        lacking = " ".join(
            f"--dtype {name}" for name, rate in (("fp32", wide), (new, narrow)) if rate is None
        )
        threads = "" if facts.threads is None else f" --threads {facts.threads}"
        return NoPrediction(
            f"ceilings of this machine are not measured: drivetrain bench gemm {lacking}{threads}"
        )
    if facts.memory_bandwidth is None:
        threads = "" if facts.threads is None else f" --threads {facts.threads}"
        return NoPrediction(
            f"memory bandwidth of this machine is not measured: drivetrain bench memory{threads}"
        )
    tokens = tokens_per_step(facts.config)
    flops = model_flops(facts.config.model, tokens=tokens, sum_squared_lengths=0)
    of_rank = flops.total / facts.launch.world_size
    products = step.ns_of(("compute.matmul",))
    least = 1e9 * of_rank / wide
    if products < least:
        return NoPrediction(
            f"products took {products / 1e6:.3g} ms, less than the {least / 1e6:.3g} ms of the measured ceiling: one "
            "of the two is not of this machine at rest"
        )
    attention, memory_bound = step.ns_of(("compute.attention",)), step.ns_of(_MEMORY_BOUND)
    share = wide / narrow
    best = (1 - share) * (products + attention) + memory_bound / 2
    worst = (1 - share) * least
    parameters = parameter_count(facts.config.model)
    weights = (parameters.block_matrices + parameters.output_product) / model_ranks(facts.config)
    passes = num_microbatches(facts.config, facts.launch.world_size)
    casts = 1e9 * _CAST_BYTES * weights * passes / facts.memory_bandwidth
    ends = (worst - casts, best - casts)
    return predicted(
        step,
        _TREATS,
        (ends[0] + ends[1]) / 2,
        f"products at {narrow / 1e12:.3g} instead of {wide / 1e12:.3g} TFLOP/s: {products / 1e6:.3g} ms a step, of "
        f"which the ceiling accounts for {least / 1e6:.3g}; attention ({attention / 1e6:.3g} ms) and memory-bound work "
        f"({memory_bound / 1e6:.3g} ms) between all of it and none; {casts / 1e6:.3g} ms of casts on top; the middle",
        low_ns=ends[0],
        high_ns=ends[1],
    )


SIXTEEN_BITS = TimeModel(
    "products by this machine's measured ceilings, with between all and none of what they lose to their shapes; "
    "attention between as the products and not at all; memory-bound work between half and all of its time; casts of "
    "weights by measured bandwidth; the middle of both ends",
    _sixteen_bits,
)
