"""Bytes that a block's memory-bound work must move: fused as a compiler would, or operator by operator."""

from drivetrain.catalogue.time_models.facts import TimeFacts
from drivetrain.catalogue.time_models.model import TimeModel, mean_step, predicted
from drivetrain.config import ModelConfig, RunConfig, tokens_per_step
from drivetrain.measure.optimisation import NoPrediction, Prediction

__all__ = ["COMPILED", "FUSED_OPERATORS", "compiled_elements", "fused_elements"]

_CLASSES = ("compute.norm", "compute.activation", "compute.elementwise", "compute.copy_cast")
_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_LEAST_COVERED = 0.8
"""Share of the operators' time whose bytes must be known."""


def compiled_elements(model: ModelConfig) -> int:
    """Elements of activations that a layer reads and writes for each token, forward and backward, where everything
    between two products (or attention) is one kernel. D hidden, F ffn, Q and K widths of queries and of keys:

    * forward: norm 2D; residual and norm 4D; residual 3D; rotation 2(Q + K); gated unit 3F
    * backward: gradients of three products summed and norm 6D; two summed and norm 5D (without a gate one, 4D);
      rotation 2(Q + K); gated unit 5F (GELU: 2F forward, 3F backward)
    """
    gated = model.activation_func == "swiglu"
    return (9 + 6 + (5 if gated else 4)) * model.hidden_size + _rotated(model) + _activated(model)


def fused_elements(model: ModelConfig) -> int:
    """The same where norms, rotation and gated unit are one kernel each, forward and backward, and all else is an
    operator of its own: norm 5D; residual with norm 8D; residual 3D; sums of two gradients 3D each, of which a block
    has two at products with queries, keys and values, one at gate and up, and two at its residuals."""
    sums = 5 if model.activation_func == "swiglu" else 4
    return (5 + 8 + 3 + 3 * sums) * model.hidden_size + _rotated(model) + _activated(model)


def _rotated(model: ModelConfig) -> int:
    if model.position_embedding_type != "rope":
        return 0
    return 4 * (model.num_attention_heads + model.query_groups) * model.head_size


def _activated(model: ModelConfig) -> int:
    return (8 if model.activation_func == "swiglu" else 5) * model.ffn_size


def _not_counted(config: RunConfig) -> str | None:
    """What of a model or a layout the counts above leave out."""
    model, parallelism = config.model, config.parallelism
    reasons = {
        "dropout": model.hidden_dropout > 0,
        "norms of queries and keys": model.qk_layernorm,
        "biases of products": model.add_bias_linear,
        "layers that ranks share": parallelism.tensor_model_parallel_size > 1,
        "stages of a pipeline": parallelism.pipeline_model_parallel_size > 1,
        "what is recomputed": config.memory.recompute_granularity != "none",
    }
    found = [name for name, there in reasons.items() if there]
    return f"bytes of {', '.join(found)} are not counted" if found else None


def _compiled(facts: TimeFacts, after: RunConfig) -> Prediction | NoPrediction:
    """Memory-bound operators on activations, t ns a step for B bytes by the shapes of their operands, become kernels
    that move B' bytes (:func:`compiled_elements`): ``t B' / B`` at the rate of the run's own operators. At best at the
    measured bandwidth, where that is faster."""
    if after.fusion.compile and facts.config.fusion.level != "off":
        return NoPrediction("what fused operators leave to a compiler is not counted")
    return _with_bytes(facts, compiled_elements(facts.config.model))


def _fused(facts: TimeFacts, after: RunConfig) -> Prediction | NoPrediction:
    """As :func:`_compiled`, with the bytes of :func:`fused_elements`; attention and loss take as long as before."""
    del after
    if facts.config.fusion.compile:
        return NoPrediction("operators inside compiled blocks have no shapes")
    return _with_bytes(facts, fused_elements(facts.config.model))


def _with_bytes(facts: TimeFacts, elements: int) -> Prediction | NoPrediction:
    step = mean_step(facts.account)
    if step is None:
        return NoPrediction("the account has no steps")
    if (why := _not_counted(facts.config)) is not None:
        return NoPrediction(why)
    known = [one for one in facts.traffic if one.kind in _CLASSES and one.bytes is not None]
    everything = sum(one.ns for one in facts.traffic if one.kind in _CLASSES)
    covered = sum(one.ns for one in known)
    if not covered:
        return NoPrediction("shapes of memory-bound operators on activations were not recorded")
    if covered < _LEAST_COVERED * everything:
        return NoPrediction(
            f"the bytes of only {covered / everything:.0%} of the memory-bound operators' time are known"
        )
    before = sum(one.bytes for one in known if one.bytes is not None) * everything / covered
    config = facts.config
    tokens = tokens_per_step(config) / facts.launch.world_size
    # The norm before the output matrix lies outside of the blocks.
    moved = tokens * _ITEM_BYTES[config.precision.params_dtype]
    left = moved * (config.model.num_layers * elements + 5 * config.model.hidden_size)
    if left >= before:
        return NoPrediction(
            f"operators move {before / 1e6:.3g} MB a step, and fused ones would move {left / 1e6:.3g} MB: nothing to "
            "gain by bytes"
        )
    at_own_rate = everything * left / before
    rule = (
        f"memory-bound operators on activations, {everything / 1e6:.3g} ms a step, move {before / 1e6:.4g} MB "
        f"({before / everything:.3g} GB/s); fused they would move {left / 1e6:.4g} MB"
    )
    if facts.memory_bandwidth is None:
        return predicted(step, _CLASSES, everything - at_own_rate, f"{rule}, at the same rate")
    at_ceiling = min(at_own_rate, 1e9 * left / facts.memory_bandwidth)
    return predicted(
        step,
        _CLASSES,
        everything - at_own_rate,
        f"{rule}, at the same rate, at best at {facts.memory_bandwidth / 1e9:.3g} GB/s",
        low_ns=everything - at_own_rate,
        high_ns=everything - at_ceiling,
    )


COMPILED = TimeModel(
    "memory-bound operators on activations move the bytes that their shapes tell; between two products one kernel "
    "would move what enters and leaves; at the rate of the run's own operators. Launches are not counted",
    _compiled,
)
FUSED_OPERATORS = TimeModel(
    "as of compile, with norms, rotation and gated unit as one kernel each and all else as it is. Attention, loss and "
    "products take as long as before: what another implementation of them takes, `ops tune` measures",
    _fused,
)
