"""The fields of a torchtitan job file as fields of ours. Its defaults are written out, they are others than ours."""

import functools
import tomllib
from importlib import resources
from typing import Any

from drivetrain.config.importing.conversion import Conversion
from drivetrain.config.suggest import nearest

__all__ = ["convert_torchtitan"]

_SCHEDULES = {
    "gpipe": ("gpipe", 1),
    "1f1b": ("1f1b", 1),
    "interleaved1f1b": ("interleaved_1f1b", 2),
    "interleavedzerobubble": ("interleaved_zero_bubble", 2),
    "zbvzerobubble": ("zbv", 2),
    "dualpipev": ("dualpipev", 2),
}
"""Name in lower case to ours, and stages on each rank."""
_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


_BEFORE_SCALING = (
    "training.batch_size",
    "training.warmup_steps",
    "training.tensor_parallel_degree",
    "training.data_parallel_degree",
    "training.data_parallel_shard_degree",
    "experimental.pipeline_parallel_degree",
    "experimental.context_parallel_degree",
)
"""Places of fields that versions before July 2025 have alone."""


def convert_torchtitan(c: Conversion) -> None:
    """Every field that has one of ours."""
    _model(c)
    degrees = _layout(c)
    _batch(c, degrees)
    _schedule(c)
    _optimizer(c)
    _data(c)
    _memory(c)
    _operation(c)


def _first(c: Conversion, *names: str) -> str:
    """The first of several places of a field that was given; the newest where none was."""
    return next((name for name in names if name in c.source.arguments), names[0])


@functools.cache
def _models() -> dict[str, Any]:
    file = resources.files("drivetrain.config.importing") / "torchtitan_models.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _model(c: Conversion) -> None:
    family_name = c.text("model.name", "llama3") or "llama3"
    flavor_name = c.text("model.flavor", "debugmodel") or "debugmodel"
    family = _models().get(family_name)
    if family is None:
        known = ", ".join(_models())
        c.problems.append(f"model.name {family_name}: its shape is not known here; those of {known} are")
        return
    flavors = {name: one for one in family["flavors"] for name in one["names"]}
    flavor = flavors.get(flavor_name)
    if flavor is None:
        alike = nearest(flavor_name, flavors)
        hint = f"; did you mean {alike}?" if alike else ""
        c.problems.append(
            f"model.flavor {flavor_name}: no shape of {family_name} that can be built here; there are "
            f"{', '.join(flavors)}{hint}"
        )
        return
    rule = f"the shape of {family_name} {flavor_name}"
    documents = bool(flavor.get("documents"))
    fields = {
        "model.num_layers": flavor["layers"],
        "model.hidden_size": flavor["hidden"],
        "model.ffn_hidden_size": flavor["ffn"],
        "model.num_attention_heads": flavor["heads"],
        "model.num_query_groups": flavor["groups"],
        "model.kv_channels": family.get("head_size", flavor["hidden"] // flavor["heads"]),
        "model.vocab_size": flavor["vocabulary"],
        "model.rotary_base": family["rotary_base"],
        "model.norm_epsilon": family["norm_epsilon"],
        "model.qk_layernorm": bool(family.get("qk_layernorm")),
        "model.untie_embeddings_and_output_weights": not flavor.get("tied"),
        "model.normalization": "RMSNorm",
        "model.position_embedding_type": "rope",
        "model.activation_func": "swiglu",
        "model.add_bias_linear": False,
        "data.reset_attention_mask": documents,
        "data.reset_position_ids": False,
    }
    for path, value in fields.items():
        c.set(path, value, "model.flavor", rule)
    _scaling(c, family)
    c.also("model.name", "model.num_layers", rule)
    c.remark(
        "first weights",
        "curve",
        "torchtitan draws embeddings with a deviation of 1, the output matrix with hidden_size^-0.5 and a block's "
        "output matrices by its depth; here all have model.init_method_std",
    )


def _scaling(c: Conversion, family: dict[str, Any]) -> None:
    """Frequencies of rotary positions, which the family's model scales whatever the job file says."""
    scaling = family.get("rope_scaling")
    if scaling is None:
        return
    older = next((name for name in _BEFORE_SCALING if c.has(name)), None)
    if older is not None:
        c.remark(
            "scaling of rotary positions",
            "curve",
            f"not scaled here, as before October 2025, which {older} is from; later versions scale them: "
            "model.use_rope_scaling=true",
        )
        return
    rule = "rotary frequencies are scaled as in Llama 3.1; versions before October 2025 did not"
    c.set("model.use_rope_scaling", True, "model.flavor", rule)
    for path, value in scaling.items():
        c.set(f"model.rope_scaling_{path}", value, "model.flavor", rule)


def _degree(c: Conversion, name: str, default: int) -> tuple[str, int]:
    places = [f"{section}.{name}" for section in ("parallelism", "training", "experimental")]
    place = _first(c, *places)
    found = c.whole(place, default)
    if found is not None and found < 1 and (found, default) != (-1, -1):
        least = "1, or -1 for what the others leave" if default == -1 else "1"
        c.problems.append(f"{place} {found}: expected at least {least}; the nearest legal value is 1")
        found = 1
    return place, default if found is None else found


def _layout(c: Conversion) -> dict[str, int]:
    """Sizes of the layout; ``dp`` is 0 where nobody knows."""
    tp_name, tp = _degree(c, "tensor_parallel_degree", 1)
    pp_name, pp = _degree(c, "pipeline_parallel_degree", 1)
    cp_name, cp = _degree(c, "context_parallel_degree", 1)
    replicas_name, replicas = _degree(c, "data_parallel_replicate_degree", 1)
    shards_name, shards = _degree(c, "data_parallel_shard_degree", -1)
    if c.has("training.data_parallel_degree") and not c.has(shards_name):
        shards_name, shards = (
            "training.data_parallel_degree",
            c.whole("training.data_parallel_degree", -1) or -1,
        )
    c.set("parallelism.tensor_model_parallel_size", tp, tp_name, "the same number")
    c.set(
        "parallelism.sequence_parallel",
        tp > 1,
        tp_name,
        "tensor-parallel ranks share the residual stream there",
    )
    c.set("parallelism.pipeline_model_parallel_size", pp, pp_name, "the same number")
    c.set(
        "parallelism.rank_order",
        "tp-cp-dp-pp",
        pp_name,
        "data-parallel ranks are numbered before the pipeline's",
    )
    if cp > 1:
        c.lack(
            cp_name,
            "memory",
            f"context parallelism is not built: each rank holds whole sequences, on {cp} times fewer ranks",
        )
    elif c.has(cp_name):
        c.drop(cp_name, "1: each rank holds whole sequences")
    known = tp * pp * cp * max(1, replicas)
    if shards == -1 and c.source.processes is not None:
        shards = max(1, c.source.processes // known)
    dp = 0 if shards == -1 else max(1, shards) * max(1, replicas)
    if c.source.processes is not None and c.source.processes != tp * pp * cp * dp:
        c.problems.append(
            f"{c.source.processes} devices are not the product of all degrees, {tp * pp * cp * dp}"
        )
    if dp:
        c.values["parallelism.data_parallel_size"] = dp
        c.origins["parallelism.data_parallel_size"] = f"{shards_name} and {replicas_name}"
    _sharding(c, shards, shards_name, replicas, replicas_name, dp)
    name = _first(c, "parallelism.enable_async_tensor_parallel", "experimental.enable_async_tensor_parallel")
    if c.has(name) and tp > 1:
        c.set("overlap.tp_symmetric_memory", True, name, "products that gather and scatter themselves")
    c.drop(name, "there is one tensor-parallel rank, or it is off")
    if pp > 1:
        _pipeline(c, pp)
    return {"dp": dp, "pp": pp}


def _sharding(c: Conversion, shards: int, name: str, replicas: int, replicas_name: str, dp: int) -> None:
    reshard = _first(c, "parallelism.fsdp_reshard_after_forward", "training.fsdp_reshard_after_forward")
    never = c.text(reshard, "default") == "never"
    if shards == 1:
        c.set("parallelism.zero_stage", 0, name, "0: each rank holds everything")
        c.drop(reshard, "parameters are not shared")
    else:
        c.set("parallelism.zero_stage", 2 if never else 3, name, "3; 2 where parameters stay gathered")
        c.also(reshard, "parallelism.zero_stage", "never: parameters stay gathered")
    if replicas > 1 and shards > 1 and dp:
        c.set("parallelism.hybrid_shard_size", shards, name, "ranks that share one set of shards")
    c.also(replicas_name, "parallelism.data_parallel_size", "sets of shards that hold the same")


def _pipeline(c: Conversion, pp: int) -> None:
    name = _first(c, "parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule")
    word = c.text(name, "1F1B") or "1F1B"
    found = _SCHEDULES.get(word.lower())
    if found is None:
        c.lack(name, "speed", f"the schedule {word} is not built; 1f1b stands for it")
        found = ("1f1b", 1)
    else:
        c.set("parallelism.pipeline_schedule", found[0], name, "the same schedule")
    layers = c.values.get("model.num_layers")
    if layers is None:
        return
    first_name, last_name = (
        f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")
    )
    first, last = c.whole(first_name, 1) or 0, c.whole(last_name, 1) or 0
    per_name = _first(
        c, *(f"{one}.pipeline_parallel_layers_per_stage" for one in ("parallelism", "experimental"))
    )
    per_stage = c.whole(per_name)
    if per_stage is not None and per_stage < 1:
        c.problems.append(f"{per_name} {per_stage}: must be >= 1; the nearest legal value is 1")
        return
    whole = layers + first + last
    stages = pp * found[1] if per_stage is None else -(-whole // per_stage)
    if stages % pp:
        c.problems.append(f"{per_name} {per_stage}: {stages} stages are no multiple of {pp} ranks")
        return
    counts = [whole // stages + (place < whole % stages) for place in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    if min(counts) < 0:
        c.problems.append(
            f"{first_name} {first} and {last_name} {last}: of {layers} layers a stage would have {min(counts)}; the "
            "nearest legal value is 0"
        )
        return
    if stages // pp > 1:
        c.values["parallelism.virtual_pipeline_model_parallel_size"] = stages // pp
    rule = "layers of each stage: the ends have fewer, for the embedding and the output"
    layout = ",".join(map(str, counts))
    c.set("parallelism.pipeline_model_parallel_layout", layout, per_name, rule)
    for one in (first_name, last_name):
        c.also(one, "parallelism.pipeline_model_parallel_layout", rule)


def _batch(c: Conversion, degrees: dict[str, int]) -> None:
    local_name = _first(c, "training.local_batch_size", "training.batch_size")
    local = c.whole(local_name, 8)
    c.set("model.seq_length", c.whole("training.seq_len", 2048), "training.seq_len", "the same number")
    steps = c.whole("training.steps", 10_000)
    c.set("training.train_iters", steps, "training.steps", "the same number")
    whole = c.whole("training.global_batch_size", -1)
    dp = degrees["dp"]
    if local is None or whole is None:
        return
    micro, rule = local, "the same number"
    if degrees["pp"] > 1:
        size = _first(
            c, *(f"{one}.pipeline_parallel_microbatch_size" for one in ("parallelism", "experimental"))
        )
        micro = c.whole(size, 1) or 1
        c.set("training.micro_batch_size", micro, size, "what passes a pipeline at a time")
        c.also(local_name, "training.global_batch_size", "samples of a step of one data-parallel rank")
    else:
        c.set("training.micro_batch_size", micro, local_name, rule)
    if whole != -1:
        c.set("training.global_batch_size", whole, "training.global_batch_size", "the same number")
    elif dp:
        rule = f"{local_name} x {dp} data-parallel ranks"
        c.set("training.global_batch_size", local * dp, "training.global_batch_size", rule)
    else:
        c.problems.append(
            "training.global_batch_size is not given, and neither is the number of data-parallel ranks: give --devices "
            "N, the processes of the job"
        )


def _schedule(c: Conversion) -> None:
    """Torchtitan's warm-up, stable phase and decay, in steps, are the style WSD in tokens."""
    batch, length = c.values.get("training.global_batch_size"), c.values.get("model.seq_length")
    steps = c.values.get("training.train_iters")
    rate = c.number("optimizer.lr", 8e-4)
    if batch is None or length is None or steps is None or rate is None:
        return
    tokens = batch * length
    warmup_name = _first(c, "lr_scheduler.warmup_steps", "training.warmup_steps")
    total = c.whole("lr_scheduler.total_steps", steps) or steps
    warmup = min(c.whole(warmup_name, 200) or 0, total)
    rule = (
        f"{tokens:,} tokens a step; each rate of the warm-up comes one step later here, which begins with 0"
    )
    c.set("lr_schedule.lr_warmup_tokens", warmup * tokens, warmup_name, rule)
    c.set(
        "lr_schedule.lr_decay_tokens",
        total * tokens,
        "lr_scheduler.total_steps",
        "all steps of the run, in tokens",
    )
    ratio = c.number("lr_scheduler.decay_ratio")
    if ratio is not None and not 0 <= ratio <= 1:
        nearest_share = 1 if ratio > 1 else 0
        c.problems.append(
            f"lr_scheduler.decay_ratio {ratio:g}: expected a share from 0 to 1; the nearest legal value is "
            f"{nearest_share}"
        )
        ratio = float(nearest_share)
    decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    c.set("lr_schedule.lr_decay_style", "WSD", "lr_scheduler.decay_type", "warm-up, stable phase and decay")
    styles = {"linear": "linear", "sqrt": "minus_sqrt", "cosine": "cosine"}
    style = c.choice("lr_scheduler.decay_type", tuple(styles), "linear")
    c.values["lr_schedule.lr_wsd_decay_style"] = styles[style or "linear"]
    length_rule = (
        "the share of all steps, in tokens" if ratio is not None else "from the end of the warm-up on"
    )
    if decay < 1:
        c.values["lr_schedule.lr_decay_style"] = "constant"
        for path in ("lr_decay_tokens", "lr_wsd_decay_style"):
            c.values.pop(f"lr_schedule.{path}")
        c.also("lr_scheduler.decay_ratio", "lr_schedule.lr_decay_style", "no decay")
        return
    c.set("lr_schedule.lr_wsd_decay_tokens", decay * tokens, "lr_scheduler.decay_ratio", length_rule)
    floor_name = _first(c, "lr_scheduler.min_lr_factor", "lr_scheduler.lr_min")
    floor = c.number(floor_name, 0.0) or 0.0
    c.set("lr_schedule.min_lr", rate * floor, floor_name, "the share of optimizer.lr")


def _optimizer(c: Conversion) -> None:
    name = c.text("optimizer.name", "AdamW")
    if name not in ("AdamW", "Adam"):
        c.lack("optimizer.name", "curve", f"the optimizer {name} is not built; AdamW is")
    elif name == "Adam":
        c.lack(
            "optimizer.name",
            "curve",
            "Adam decays weights through the gradient; AdamW, which is built, does not",
        )
    else:
        c.drop("optimizer.name", "AdamW is what there is")
    for path, field, default in (
        ("optimizer.lr", "optimizer.lr", 8e-4),
        ("optimizer.adam_beta1", "optimizer.beta1", 0.9),
        ("optimizer.adam_beta2", "optimizer.beta2", 0.95),
        ("optimizer.adam_eps", "optimizer.eps", 1e-8),
        ("optimizer.weight_decay", "optimizer.weight_decay", 0.1),
        ("training.clip_grad", "training.max_norm", 1.0),
    ):
        c.set(path, c.number(field, default), field, "the same number")
    if c.values.get("optimizer.weight_decay"):
        c.remark(
            "weight decay of norms",
            "curve",
            "torchtitan decays norms as well; here matrices alone are decayed",
        )
    field = _first(c, "optimizer.implementation", "optimizer.fused")
    if field == "optimizer.fused":
        fused = c.has(field)
    else:
        fused = c.choice(field, ("for-loop", "foreach", "fused"), "fused") == "fused"
    c.set("optimizer.fused", fused, field, "one kernel for the update")
    seed = _first(c, "debug.seed", "training.seed")
    if c.has(seed):
        c.set("run.seed", c.whole(seed), seed, "the same number; both draw other weights from it")
    deterministic = _first(c, "debug.deterministic", "training.deterministic")
    c.set("run.deterministic", c.has(deterministic), deterministic, "the same switch")


def _data(c: Conversion) -> None:
    name = _first(c, "training.dataset", "training.dataset_path")
    c.lack(
        name,
        "curve",
        "a run reads an indexed corpus: prepare one with `drivetrain data prepare`, and give data.data_path=PREFIX "
        "behind the file; without it the source of Python's standard library is read",
    )
    if name != "training.dataset_path":
        c.drop("training.dataset_path", "see training.dataset")
    workers = _first(c, "training.dataloader.num_workers", "dataloader.num_workers")
    c.set("data.num_workers", c.whole(workers, 0), workers, "the same number")


def _memory(c: Conversion) -> None:
    dtype = c.choice("training.mixed_precision_param", ("bfloat16", "float32"), "bfloat16")
    c.set(
        "precision.params_dtype",
        _DTYPES[dtype or "bfloat16"],
        "training.mixed_precision_param",
        "the compute dtype",
    )
    reduce = c.choice("training.mixed_precision_reduce", ("bfloat16", "float32"), "float32")
    c.set(
        "precision.grad_reduce_dtype",
        _DTYPES[reduce or "float32"],
        "training.mixed_precision_reduce",
        "the same dtype",
    )
    if c.text("training.dtype", "float32") != "float32":
        c.lack("training.dtype", "curve", "masters are fp32 here")
    else:
        c.drop("training.dtype", "masters are fp32")
    compiled = _first(c, "compile.enable", "training.compile")
    c.set("fusion.compile", c.has(compiled), compiled, "the same switch, for each block")
    _recompute(c)


def _recompute(c: Conversion) -> None:
    mode = c.choice("activation_checkpoint.mode", ("none", "full", "selective", "memory_budget"), "selective")
    option = c.text("activation_checkpoint.selective_ac_option", "2") or "2"
    name, layers = "activation_checkpoint.mode", c.values.get("model.num_layers")
    if (
        mode == "selective"
        and option.isascii()
        and option.isdigit()
        and int(option) > 0
        and layers is not None
    ):
        rule = f"every {option}-th layer there; as many of the first layers of each stage here"
        c.set("memory.recompute_granularity", "full", name, "whole layers")
        c.set("memory.recompute_method", "block", name, rule)
        stages = (c.values.get("parallelism.pipeline_model_parallel_size") or 1) * (
            c.values.get("parallelism.virtual_pipeline_model_parallel_size") or 1
        )
        count = max(1, layers // stages // int(option))
        c.set("memory.recompute_num_layers", count, "activation_checkpoint.selective_ac_option", rule)
    elif mode in ("none", "full"):
        c.set("memory.recompute_granularity", mode, name, "the same words")
        c.drop("activation_checkpoint.selective_ac_option", f"with {mode} it decides nothing")
    else:
        c.lack(name, "memory", f"{mode} by single operators is not built; see memory.recompute_granularity")
        c.drop("activation_checkpoint.selective_ac_option", "see activation_checkpoint.mode")


def _operation(c: Conversion) -> None:
    c.set("monitor.log_interval", c.whole("metrics.log_freq", 10), "metrics.log_freq", "the same number")
    enabled = _first(c, "validation.enable", "validation.enabled")
    if c.has(enabled):
        steps = c.whole("validation.steps", -1)
        c.set("training.eval_interval", c.whole("validation.freq", 10), "validation.freq", "the same number")
        if steps is not None and steps < 0:
            c.lack(
                "validation.steps",
                "operation",
                "an evaluation is of so many global batches: training.eval_iters=N",
            )
        else:
            c.set("training.eval_iters", steps, "validation.steps", "global batches of one evaluation")
        c.also(enabled, "training.eval_interval", "the switch of evaluations")
    else:
        c.set("training.eval_iters", 0, enabled, "no evaluation")
        for name in ("validation.freq", "validation.steps"):
            c.drop(name, "nothing is evaluated")
    saves = _first(c, "checkpoint.enable", "checkpoint.enable_checkpoint")
    if c.has(saves):
        c.set(
            "checkpoint.save_interval",
            c.whole("checkpoint.interval", 500),
            "checkpoint.interval",
            "the same number",
        )
        c.also(saves, "checkpoint.save_interval", "the switch of checkpoints")
        if c.text("checkpoint.async_mode", "disabled") != "disabled":
            c.set("checkpoint.async_save", True, "checkpoint.async_mode", "a thread writes")
        keep = c.whole("checkpoint.keep_latest_k", 10)
        if keep:
            c.set("checkpoint.keep_latest_k", keep, "checkpoint.keep_latest_k", "the same number")
    for name in (saves, "checkpoint.interval", "checkpoint.async_mode", "checkpoint.keep_latest_k"):
        c.drop(name, "checkpoints are off, or all are kept: a run saves at its end in any case")
    if c.has("checkpoint.initial_load_path"):
        if c.has("checkpoint.initial_load_in_hf"):
            path = c.text("checkpoint.initial_load_path")
            c.set(
                "checkpoint.initial_load_path", path, "checkpoint.initial_load_path", "a Hugging Face folder"
            )
            c.also("checkpoint.initial_load_in_hf", "checkpoint.initial_load_path", "a Hugging Face folder")
        else:
            c.lack(
                "checkpoint.initial_load_path",
                "curve",
                "the first weights would be random; a Hugging Face folder is read",
            )
    seconds = c.number("comm.train_timeout_seconds", 100.0)
    if seconds:
        path = "parallelism.distributed_timeout_minutes"
        c.set(path, seconds / 60, "comm.train_timeout_seconds", "in minutes")
