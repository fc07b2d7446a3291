"""Megatron-LM's arguments of the model as fields of ours. Its defaults are written out, they are others than ours."""

from drivetrain.config.importing.conversion import Conversion

__all__ = ["convert_model", "tensor_parallel_name"]

_LLAMA3_CONTEXT = 8192
_SWIGLU_MULTIPLE = 64


def convert_model(c: Conversion) -> None:
    """Every field of the section ``model``."""
    _sizes(c)
    _heads(c)
    _positions(c)
    _mlp(c)
    _vocabulary(c)
    kind = c.choice("--normalization", ("RMSNorm", "LayerNorm"), "LayerNorm")
    c.set("model.normalization", kind, "--normalization", "the same words")
    name = "--layernorm-epsilon" if c.has("--layernorm-epsilon") else "--norm-epsilon"
    c.set("model.norm_epsilon", c.number(name, 1e-5), name, "the same number")
    for field in ("hidden_dropout", "attention_dropout"):
        name = f"--{field.replace('_', '-')}"
        c.set(f"model.{field}", c.number(name, 0.1), name, "the same share")
    c.set(
        "model.init_method_std",
        c.number("--init-method-std", 0.02),
        "--init-method-std",
        "the same number; both divide it by sqrt(2 x num_layers) in a block's output matrices",
    )
    c.set(
        "model.untie_embeddings_and_output_weights",
        c.has("--untie-embeddings-and-output-weights"),
        "--untie-embeddings-and-output-weights",
        "the same switch",
    )
    c.set("model.qk_layernorm", c.has("--qk-layernorm"), "--qk-layernorm", "the same switch")


def tensor_parallel_name(c: Conversion) -> str:
    """The argument that gives the tensor-parallel size: the last name of it, or an older one."""
    new, old = "--tensor-model-parallel-size", "--model-parallel-size"
    return old if c.has(old) and not c.has(new) else new


def _sizes(c: Conversion) -> None:
    layers = (
        "--encoder-num-layers"
        if c.has("--encoder-num-layers") and not c.has("--num-layers")
        else "--num-layers"
    )
    sequence = (
        "--encoder-seq-length"
        if c.has("--encoder-seq-length") and not c.has("--seq-length")
        else "--seq-length"
    )
    required = {
        "num_layers": layers,
        "hidden_size": "--hidden-size",
        "num_attention_heads": "--num-attention-heads",
        "seq_length": sequence,
    }
    for field, name in required.items():
        if not c.has(name):
            c.problems.append(f"{name} is not among the arguments, and the model needs it")
            continue
        value = c.whole(name)
        if value is not None:
            c.set(f"model.{field}", value, name, "the same number")
    positions = c.whole("--max-position-embeddings")
    if positions is not None:
        c.set("model.max_position_embeddings", positions, "--max-position-embeddings", "the same number")


def _heads(c: Conversion) -> None:
    heads = c.values.get("model.num_attention_heads")
    if c.has("--group-query-attention"):
        groups = c.whole("--num-query-groups", 1)
        c.set(
            "model.num_query_groups",
            groups,
            "--num-query-groups",
            "groups of keys and values; 1 where not given",
        )
        c.also(
            "--group-query-attention", "model.num_query_groups", "the switch that --num-query-groups needs"
        )
    elif heads is not None:
        c.drop(
            "--num-query-groups", "without --group-query-attention each head has keys and values of its own"
        )
        c.set(
            "model.num_query_groups",
            heads,
            "--group-query-attention",
            "each head has keys and values of its own",
        )
    channels = c.whole("--kv-channels")
    if channels is not None:
        c.set("model.kv_channels", channels, "--kv-channels", "the same number")


def _positions(c: Conversion) -> None:
    name = "--position-embedding-type"
    kind = c.text(name, "learned_absolute")
    if c.has("--use-rotary-position-embeddings") and kind in ("learned_absolute", "rope"):
        kind = "rope"
        c.set("model.position_embedding_type", "rope", "--use-rotary-position-embeddings", "rotary embedding")
        c.also(name, "model.position_embedding_type", "the same words")
    elif kind in ("learned_absolute", "rope"):
        c.set("model.position_embedding_type", kind, name, "the same words")
    else:
        c.lack(name, "curve", f"positions of the kind {kind} are not built; rope and learned_absolute are")
    if kind == "rope":
        c.set("model.rotary_base", c.number("--rotary-base", 10000.0), "--rotary-base", "the same number")
    else:
        c.drop("--rotary-base", "positions are not rotary")
    if c.has("--no-position-embedding"):
        if kind == "rope":
            c.drop("--no-position-embedding", "rotary positions have no embedding")
        else:
            c.problems.append(
                f"--no-position-embedding with --position-embedding-type {kind}: Megatron refuses it, positions are "
                "told by --position-embedding-type alone; give one of rope, learned_absolute"
            )
    _rope_scaling(c)


def _rope_scaling(c: Conversion) -> None:
    scaled = c.has("--use-rope-scaling")
    name = "--rope-scaling-type" if c.has("--rope-scaling-type") else "--use-rope-scaling"
    if name == "--rope-scaling-type":
        kind = c.text(name)
        if kind != "llama3":
            c.lack(name, "curve", f"scaling of rotary positions of the kind {kind} is not built; llama3 is")
            return
        scaled = True
    if not scaled:
        c.drop("--rope-scaling-factor", "rotary positions are not scaled")
        return
    c.set("model.use_rope_scaling", True, name, "scaling of rotary frequencies as in Llama 3")
    factors = {
        "rope_scaling_factor": ("--rope-scaling-factor", 8.0),
        "rope_scaling_low_freq_factor": ("--low-freq-factor", 1.0),
        "rope_scaling_high_freq_factor": ("--high-freq-factor", 4.0),
    }
    for field, (argument, default) in factors.items():
        c.set(f"model.{field}", c.number(argument, default), argument, "the same number")
    known = ("--original-max-position-embeddings", "--rope-scaling-original-max-position-embeddings")
    argument = next((one for one in known if c.has(one)), known[0])
    c.set(
        "model.rope_scaling_original_max_position_embeddings",
        c.whole(argument, _LLAMA3_CONTEXT),
        argument,
        "the same number",
    )


def _mlp(c: Conversion) -> None:
    hidden = c.values.get("model.hidden_size")
    activation = c.text("--activation-func") if c.has("--activation-func") else None
    gated = c.has("--swiglu") or activation == "swiglu"
    bias = not c.has("--disable-bias-linear")
    name = "--activation-func" if activation is not None else "--swiglu"
    c.set(
        "model.add_bias_linear",
        bias,
        "--disable-bias-linear",
        "the opposite: biases where the switch is absent",
    )
    if c.has("--add-qkv-bias"):
        if bias:
            c.drop("--add-qkv-bias", "every product of a block has a bias anyway")
        else:
            c.lack("--add-qkv-bias", "curve", "a bias of queries, keys and values alone is not built")
    if activation not in (None, "swiglu", "gelu"):
        c.lack(name, "curve", f"the activation {activation} is not built; swiglu and gelu are")
    elif gated:
        c.set("model.activation_func", "swiglu", name, "gated SiLU")
        c.drop("--no-bias-gelu-fusion", "there is no GELU")
        c.drop("--openai-gelu", "--swiglu decides it")
    else:
        c.set("model.activation_func", "gelu", name, "GELU, where no switch asks for another activation")
        _gelu(c, bias)
    given = c.whole("--ffn-hidden-size")
    if given is not None:
        c.set("model.ffn_hidden_size", given, "--ffn-hidden-size", "the same number")
    elif hidden is not None:
        width = int((4 * hidden * 2 / 3) / _SWIGLU_MULTIPLE) * _SWIGLU_MULTIPLE if gated else 4 * hidden
        rule = (
            "two thirds of 4 x hidden_size, rounded down to a multiple of 64" if gated else "4 x hidden_size"
        )
        c.set("model.ffn_hidden_size", width, "--ffn-hidden-size", rule)


def _gelu(c: Conversion, bias: bool) -> None:
    """Ours is the tanh form, and so is Megatron's fused one; its plain one is not."""
    tanh = next((one for one in ("--openai-gelu", "--gelu-tanh") if c.has(one)), None)
    if tanh is not None:
        c.also(tanh, "model.activation_func", "GELU in its tanh form, as ours")
        c.drop("--no-bias-gelu-fusion", f"{tanh} decides the form")
    elif c.has("--no-bias-gelu-fusion"):
        c.lack(
            "--no-bias-gelu-fusion",
            "curve",
            "GELU is in its tanh form here, as the fused one; this is the exact one",
        )
    elif not bias:
        reason = "without a bias Megatron computes the exact GELU; ours is in its tanh form"
        c.remark("--disable-bias-linear without --swiglu", "curve", reason)


def _vocabulary(c: Conversion) -> None:
    """Rows of the embedding, with Megatron's padding: its softmax runs over padded rows as well."""
    for name in ("--padded-vocab-size", "--pad-vocab-size-to"):
        if c.has(name):
            c.set("model.vocab_size", c.whole(name), name, "rows of the embedding, padding included")
            c.drop("--vocab-size", f"{name} decides the rows of the embedding")
            c.drop("--make-vocab-size-divisible-by", f"{name} decides the rows of the embedding")
            return
    size = c.whole("--vocab-size")
    if size is None:
        return
    multiple = c.whole("--make-vocab-size-divisible-by", 128) or 1
    parts = c.whole(tensor_parallel_name(c), 1) or 1
    step = max(1, multiple * parts)
    padded = -(-size // step) * step
    rule = f"rounded up to a multiple of {multiple} x {parts} tensor-parallel ranks, as Megatron pads it"
    kind = (
        c.text("--tokenizer-type")
        if c.has("--tokenizer-type") and not c.unreadable("--tokenizer-type")
        else None
    )
    if kind == "NullTokenizer":
        rule += "; before 2026 it added a row for the end of a document first"
    elif kind not in (None, "TikTokenizer"):
        rule += f"; there the size of the {kind} decides, if it is another one"
    c.set("model.vocab_size", padded, "--vocab-size", rule)
    c.also("--make-vocab-size-divisible-by", "model.vocab_size", rule)
