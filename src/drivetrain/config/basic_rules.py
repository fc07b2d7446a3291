"""The rules that hold for every run: what types and ranges of single fields can't say.

Each message gives the nearest legal values. A rule whose precondition another rule guards stays silent,
so that one mistake gives one message.
"""

from collections.abc import Sequence

from drivetrain.addresses import PASSWORD_ADVICE, holds_password
from drivetrain.config import derive
from drivetrain.config.blend import blend_problem, transform_paths
from drivetrain.config.nearest_values import around, closest, divisors
from drivetrain.config.parallel_rules import PARALLEL_RULES
from drivetrain.config.precision_rules import PRECISION_RULES
from drivetrain.config.profiler_rules import PROFILER_RULES
from drivetrain.config.recompute_rules import RECOMPUTE_RULES
from drivetrain.config.rules import LaunchFacts, Rule, Violation
from drivetrain.config.schema import RunConfig

__all__ = ["BASIC_RULES", "violations"]

_INT64_MAX = 2**63 - 1
_BYTE_LEVEL_TOKENS = 257  # 256 bytes and the end-of-document token


def _heads_divide_hidden(config: RunConfig, _: LaunchFacts) -> str | None:
    model = config.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.kv_channels is not None or hidden % heads == 0:
        return None
    step = 2 * heads if model.position_embedding_type == "rope" else heads
    return (
        f"{hidden} is not divisible by num_attention_heads = {heads}; nearest legal values: hidden_size = "
        f"{around(hidden, step)}{_heads_remedy(config)}; or give kv_channels"
    )


def _heads_remedy(config: RunConfig) -> str:
    """The nearest numbers of heads that hidden_size can be cut into."""
    model = config.model
    rope = model.position_embedding_type == "rope"
    legal = [d for d in divisors(model.hidden_size) if not rope or model.hidden_size // d % 2 == 0]
    return f"; num_attention_heads = {closest(model.num_attention_heads, legal)}" if legal else ""


def _groups_divide_heads(config: RunConfig, _: LaunchFacts) -> str | None:
    model = config.model
    if model.num_attention_heads % model.query_groups == 0:
        return None
    legal = divisors(model.num_attention_heads)
    return (
        f"{model.query_groups} does not divide num_attention_heads = {model.num_attention_heads}; "
        f"nearest legal values: {closest(model.query_groups, legal)}"
    )


def _rope_needs_even_heads(config: RunConfig, _: LaunchFacts) -> str | None:
    model = config.model
    divides = model.kv_channels is not None or model.hidden_size % model.num_attention_heads == 0
    if model.position_embedding_type != "rope" or not divides or model.head_size % 2 == 0:
        return None
    size = model.head_size
    remedy = f"kv_channels = {around(size, 2)}"
    if model.kv_channels is None:
        remedy += _heads_remedy(config)
    return f"a head of {size} channels can't be rotated: rope turns pairs; nearest legal values: {remedy}"


def _scaling_needs_rope(config: RunConfig, _: LaunchFacts) -> str | None:
    model = config.model
    if not model.use_rope_scaling or model.position_embedding_type == "rope":
        return None
    return (
        f"position_embedding_type = {model.position_embedding_type} has no rotary embedding to scale; "
        f"use use_rope_scaling = false or position_embedding_type = rope"
    )


def _scaling_factors_ordered(config: RunConfig, _: LaunchFacts) -> str | None:
    model = config.model
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    if not model.use_rope_scaling or low < high:
        return None
    return (
        f"{low:g} must be below rope_scaling_high_freq_factor = {high:g}: the scaling is blended between "
        f"the two; Llama 3 uses 1 and 4"
    )


def _positions_cover_sequence(config: RunConfig, _: LaunchFacts) -> str | None:
    model = config.model
    if model.max_positions >= model.seq_length:
        return None
    return (
        f"{model.max_positions} is below seq_length = {model.seq_length}; nearest legal values: "
        f"max_position_embeddings = {model.seq_length}; seq_length = {model.max_positions}"
    )


def _qk_norm_needs_rms_norm(config: RunConfig, _: LaunchFacts) -> str | None:
    model = config.model
    if not model.qk_layernorm or model.normalization == "RMSNorm":
        return None
    return (
        f"exists for RMSNorm only, not for normalization = {model.normalization}; use qk_layernorm = false "
        f"or normalization = RMSNorm"
    )


def _vocabulary_holds_bytes(config: RunConfig, _: LaunchFacts) -> str | None:
    size = config.model.vocab_size
    if config.data.data_path is not None or size >= _BYTE_LEVEL_TOKENS:
        return None
    return (
        f"{size} is too small for the byte-level tokenizer of the default corpus (256 bytes and the "
        f"end-of-document token); the nearest legal value is {_BYTE_LEVEL_TOKENS}, or give data.data_path"
    )


def _global_batch_divides(config: RunConfig, facts: LaunchFacts) -> str | None:
    training = config.training
    ranks = derive.data_parallel_size(config, facts.world_size)
    step = training.micro_batch_size * ranks
    if training.global_batch_size % step == 0:
        return None
    message = (
        f"{training.global_batch_size} is not divisible by micro_batch_size x data-parallel size = "
        f"{training.micro_batch_size} x {ranks} = {step}; nearest legal values: "
        f"{around(training.global_batch_size, step)}"
    )
    if training.global_batch_size % ranks == 0:
        legal = divisors(training.global_batch_size // ranks)
        message += f"; micro_batch_size = {closest(training.micro_batch_size, legal)}"
    return message


def _tokens_are_countable(config: RunConfig, _: LaunchFacts) -> str | None:
    total = derive.total_tokens(config)
    if total <= _INT64_MAX:
        return None
    most = _INT64_MAX // derive.tokens_per_step(config)
    return (
        f"{config.training.train_iters} steps of {derive.tokens_per_step(config)} tokens do not fit a "
        f"64-bit count; the nearest legal value is {most}"
    )


def _min_lr_below_lr(config: RunConfig, _: LaunchFacts) -> str | None:
    low, peak = config.lr_schedule.min_lr, config.optimizer.lr
    if low <= peak:
        return None
    return f"{low:g} is above optimizer.lr = {peak:g}; the nearest legal value is {peak:g}"


def _warmup_before_decay(config: RunConfig, _: LaunchFacts) -> str | None:
    lr_schedule = config.lr_schedule
    end = derive.decay_tokens(config)
    if lr_schedule.lr_decay_style == "constant" or lr_schedule.lr_warmup_tokens < end:
        return None
    source = "the tokens of the run" if lr_schedule.lr_decay_tokens is None else "lr_decay_tokens"
    return (
        f"{lr_schedule.lr_warmup_tokens} leaves no room for the decay, which ends at {end} ({source}); the "
        f"nearest legal value is {end - 1}; a twentieth would be {end // 20}"
    )


def _wsd_decay_fits(config: RunConfig, facts: LaunchFacts) -> str | None:
    lr_schedule = config.lr_schedule
    if lr_schedule.lr_decay_style != "WSD" or _warmup_before_decay(config, facts) is not None:
        return None
    end, decay = derive.decay_tokens(config), derive.wsd_decay_tokens(config)
    room = end - lr_schedule.lr_warmup_tokens
    if decay <= room:
        return None
    given = "" if lr_schedule.lr_wsd_decay_tokens is not None else " (one fifth of lr_decay_tokens)"
    return (
        f"{decay}{given} does not fit between the end of warm-up at {lr_schedule.lr_warmup_tokens} and "
        f"the end of the decay at {end}; the nearest legal value is {room}"
    )


def _split_trains(config: RunConfig, _: LaunchFacts) -> str | None:
    training, validation = derive.split_weights(config.data)
    if training > 0:
        return None
    return f"{config.data.split} leaves nothing to train on; use for example 95,{validation or 5:g}"


def _split_validates(config: RunConfig, _: LaunchFacts) -> str | None:
    training, validation = derive.split_weights(config.data)
    if validation > 0 or config.training.eval_iters == 0 or training == 0:
        return None
    return (
        f"{config.data.split} holds nothing back for training.eval_iters = {config.training.eval_iters}; use "
        f"for example {training:g},{training / 19:.3g}, or training.eval_iters = 0"
    )


def _transform_is_a_path(config: RunConfig, _: LaunchFacts) -> str | None:
    for path in (*transform_paths(config.data.transform), *transform_paths(config.data.batch_transform)):
        if not all(part.isidentifier() for part in path.replace(":", ".").split(".")):
            return f"{path!r} is no dotted path of a callable; write package.module.function"
    return None


def _blend_is_pairs(config: RunConfig, _: LaunchFacts) -> str | None:
    if holds_password(config.data.data_path or ""):
        return None
    return blend_problem(config.data.data_path)


def _url_without_password(config: RunConfig, _: LaunchFacts) -> str | None:
    if not holds_password(config.data.data_path or ""):
        return None
    return f"a URL holds a password: {PASSWORD_ADVICE}; the nearest legal value is the URL without it"


BASIC_RULES: tuple[Rule, ...] = (
    Rule(
        "heads-divide-hidden",
        ("model.hidden_size", "model.num_attention_heads", "model.kv_channels"),
        _heads_divide_hidden,
        "hidden_size is a multiple of num_attention_heads, unless kv_channels is given.",
    ),
    Rule(
        "query-groups-divide-heads",
        ("model.num_query_groups", "model.num_attention_heads"),
        _groups_divide_heads,
        "num_query_groups divides num_attention_heads.",
    ),
    Rule(
        "rope-needs-even-heads",
        (
            "model.kv_channels",
            "model.hidden_size",
            "model.num_attention_heads",
            "model.position_embedding_type",
        ),
        _rope_needs_even_heads,
        "With rope a head has an even number of channels.",
    ),
    Rule(
        "rope-scaling-needs-rope",
        ("model.use_rope_scaling", "model.position_embedding_type"),
        _scaling_needs_rope,
        "use_rope_scaling needs position_embedding_type = rope.",
    ),
    Rule(
        "rope-scaling-factors-ordered",
        (
            "model.rope_scaling_low_freq_factor",
            "model.rope_scaling_high_freq_factor",
            "model.use_rope_scaling",
        ),
        _scaling_factors_ordered,
        "With use_rope_scaling the low frequency factor is below the high one.",
    ),
    Rule(
        "positions-cover-sequence",
        ("model.max_position_embeddings", "model.seq_length"),
        _positions_cover_sequence,
        "max_position_embeddings is at least seq_length.",
    ),
    Rule(
        "qk-norm-needs-rms-norm",
        ("model.qk_layernorm", "model.normalization"),
        _qk_norm_needs_rms_norm,
        "qk_layernorm needs normalization = RMSNorm.",
    ),
    Rule(
        "vocabulary-holds-bytes",
        ("model.vocab_size", "data.data_path"),
        _vocabulary_holds_bytes,
        "Without data_path, vocab_size is at least 257: the least of the default corpus' byte-level tokenizer.",
    ),
    Rule(
        "global-batch-divides",
        ("training.global_batch_size", "training.micro_batch_size", "parallelism.data_parallel_size"),
        _global_batch_divides,
        "global_batch_size is a multiple of micro_batch_size x data-parallel size.",
    ),
    Rule(
        "tokens-are-countable",
        ("training.train_iters", "training.global_batch_size", "model.seq_length"),
        _tokens_are_countable,
        "The tokens of the run fit a signed 64-bit count.",
    ),
    Rule(
        "min-lr-below-lr",
        ("lr_schedule.min_lr", "optimizer.lr"),
        _min_lr_below_lr,
        "min_lr is at most optimizer.lr.",
    ),
    Rule(
        "warmup-before-decay",
        ("lr_schedule.lr_warmup_tokens", "lr_schedule.lr_decay_tokens", "training.train_iters"),
        _warmup_before_decay,
        "Unless the rate is constant, warm-up ends before lr_decay_tokens (by default all tokens).",
    ),
    Rule(
        "wsd-decay-fits",
        ("lr_schedule.lr_wsd_decay_tokens", "lr_schedule.lr_warmup_tokens", "lr_schedule.lr_decay_tokens"),
        _wsd_decay_fits,
        "With WSD, warm-up and final decay together fit in lr_decay_tokens.",
    ),
    Rule("split-trains", ("data.split",), _split_trains, "The training weight of data.split is above 0."),
    Rule(
        "split-validates",
        ("data.split", "training.eval_iters"),
        _split_validates,
        "With eval_iters above 0 the validation weight of data.split is above 0.",
    ),
    Rule(
        "transform-is-a-path",
        ("data.transform", "data.batch_transform"),
        _transform_is_a_path,
        "Each part of data.transform and data.batch_transform is an identifier.",
    ),
    Rule(
        "blend-is-weights-and-corpora",
        ("data.data_path",),
        _blend_is_pairs,
        "A data_path that begins with a number is pairs of a weight above 0 and a prefix, none of them twice.",
    ),
    Rule(
        "url-without-password",
        ("data.data_path",),
        _url_without_password,
        "A URL in data_path holds no password.",
    ),
    *PARALLEL_RULES,
    *PROFILER_RULES,
    *PRECISION_RULES,
    *RECOMPUTE_RULES,
)
"""Tried by ``check`` and before every start, together with the catalogue's rules."""


def violations(
    config: RunConfig, facts: LaunchFacts | None = None, rules: Sequence[Rule] = BASIC_RULES
) -> list[Violation]:
    """Every rule that ``config`` breaks when started as ``facts`` say (one process by default), in order."""
    facts = LaunchFacts() if facts is None else facts
    found = (rule.violation(config, facts) for rule in rules)
    return [violation for violation in found if violation is not None]
