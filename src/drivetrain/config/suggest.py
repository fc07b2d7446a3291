"""The nearest legal word to one that is not legal."""

import difflib
import types
from collections.abc import Iterable, Mapping

from drivetrain.config.leaves import leaves, section_types

__all__ = ["nearest", "nearest_leaf"]

# Names that other trainers use for the same thing (Megatron-LM, torchtitan, DeepSpeed, nanotron, MaxText,
# Hugging Face Trainer and configurations); only what plain similarity would not find.
_ALIASES: Mapping[str, str] = types.MappingProxyType(
    {
        "n_layers": "model.num_layers",
        "n_layer": "model.num_layers",
        "num_hidden_layers": "model.num_layers",
        "dim": "model.hidden_size",
        "n_embd": "model.hidden_size",
        "d_model": "model.hidden_size",
        "hidden_dim": "model.ffn_hidden_size",
        "intermediate_size": "model.ffn_hidden_size",
        "n_heads": "model.num_attention_heads",
        "n_head": "model.num_attention_heads",
        "n_kv_heads": "model.num_query_groups",
        "num_key_value_heads": "model.num_query_groups",
        "head_dim": "model.kv_channels",
        "max_context_length": "model.seq_length",
        "block_size": "model.seq_length",
        "rope_theta": "model.rotary_base",
        "rms_norm_eps": "model.norm_epsilon",
        "layer_norm_eps": "model.norm_epsilon",
        "hidden_act": "model.activation_func",
        "tie_word_embeddings": "model.untie_embeddings_and_output_weights",
        "initializer_range": "model.init_method_std",
        "train_micro_batch_size_per_gpu": "training.micro_batch_size",
        "per_device_train_batch_size": "training.micro_batch_size",
        "per_device_batch_size": "training.micro_batch_size",
        "batch_size": "training.global_batch_size",
        "train_batch_size": "training.global_batch_size",
        "gradient_accumulation_steps": "training.global_batch_size",
        "steps": "training.train_iters",
        "max_steps": "training.train_iters",
        "num_steps": "training.train_iters",
        "max_norm": "training.clip_grad",
        "max_grad_norm": "training.clip_grad",
        "learning_rate": "optimizer.lr",
        "warmup_steps": "lr_schedule.lr_warmup_tokens",
        "lr_scheduler_type": "lr_schedule.lr_decay_style",
        "log_freq": "monitor.log_interval",
        "logging_steps": "monitor.log_interval",
        "save_steps": "checkpoint.save_interval",
        "save_total_limit": "checkpoint.keep_latest_k",
        "deterministic_mode": "run.deterministic",
        "bf16": "precision.params_dtype",
        "fp16": "precision.params_dtype",
        "ddp_bucket_size": "overlap.bucket_size_mb",
        "ddp_bucket_cap_mb": "overlap.bucket_size_mb",
        "bucket_cap_mb": "overlap.bucket_size_mb",
    }
)


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``word``, whatever the case, or None where none is alike."""
    originals = {candidate.lower(): candidate for candidate in candidates}
    # Longer words can't be a slip of the pen, and difflib is quadratic.
    matches = difflib.get_close_matches(word[:100].lower(), originals, n=1, cutoff=0.6)
    return originals[matches[0]] if matches else None


def nearest_leaf(section: str | None, name: str) -> str | None:
    """The dotted path that a user who wrote ``section.name`` (or only ``name``) most likely meant."""
    known = leaves()
    sections = section_types()
    if section is not None and section not in sections:
        section = nearest(section, sections)
    if f"{section}.{name}" in known:
        return f"{section}.{name}"
    key = name.lower().replace("-", "_")
    elsewhere = [path for path, leaf in known.items() if leaf.name == key]
    if elsewhere:
        return elsewhere[0]
    if key in _ALIASES:
        return _ALIASES[key]
    here = {leaf.name: path for path, leaf in known.items() if leaf.section == section}
    everywhere = {leaf.name: path for path, leaf in known.items()}
    for names in (here, everywhere):
        match = nearest(key, names)
        if match is not None:
            return names[match]
    return None
