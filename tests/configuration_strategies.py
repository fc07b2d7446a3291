"""Random configurations for hypothesis: small enough to build, often right, wrong in every way we know."""

from typing import Any

import tomlkit
from hypothesis import strategies as st

from drivetrain.config import BASIC_RULES, Leaf, RunConfig, leaves

__all__ = ["as_toml", "configurations", "schema_valid_configs", "value_of"]

Values = dict[str, dict[str, Any]]

# Leaves that name things outside the configuration; a random value would test the disk, not the rules.
_EXTERNAL = {
    "data.data_path",
    "data.remote_cache_path",
    "data.sample_cache_path",
    "data.tokenizer_path",
    "checkpoint.initial_load_path",
    "memory.device_memory_limit_bytes",
    "fusion.tuned_file",
    "run.runs_dir",
}

# Leaves that a rule looks at: changed more often than the others.
_RULED = sorted({field for rule in BASIC_RULES for field in rule.fields} - _EXTERNAL)

# Values (legal alone, illegal alone) for a changed leaf where the general ones would make a build slow, start a
# crowd of processes, or hardly ever be legal.
_WILD: dict[str, tuple[list[Any], list[Any]]] = {
    "model.vocab_size": ([258, 1000], [-1, 0, 1, "many", None]),
    "model.num_layers": ([1, 2, 3], [-1, 0, 1025, "two"]),
    "data.num_workers": ([0, 1], [-1, 257, "all"]),
    "data.split": (["0,5", "5,0", "0,0", "1,1"], ["95", "a,b", ""]),
    "data.transform": (["numpy.flip", "numpy:flip,numpy.sort", "a..b", "a.1x.y"], ["flip", "1x.y", "a.b,"]),
    "data.batch_transform": (["numpy.copy", "numpy:flip", "a..b"], ["flip", "a.b c.d"]),
    "data.prefetch_batches": ([0, 1, 3], [-1, 1025, "all"]),
    "data.sample_cache_bytes": ([0, 1, 10_000], [-1, "all"]),
    "data.packing": (["concatenate", "best_fit", "pad"], ["padded", 1]),
    "profiler.profile_ranks": (["0", "1", "0,1", "all"], ["", "0,", "first", 0]),
    "run.num_threads": ([1, 2], [-1, 0]),
    "run.name": (["ok.name_1"], ["a b", "", "-x", 5]),
    "run.device": (["cpu"], ["gpu", 0]),
    "training.train_iters": ([1, 5, 10**9], [-1, 0, 10**10, 2.5]),
    "parallelism.data_parallel_size": ([1, 2, 3, 4], [-1, 0]),
    "parallelism.tensor_model_parallel_size": ([1, 2, 3, 4], [-1, 0, "all"]),
    "parallelism.pipeline_model_parallel_size": ([1, 2, 3], [-1, 0]),
    "parallelism.pipeline_model_parallel_layout": (["1,1", "2,1", "3", "0,2"], ["1,", "a", ""]),
    "parallelism.virtual_pipeline_model_parallel_size": ([1, 2, 3], [-1, 0]),
    "parallelism.zero_stage": ([0, 1, 2, 3], [-1, 4, "all"]),
    "parallelism.hybrid_shard_size": ([1, 2, 3], [-1, 0]),
    "parallelism.rank_order": (["tp-cp-pp-dp", "dp-pp-cp-tp", "tp-tp-pp-dp"], ["tp-dp", "tp cp pp dp", ""]),
    "memory.recompute_modules": (["norm", "core_attn,mlp", "mlp,mlp_act"], ["attention", "norm,", ""]),
    "overlap.tp_chunks": ([1, 3, 4.0, "2"], [-1, 0, 2.5, "", "all", True]),
}


def as_toml(values: Values) -> str:
    """The configuration as a TOML file; leaves that are None are left out."""
    return tomlkit.dumps(
        {
            section: {name: value for name, value in fields.items() if value is not None}
            for section, fields in values.items()
        }
    )


@st.composite
def configurations(draw: st.DrawFn) -> tuple[Values, int]:
    """(values by section and field, number of processes) of a run with a model of at most 3 x 64.

    About half are right: they pass the schema and the basic rules. The others differ from a right one
    in two to five leaves. Nothing outside is named: no corpus (vocab_size is at least 257 when legal, so any
    byte-level corpus of 257 tokens fits), no initial weights, no device but the CPU.
    """
    world_size = draw(st.sampled_from([1, 1, 2, 4]))
    values = _model(draw)
    parallelism = _parallelism(draw, values["model"], world_size)
    ranks = parallelism["tensor_model_parallel_size"] * parallelism["pipeline_model_parallel_size"]
    values |= _training(draw, world_size // ranks, parallelism["pipeline_model_parallel_size"])
    profiles = values["training"]["train_iters"] >= 4 and draw(st.booleans())
    values |= _surroundings(draw, world_size, profiles)
    values["parallelism"] = parallelism
    values["lr_schedule"] = _lr_schedule(draw, values)
    for _ in range(draw(st.sampled_from([0, 0, 2, 3, 4, 5]))):
        path = draw(st.sampled_from(_RULED) | st.sampled_from(sorted(set(leaves()) - _EXTERNAL)))
        leaf = leaves()[path]
        values[leaf.section][leaf.name] = draw(_wild(leaf))
    return values, world_size


def _maybe(draw: st.DrawFn, value: Any) -> Any:
    """The value or None, for a leaf that may be absent."""
    return value if draw(st.booleans()) else None


def _model(draw: st.DrawFn) -> Values:
    rope = draw(st.booleans())
    rms = draw(st.booleans())
    heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    head_size = draw(st.sampled_from([2, 4, 6, 8])) if rope else draw(st.integers(1, 9))
    seq_length = draw(st.integers(2, 48))
    low = draw(st.sampled_from([0.5, 1.0, 2.0]))
    model = {
        "num_layers": draw(st.integers(1, 3)),
        "hidden_size": heads * head_size,
        "num_attention_heads": heads,
        "num_query_groups": _maybe(draw, draw(st.sampled_from([d for d in range(1, 7) if heads % d == 0]))),
        "kv_channels": _maybe(draw, 2 * draw(st.integers(1, 6))),
        "ffn_hidden_size": _maybe(draw, draw(st.integers(1, 64))),
        "seq_length": seq_length,
        "vocab_size": draw(st.sampled_from([257, 300, 512])),
        "max_position_embeddings": _maybe(draw, seq_length + draw(st.integers(0, 16))),
        "normalization": "RMSNorm" if rms else "LayerNorm",
        "norm_epsilon": draw(st.sampled_from([1e-5, 1e-6, 0.01])),
        "position_embedding_type": "rope" if rope else "learned_absolute",
        "rotary_base": draw(st.sampled_from([10_000, 500_000.0, 2.0])),
        "use_rope_scaling": rope and draw(st.booleans()),
        "rope_scaling_factor": draw(st.sampled_from([1, 2.5, 8.0])),
        "rope_scaling_low_freq_factor": low,
        "rope_scaling_high_freq_factor": low * draw(st.sampled_from([1.5, 4])),
        "rope_scaling_original_max_position_embeddings": draw(st.sampled_from([16, 8192])),
        "activation_func": draw(st.sampled_from(["swiglu", "gelu"])),
        "add_bias_linear": draw(st.booleans()),
        "qk_layernorm": rms and draw(st.booleans()),
        "untie_embeddings_and_output_weights": draw(st.booleans()),
        "hidden_dropout": draw(st.sampled_from([0, 0.1])),
        "attention_dropout": draw(st.sampled_from([0, 0.1])),
        "init_method_std": draw(st.sampled_from([0.02, 0.5])),
    }
    return {"model": model}


def _parallelism(draw: st.DrawFn, model: dict[str, Any], world_size: int) -> dict[str, Any]:
    """A right layout of ``world_size`` processes for ``model``."""
    left = world_size
    halves = model["num_attention_heads"] % 2 == 0 and (model["ffn_hidden_size"] or 2) % 2 == 0
    groups = model["num_query_groups"] or model["num_attention_heads"]
    tensor = 2 if left % 2 == 0 and halves and (groups == 1 or groups % 2 == 0) and draw(st.booleans()) else 1
    left //= tensor
    pipeline = 2 if left % 2 == 0 and model["num_layers"] >= 2 and draw(st.booleans()) else 1
    left //= pipeline
    zero_stage = draw(st.sampled_from([0, 0, 1, 2, 3]))
    # One rank with all shards is right only where nothing is to be shared.
    shard_sizes = [1, left] if zero_stage == 0 else [left]
    return {
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": model["seq_length"] % tensor == 0 and draw(st.booleans()),
        "pipeline_model_parallel_size": pipeline,
        "pipeline_schedule": draw(st.sampled_from(["gpipe", "1f1b"])),
        "data_parallel_size": _maybe(draw, left),
        "zero_stage": zero_stage,
        "hybrid_shard_size": _maybe(draw, draw(st.sampled_from(shard_sizes))),
        "reduce_each_micro_batch": pipeline == 1 and draw(st.booleans()),
        "rank_order": draw(st.sampled_from(["tp-cp-pp-dp", "pp-tp-dp-cp"])),
        "distributed_timeout_minutes": draw(st.sampled_from([1, 10.0])),
    }


def _training(draw: st.DrawFn, ranks: int, least_microbatches: int) -> Values:
    micro = draw(st.integers(1, 4))
    validates = draw(st.booleans())
    num_workers = draw(st.sampled_from([0, 0, 1]))
    return {
        "training": {
            "micro_batch_size": micro,
            "global_batch_size": micro * ranks * draw(st.integers(least_microbatches, 3)),
            "train_iters": draw(st.integers(1, 5)),
            "clip_grad": draw(st.sampled_from([0, 0.5, 1.0])),
            "eval_interval": draw(st.integers(0, 3)),
            "eval_iters": draw(st.integers(1, 2)) if validates else 0,
        },
        "data": {
            "split": draw(st.sampled_from(["95,5", "1,1", "0.7,0.3"] + ([] if validates else ["1,0"]))),
            "reset_attention_mask": draw(st.booleans()),
            "reset_position_ids": draw(st.booleans()),
            "eod_mask_loss": draw(st.booleans()),
            "num_workers": num_workers,
            "prefetch_factor": draw(st.integers(1, 4)) if num_workers else 2,
            "transform": _maybe(draw, draw(st.sampled_from(["numpy.flip", "numpy:sort"]))),
            "batch_transform": _maybe(draw, "numpy.sort"),
            "packing": draw(st.sampled_from(["concatenate", "concatenate", "best_fit", "pad"])),
            "prefetch_batches": 0 if num_workers else draw(st.sampled_from([0, 2])),
        },
        "optimizer": {
            "lr": draw(st.sampled_from([1e-5, 1e-3, 0.1])),
            "weight_decay": draw(st.sampled_from([0, 0.1])),
            "adam_beta1": draw(st.sampled_from([0, 0.9])),
            "adam_beta2": draw(st.sampled_from([0.95, 0.999])),
            "adam_eps": draw(st.sampled_from([1e-8, 1e-5])),
            "fused": draw(st.booleans()),
        },
    }


def _lr_schedule(draw: st.DrawFn, values: Values) -> dict[str, Any]:
    training = values["training"]
    total = training["train_iters"] * training["global_batch_size"] * values["model"]["seq_length"]
    end = draw(st.sampled_from([total, 2 * total, max(2, total // 2)]))
    warmup = draw(st.integers(0, end // 2))
    return {
        "lr_decay_style": draw(st.sampled_from(["cosine", "WSD", "constant"])),
        "min_lr": values["optimizer"]["lr"] * draw(st.sampled_from([0, 0.1, 1])),
        "lr_warmup_tokens": warmup,
        "lr_decay_tokens": end if end != total else _maybe(draw, end),
        "lr_wsd_decay_tokens": _maybe(draw, draw(st.integers(1, end - warmup))),
        "lr_wsd_decay_style": draw(st.sampled_from(["linear", "cosine", "minus_sqrt"])),
    }


def _surroundings(draw: st.DrawFn, world_size: int, profiles: bool) -> Values:
    return {
        "overlap": {"bucket_size_mb": draw(st.sampled_from([0, 0.01, 25]))},
        "fusion": {"compile": draw(st.booleans())},
        "memory": {"device_memory_limit_bytes": _maybe(draw, 2**40)},
        "precision": {"params_dtype": draw(st.sampled_from(["fp32", "bf16", "fp16"]))},
        "checkpoint": {
            "save_interval": draw(st.integers(0, 3)),
            "keep_latest_k": draw(st.integers(1, 3)),
        },
        "profiler": {
            "profile": profiles,
            "profile_step_start": 4,
            "profile_step_end": 5,
            "profile_ranks": draw(st.sampled_from(["0", "all", str(world_size - 1)])),
            "record_shapes": draw(st.booleans()),
            "with_stack": False,
            "file_size_limit_bytes": draw(st.sampled_from([1, 10**6])),
        },
        "monitor": {"log_interval": draw(st.integers(1, 3)), "log_rank_times": draw(st.booleans())},
        "run": {
            "name": _maybe(draw, draw(st.sampled_from(["a", "llama-2m_x.1"]))),
            "seed": draw(st.integers(0, 2**63 - 1)),
            "deterministic": draw(st.booleans()),
            "device": draw(st.sampled_from(["auto", "cpu"])),
            "num_threads": _maybe(draw, 1),
        },
    }


def _wild(leaf: Leaf) -> st.SearchStrategy[Any]:
    """Any small value for a leaf: often legal alone and wrong among the others, sometimes wrong alone."""
    legal: st.SearchStrategy[Any]
    illegal: list[Any]
    if leaf.path in _WILD:
        legal, illegal = st.sampled_from(_WILD[leaf.path][0]), _WILD[leaf.path][1]
    elif leaf.kind == "whole number":
        legal, illegal = st.integers(1, 70), [-1, 1.5, "x", True, 2**64]
    elif leaf.kind == "number":
        legal, illegal = st.sampled_from([0.01, 0.1, 0.5, 1, 2.0, 8]), [-1, "x", False, 1e300]
    elif leaf.kind == "true or false":
        legal, illegal = st.booleans(), [1, "yes"]
    else:
        legal, illegal = st.sampled_from(leaf.choices), ["neither", 3]
    return st.integers(0, 5).flatmap(lambda roll: st.sampled_from(illegal) if roll == 5 else legal)


def value_of(leaf: Leaf) -> st.SearchStrategy[Any]:
    """Any legal value of a leaf taken alone, None included where it may be absent."""
    limits = dict(leaf.bounds)
    values: st.SearchStrategy[Any]
    if leaf.kind == "choice":
        values = st.sampled_from(leaf.choices)
    elif leaf.kind == "true or false":
        values = st.booleans()
    elif leaf.kind == "whole number":
        values = st.integers(int(limits[">="]), int(limits["<="]))
    elif leaf.kind == "number":
        values = st.floats(
            limits.get(">=", limits.get(">")),
            limits.get("<=", limits.get("<")),
            exclude_min=">" in limits,
            exclude_max="<" in limits,
        )
    else:
        values = st.text(min_size=1)
        if leaf.pattern is not None:
            # The schema's regular expressions know other letters than Python's beyond ASCII.
            alphabet = st.characters(codec="ascii")
            values = st.from_regex(leaf.pattern.removesuffix("$") + r"\Z", alphabet=alphabet)
    return st.none() | values if leaf.optional else values


@st.composite
def schema_valid_configs(draw: st.DrawFn) -> RunConfig:
    """Any configuration that the schema accepts: each leaf anywhere in its range, rules between them ignored."""
    values: Values = {}
    for leaf in leaves().values():
        values.setdefault(leaf.section, {})[leaf.name] = draw(value_of(leaf))
    return RunConfig.model_validate(values)
