"""``config.json`` of a Hugging Face folder and our model section: which fields mean the same, and which do not.

Three architectures are settings of our decoder: LlamaForCausalLM, Qwen3ForCausalLM and GPT2LMHeadModel. The
keys are those of transformers 5.24; both its ``rope_parameters`` and the older ``rope_theta`` with
``rope_scaling`` are read, and the older pair is written, because every version understands it.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from drivetrain.config.model import ModelConfig
from drivetrain.errors import CheckpointError

__all__ = ["config_from_huggingface", "config_to_huggingface", "huggingface_architecture", "obstacles"]

LLAMA, QWEN3, GPT2 = "LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel"
MODEL_TYPES = {LLAMA: "llama", QWEN3: "qwen3", GPT2: "gpt2"}

# fmt: off
IRRELEVANT = frozenset({
    "architectures", "model_type", "transformers_version", "_name_or_path", "dtype", "torch_dtype",
    "use_cache", "tokenizer_class", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
    "id2label", "label2id", "problem_type", "task_specific_params", "output_attentions",
    "output_hidden_states", "return_dict", "chunk_size_feed_forward", "gradient_checkpointing",
    "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "n_ctx",
})
# fmt: on
"""Keys that leave the function from token ids to logits alone."""

# Key to the values we implement; the first is what an absent key means.
DEMANDED: dict[str, dict[str, tuple[Any, ...]]] = {
    LLAMA: {"hidden_act": ("silu",), "pretraining_tp": (1, None), "is_encoder_decoder": (False,)},
    QWEN3: {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "is_encoder_decoder": (False,),
    },
    GPT2: {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
        "is_encoder_decoder": (False,),
    },
}

_REQUIRED = object()
# Our field, their key, and what an absent key means to transformers.
_ROTARY_FIELDS: tuple[tuple[str, str, Any], ...] = (
    ("num_layers", "num_hidden_layers", _REQUIRED),
    ("hidden_size", "hidden_size", _REQUIRED),
    ("ffn_hidden_size", "intermediate_size", _REQUIRED),
    ("num_attention_heads", "num_attention_heads", _REQUIRED),
    ("num_query_groups", "num_key_value_heads", None),
    ("kv_channels", "head_dim", None),
    ("vocab_size", "vocab_size", _REQUIRED),
    ("norm_epsilon", "rms_norm_eps", 1e-6),
    ("attention_dropout", "attention_dropout", 0.0),
    ("init_method_std", "initializer_range", 0.02),
)
_GPT2_FIELDS: tuple[tuple[str, str, Any], ...] = (
    ("num_layers", "n_layer", _REQUIRED),
    ("hidden_size", "n_embd", _REQUIRED),
    ("ffn_hidden_size", "n_inner", None),
    ("num_attention_heads", "n_head", _REQUIRED),
    ("vocab_size", "vocab_size", _REQUIRED),
    ("max_position_embeddings", "n_positions", 1024),
    ("norm_epsilon", "layer_norm_epsilon", 1e-5),
    ("hidden_dropout", "resid_pdrop", 0.1),
    ("attention_dropout", "attn_pdrop", 0.1),
    ("init_method_std", "initializer_range", 0.02),
)
_LLAMA3_FIELDS = (
    ("rope_scaling_factor", "factor"),
    ("rope_scaling_low_freq_factor", "low_freq_factor"),
    ("rope_scaling_high_freq_factor", "high_freq_factor"),
    ("rope_scaling_original_max_position_embeddings", "original_max_position_embeddings"),
)


def huggingface_architecture(model: ModelConfig) -> str | None:
    """The transformers class that computes the same function, or None; ``obstacles`` says why."""
    return None if obstacles(model) else _nearest_architecture(model)


def obstacles(model: ModelConfig) -> list[str]:
    """The fields that have no equivalent in the nearest transformers class, one line each.

    Dropout is no obstacle: it is no part of the trained function. ``hidden_dropout`` of a rotary model is
    simply not in its config.json.
    """
    architecture = _nearest_architecture(model)
    demands: list[tuple[str, object, object]] = [("qk_layernorm", model.qk_layernorm, architecture == QWEN3)]
    if architecture == GPT2:
        demands += [
            ("normalization", model.normalization, "LayerNorm"),
            ("activation_func", model.activation_func, "gelu"),
            ("add_bias_linear", model.add_bias_linear, True),
            ("num_query_groups", model.query_groups, model.num_attention_heads),
            ("kv_channels", model.head_size * model.num_attention_heads, model.hidden_size),
        ]
    else:
        demands += [
            ("normalization", model.normalization, "RMSNorm"),
            ("activation_func", model.activation_func, "swiglu"),
        ]
    if architecture == QWEN3:
        demands.append(("add_bias_linear", model.add_bias_linear, False))
    if architecture == LLAMA:
        demands.append(("hidden_size", model.hidden_size % model.num_attention_heads, 0))
    meanings = {
        "kv_channels": "model.num_attention_heads x model.kv_channels",
        "hidden_size": "the rest of model.hidden_size / model.num_attention_heads",
    }
    return [
        f"{meanings.get(field, f'model.{field}')} is {value!r}; {architecture} has only {only!r}"
        for field, value, only in demands
        if value != only
    ]


def _nearest_architecture(model: ModelConfig) -> str:
    if model.position_embedding_type == "learned_absolute":
        return GPT2
    return QWEN3 if model.qk_layernorm else LLAMA


def config_to_huggingface(model: ModelConfig) -> dict[str, Any]:
    """The keys of config.json for ``model``, without token ids and dtype.

    Raises:
        CheckpointError: no transformers class computes the same function.
    """
    architecture = huggingface_architecture(model)
    if architecture is None:
        raise CheckpointError("this model has no Hugging Face equivalent: " + "; ".join(obstacles(model)))
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }
    config |= {key: allowed[0] for key, allowed in DEMANDED[architecture].items()}
    if architecture == GPT2:
        config |= {key: getattr(model, field) for field, key, _ in _GPT2_FIELDS}
        return config | {
            "n_inner": model.ffn_size,
            "n_positions": model.max_positions,
            "embd_pdrop": model.hidden_dropout,
        }
    config |= {key: getattr(model, field) for field, key, _ in _ROTARY_FIELDS}
    config |= {
        "intermediate_size": model.ffn_size,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_size,
        "max_position_embeddings": model.max_positions,
        "rope_theta": model.rotary_base,
        "rope_scaling": None,
    }
    if model.use_rope_scaling:
        scaling = {key: getattr(model, field) for field, key in _LLAMA3_FIELDS}
        config["rope_scaling"] = {"rope_type": "llama3"} | scaling
    if architecture == LLAMA:
        config |= {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}
    return config


def config_from_huggingface(
    config: Mapping[str, Any], where: str, seq_length: int | None = None
) -> ModelConfig:
    """The model section that computes the same function as the config.json of a folder.

    Args:
        config: the parsed file.
        where: its path, for messages.
        seq_length: tokens of a training sequence, of which config.json says nothing; the longest position
            it allows when absent.

    Raises:
        CheckpointError: an architecture, key or value that our decoder has no setting for. Nothing that could
            change the function is ignored.
    """
    architecture = _architecture_of(config, where)
    fields = _read_gpt2(config, where) if architecture == GPT2 else _read_rotary(architecture, config, where)
    for key, allowed in DEMANDED[architecture].items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            known = " or ".join(repr(one) for one in allowed)
            raise CheckpointError(f"{where}: {key} is {value!r}; Drivetrain has only {known}")
    fields["seq_length"] = seq_length or fields["max_position_embeddings"]
    try:
        return ModelConfig(**fields)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise CheckpointError(f"{where}: {problems}") from None


def _architecture_of(config: Mapping[str, Any], where: str) -> str:
    named = config.get("architectures") or []
    by_type = {model_type: architecture for architecture, model_type in MODEL_TYPES.items()}
    architecture = named[0] if len(named) == 1 else by_type.get(config.get("model_type", ""))
    if architecture not in MODEL_TYPES:
        found = named or config.get("model_type") or "nothing"
        raise CheckpointError(f"{where}: architecture {found}; Drivetrain reads {', '.join(MODEL_TYPES)}")
    return str(architecture)


def _read_fields(
    table: tuple[tuple[str, str, Any], ...], config: Mapping[str, Any], where: str
) -> dict[str, Any]:
    missing = [key for _, key, default in table if default is _REQUIRED and config.get(key) is None]
    if missing:
        raise CheckpointError(f"{where}: no {', '.join(missing)}")
    return {field: config.get(key, default) for field, key, default in table}


def _refuse_unknown(config: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(config) - known - IRRELEVANT)
    if unknown:
        raise CheckpointError(
            f"{where}: unknown keys {', '.join(unknown)}, which may change the function; remove them if they do not"
        )


def _read_rotary(architecture: str, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    own = {"max_position_embeddings", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters"}
    own |= {"attention_bias", "mlp_bias"} if architecture == LLAMA else set()
    # Without use_sliding_window these have no effect; layer_types is checked below.
    own |= {"sliding_window", "max_window_layers", "layer_types"} if architecture == QWEN3 else set()
    _refuse_unknown(config, {key for _, key, _ in _ROTARY_FIELDS} | own | set(DEMANDED[architecture]), where)
    fields = _read_fields(_ROTARY_FIELDS, config, where) | _read_rope(config, where)
    sliding = sorted(set(config.get("layer_types") or []) - {"full_attention"})
    if sliding:
        raise CheckpointError(
            f"{where}: layer_types has {', '.join(sliding)}; Drivetrain has only full_attention"
        )
    if architecture == QWEN3:
        fields["kv_channels"] = config.get("head_dim") or 128
    else:
        biases = (config.get("attention_bias", False), config.get("mlp_bias", False))
        if biases[0] != biases[1]:
            raise CheckpointError(
                f"{where}: attention_bias is {biases[0]} and mlp_bias is {biases[1]}; Drivetrain has one "
                "model.add_bias_linear for both"
            )
        fields["add_bias_linear"] = biases[0]
    return fields | {
        "max_position_embeddings": config.get("max_position_embeddings")
        or (2048 if architecture == LLAMA else 32768),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "qk_layernorm": architecture == QWEN3,
    }


def _read_rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    fields: dict[str, Any] = {
        "rotary_base": rope.pop("rope_theta", None) or config.get("rope_theta", 10_000.0)
    }
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"{where}: partial_rotary_factor; Drivetrain rotates whole heads only")
    if kind == "llama3":
        missing = [key for _, key in _LLAMA3_FIELDS if key not in rope]
        if missing:
            raise CheckpointError(f"{where}: rotary scaling llama3 without {', '.join(missing)}")
        fields |= {field: rope.pop(key) for field, key in _LLAMA3_FIELDS}
        fields["use_rope_scaling"] = True
    elif kind != "default":
        raise CheckpointError(f"{where}: rotary scaling {kind!r}; Drivetrain has only 'llama3' or none")
    if rope:
        raise CheckpointError(f"{where}: unknown rotary keys {', '.join(sorted(rope))}")
    return fields


def _read_gpt2(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    own = {"embd_pdrop", "tie_word_embeddings"}
    _refuse_unknown(config, {key for _, key, _ in _GPT2_FIELDS} | own | set(DEMANDED[GPT2]), where)
    fields = _read_fields(_GPT2_FIELDS, config, where)
    embedding_dropout = config.get("embd_pdrop", 0.1)
    if embedding_dropout != fields["hidden_dropout"]:
        raise CheckpointError(
            f"{where}: embd_pdrop is {embedding_dropout} and resid_pdrop is {fields['hidden_dropout']}; "
            "Drivetrain has one model.hidden_dropout for both"
        )
    return fields | {
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "activation_func": "gelu",
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
    }
