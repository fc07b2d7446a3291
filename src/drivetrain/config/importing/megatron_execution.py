"""Megatron-LM's and MindSpeed's arguments of layout, overlap, fused operators, memory."""

from drivetrain.config.importing.conversion import Conversion
from drivetrain.config.importing.megatron_model import tensor_parallel_name
from drivetrain.config.importing.stage_layout import StageLayoutError, layers_of_stages

__all__ = ["convert_execution", "model_ranks_of"]

_PP = "--pipeline-model-parallel-size"
_MODULES = {"core_attn": "core_attn", "mlp": "mlp", "layernorm": "norm"}
_STAGES_OF_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def model_ranks_of(c: Conversion) -> int:
    """Processes that hold one model there, context-parallel ones included."""
    sizes = (c.whole(tensor_parallel_name(c), 1), c.whole(_PP, 1), c.whole("--context-parallel-size", 1))
    product = 1
    for size in sizes:
        product *= max(1, size or 1)
    return product


def convert_execution(c: Conversion) -> None:
    """Sections ``parallelism``, ``overlap``, ``fusion`` and ``memory``."""
    _sizes(c)
    _pipeline(c)
    _sharding(c)
    _overlap(c)
    _fusion(c)
    _recompute(c)
    _offload(c)
    minutes = c.number("--distributed-timeout-minutes", 10.0)
    c.set(
        "parallelism.distributed_timeout_minutes", minutes, "--distributed-timeout-minutes", "the same number"
    )


def _sizes(c: Conversion) -> None:
    tp = c.whole(tensor_parallel_name(c), 1) or 1
    c.set("parallelism.tensor_model_parallel_size", tp, tensor_parallel_name(c), "the same number")
    c.set("parallelism.pipeline_model_parallel_size", c.whole(_PP, 1), _PP, "the same number")
    if tp > 1:
        c.set(
            "parallelism.sequence_parallel",
            c.has("--sequence-parallel"),
            "--sequence-parallel",
            "the same switch",
        )
    else:
        c.drop("--sequence-parallel", "with one tensor-parallel rank Megatron switches it off")
    cp = c.whole("--context-parallel-size", 1)
    if cp is not None and cp > 1:
        reason = (
            f"context parallelism is not built: each rank holds whole sequences, on {cp} times fewer ranks"
        )
        c.lack("--context-parallel-size", "memory", reason)
    processes = c.source.processes
    if processes is not None:
        ranks = model_ranks_of(c)
        if processes % ranks:
            c.problems.append(
                f"{processes} processes of the launcher are no multiple of the {ranks} that hold one model; give "
                "--devices N, the processes of the job"
            )
        else:
            rule = f"{processes} processes of the launcher over {ranks} that hold one model"
            c.values["parallelism.data_parallel_size"] = processes // ranks
            c.origins["parallelism.data_parallel_size"] = rule
    if c.has("--use-tp-pp-dp-mapping"):
        c.set(
            "parallelism.rank_order",
            "tp-cp-pp-dp",
            "--use-tp-pp-dp-mapping",
            "the order in which ranks are numbered",
        )
    else:
        rule = "Megatron numbers data-parallel ranks before the pipeline's"
        c.set("parallelism.rank_order", "tp-cp-dp-pp", "--use-tp-pp-dp-mapping", rule)


def _pipeline(c: Conversion) -> None:
    pp, layers = c.whole(_PP, 1) or 1, c.values.get("model.num_layers")
    virtual_names = (
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--virtual-pipeline-model-parallel-size",
    )
    if pp == 1 or layers is None:
        for name in (*virtual_names, "--schedules-method", "--num-layer-list"):
            c.drop(name, "there is one stage")
        return
    virtual = _virtual(c, virtual_names, pp, layers)
    schedule, name = ("interleaved_1f1b" if virtual > 1 else "1f1b"), "--num-virtual-stages-per-pipeline-rank"
    if c.text("--schedules-method") == "dualpipev":
        schedule, name, virtual = "dualpipev", "--schedules-method", 2
    name = name if c.has(name) else next((one for one in virtual_names if c.has(one)), virtual_names[0])
    c.set("parallelism.pipeline_schedule", schedule, name, "the schedule that these stages have there")
    if virtual > 1:
        c.values["parallelism.virtual_pipeline_model_parallel_size"] = virtual
    _layout(c, pp, virtual, layers)


def _virtual(c: Conversion, names: tuple[str, ...], pp: int, layers: int) -> int:
    """Stages on each rank."""
    for name in names:
        number = c.whole(name)
        if number is not None and number < 1 and c.words(name) != ("0",):
            c.problems.append(f"{name} {number}: must be >= 1; the nearest legal value is 1")
            return 1
    per_stage = c.whole(names[0])
    if per_stage:
        if layers % (pp * per_stage):
            c.problems.append(
                f"{names[0]} {per_stage}: {layers} layers on {pp} ranks are no whole number of such stages"
            )
            return 1
        return layers // (pp * per_stage)
    return next((found for name in names[1:] if (found := c.whole(name)) is not None), 1)


def _layout(c: Conversion, pp: int, virtual: int, layers: int) -> None:
    field = "parallelism.pipeline_model_parallel_layout"
    stages = pp * virtual
    if c.has("--num-layer-list"):
        c.set(field, c.text("--num-layer-list"), "--num-layer-list", "layers of each stage")
    elif c.has("--pipeline-model-parallel-layout"):
        text = "".join(c.words("--pipeline-model-parallel-layout"))
        try:
            found = layers_of_stages(text)
        except StageLayoutError as error:
            c.problems.append(f"--pipeline-model-parallel-layout {text[:80]}: {error}")
            return
        c.set(
            field,
            ",".join(map(str, found)),
            "--pipeline-model-parallel-layout",
            "decoder layers (t) of each stage",
        )
    else:
        _uneven(c, stages, layers)


def _uneven(c: Conversion, stages: int, layers: int) -> None:
    """A first or last stage with another number of layers than the rest."""
    first_name, last_name = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
    first, last = c.whole(first_name), c.whole(last_name)
    embedding = c.has("--account-for-embedding-in-pipeline-split")
    loss = c.has("--account-for-loss-in-pipeline-split")
    given = [
        name
        for name in (
            first_name,
            last_name,
            "--account-for-embedding-in-pipeline-split",
            "--account-for-loss-in-pipeline-split",
        )
        if c.has(name)
    ]
    if not given:
        return
    if embedding or loss:
        whole = layers + embedding + loss
        each = whole // stages
        first, last = each - embedding, each - loss
        if whole % stages:
            c.problems.append(
                f"{given[0]}: {whole} layers, embedding and loss included, over {stages} stages leave a rest"
            )
            return
    inner = stages - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if inner < 1 or rest < 0 or rest % inner:
        c.problems.append(f"{given[0]}: {rest} layers over the {inner} other stages leave a rest")
        return
    counts = [rest // inner] * stages
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    field = "parallelism.pipeline_model_parallel_layout"
    c.set(field, ",".join(map(str, counts)), given[0], "layers of each stage")
    for name in given[1:]:
        c.also(name, field, "layers of each stage")


def _sharding(c: Conversion) -> None:
    fsdp = next((one for one in ("--use-megatron-fsdp", "--use-custom-fsdp") if c.has(one)), None)
    strategy = c.choice("--data-parallel-sharding-strategy", tuple(_STAGES_OF_SHARDING), "optim_grads_params")
    if fsdp is not None:
        stage, name = (
            _STAGES_OF_SHARDING[strategy or "optim_grads_params"],
            "--data-parallel-sharding-strategy",
        )
        c.set(
            "parallelism.zero_stage", stage, name, "no_shard 0, optim 1, optim_grads 2, optim_grads_params 3"
        )
        c.also(fsdp, "parallelism.zero_stage", "the switch that the strategy needs")
        c.drop("--use-distributed-optimizer", f"{fsdp} decides what is shared")
    elif c.has("--use-torch-fsdp2"):
        stage = 2 if c.has("--torch-fsdp2-no-reshard-after-forward") else 3
        c.set("parallelism.zero_stage", stage, "--use-torch-fsdp2", "3; 2 where parameters stay gathered")
        c.also("--torch-fsdp2-no-reshard-after-forward", "parallelism.zero_stage", "parameters stay gathered")
    else:
        c.drop("--data-parallel-sharding-strategy", "it needs --use-megatron-fsdp")
        stage = int(c.has("--use-distributed-optimizer"))
        c.set(
            "parallelism.zero_stage",
            stage,
            "--use-distributed-optimizer",
            "1: ranks share the optimizer's state",
        )
    instances = c.whole("--num-distributed-optimizer-instances", 1) or 1
    dp = c.values.get("parallelism.data_parallel_size")
    if instances == 1:
        c.drop("--num-distributed-optimizer-instances", "one set of shards is what there is anyway")
    elif dp is None or dp % instances:
        why = (
            "the number of processes is unknown"
            if dp is None
            else f"it does not divide {dp} data-parallel ranks"
        )
        c.lack(
            "--num-distributed-optimizer-instances", "memory", f"{why}; give parallelism.hybrid_shard_size=N"
        )
    else:
        rule = f"{dp} data-parallel ranks over {instances} sets of shards"
        c.set("parallelism.hybrid_shard_size", dp // instances, "--num-distributed-optimizer-instances", rule)


def _overlap(c: Conversion) -> None:
    dp = c.values.get("parallelism.data_parallel_size") or 1
    if c.has("--overlap-grad-reduce"):
        elements = c.whole("--ddp-bucket-size") or max(40_000_000, 1_000_000 * dp)
        name = "--ddp-bucket-size" if c.has("--ddp-bucket-size") else "--overlap-grad-reduce"
        rule = f"buckets of {elements:,} gradients of 4 bytes, reduced while backward runs"
        c.set("overlap.bucket_size_mb", elements * 4 / 1e6, name, rule)
        c.also("--overlap-grad-reduce", "overlap.bucket_size_mb", rule)
    else:
        c.drop("--ddp-bucket-size", "it needs --overlap-grad-reduce")
        c.set("overlap.bucket_size_mb", 0.0, "--overlap-grad-reduce", "0: reduced when backward has ended")
    stage = c.values.get("parallelism.zero_stage")
    if c.has("--overlap-param-gather") and stage in (1, 2):
        c.set("overlap.overlap_param_gather", True, "--overlap-param-gather", "the same switch")
    c.drop("--overlap-param-gather", f"with zero_stage {stage} it has nothing to gather, or does it always")
    if c.values["parallelism.tensor_model_parallel_size"] == 1:
        for name in (
            "--tp-comm-overlap",
            "--use-ascend-coc",
            "--coc-parallel-num",
            "--use-ascend-mc2",
            "--use-mc2",
        ):
            c.drop(name, "there is one tensor-parallel rank")
        return
    sequence = c.has("--sequence-parallel")
    fused = next((one for one in ("--tp-comm-overlap", "--use-ascend-mc2", "--use-mc2") if c.has(one)), None)
    if c.has("--use-ascend-coc"):
        pieces = c.whole("--coc-parallel-num", 1) or 1
        name = "--coc-parallel-num" if c.has("--coc-parallel-num") else "--use-ascend-coc"
        c.set(
            "overlap.tp_chunks", str(pieces), name, "pieces of what enters and leaves a tensor-parallel layer"
        )
        c.also("--use-ascend-coc", "overlap.tp_chunks", "communication in pieces under products")
    elif fused is not None and sequence:
        rule = "products that gather and scatter themselves; where a machine cannot, its run says so"
        c.set("overlap.tp_symmetric_memory", True, fused, rule)
    elif fused is not None:
        c.lack(fused, "speed", "it needs --sequence-parallel here")
    if not sequence:
        name = "--no-async-tensor-model-parallel-allreduce"
        c.set("overlap.async_tensor_model_parallel_allreduce", not c.has(name), name, "the opposite switch")


def _fusion(c: Conversion) -> None:
    off = {
        "fusion.rotary": "--no-rope-fusion",
        "fusion.glu": "--no-bias-swiglu-fusion",
    }
    c.values["fusion.level"] = "core"
    c.origins["fusion.level"] = "fused operators are on where they are not switched off"
    for field, name in off.items():
        if c.has(name):
            c.set(field, "off", name, "the opposite switch")
    norm = "rms_norm" if c.values.get("model.normalization") == "RMSNorm" else "layer_norm"
    if c.has("--no-persist-layer-norm"):
        c.set(f"fusion.{norm}", "off", "--no-persist-layer-norm", "the opposite switch")
    mine = {
        "--use-fused-rmsnorm": ("fusion.rms_norm", norm == "rms_norm"),
        "--use-fused-swiglu": ("fusion.glu", c.values.get("model.activation_func") == "swiglu"),
        "--use-fused-rotary-pos-emb": (
            "fusion.rotary",
            c.values.get("model.position_embedding_type") == "rope",
        ),
    }
    for name, (field, has_it) in mine.items():
        if c.has(name) and has_it:
            c.set(field, "auto", name, "what was tuned on the machine, else the operator's preference")
        c.drop(name, "the model has no such operator")
    plain = c.text("--attention-backend") in ("unfused", "local")
    if c.has("--attention-backend") or c.has("--use-flash-attn"):
        name = "--attention-backend" if c.has("--attention-backend") else "--use-flash-attn"
        rule = (
            "the model's own code"
            if plain
            else "what was tuned on the machine, else the operator's preference"
        )
        c.set("fusion.attention", "off" if plain else "auto", name, rule)
        c.also("--use-flash-attn", "fusion.attention", rule)
    if c.has("--cross-entropy-loss-fusion"):
        rule = "here the loss is computed with the output matrix, so that logits are not held"
        c.set("fusion.linear_cross_entropy", "auto", "--cross-entropy-loss-fusion", rule)


def _recompute(c: Conversion) -> None:
    name = "--recompute-granularity"
    kind = c.choice(name, ("full", "selective"))
    if c.has("--recompute-activations"):
        kind, name = "selective", "--recompute-activations"
    elif c.has("--checkpoint-activations"):
        kind, name = "full", "--checkpoint-activations"
    parts = {"--recompute-activation-function": "mlp_act", "--recompute-norm": "norm"}
    own = [name for name in parts if c.has(name)]
    if kind is None and own:
        c.set("memory.recompute_granularity", "selective", own[0], "parts of every layer")
        c.values["memory.recompute_modules"] = ",".join(parts[one] for one in own)
        for one in own[1:]:
            c.also(one, "memory.recompute_modules", "parts of every layer")
        return
    for one in own:
        c.lack(one, "memory", f"one granularity at a time: {name} has it")
    if kind is None:
        for unused in ("--recompute-method", "--recompute-num-layers", "--recompute-modules"):
            c.drop(unused, "nothing is recomputed without --recompute-granularity")
        return
    c.set("memory.recompute_granularity", kind, name, "the same words")
    if kind == "full":
        method = c.choice("--recompute-method", ("uniform", "block"))
        if method is not None:
            c.set("memory.recompute_method", method, "--recompute-method", "the same words")
        layers = c.whole("--recompute-num-layers")
        if layers is not None:
            c.set("memory.recompute_num_layers", layers, "--recompute-num-layers", "the same number")
        c.drop("--recompute-modules", "whole layers are recomputed")
        return
    for unused in ("--recompute-method", "--recompute-num-layers"):
        c.drop(unused, "parts of every layer are recomputed")
    if not c.has("--recompute-modules"):
        return
    words = [word for text in c.words("--recompute-modules") for word in text.split(",")]
    ours = [_MODULES[word] for word in words if word in _MODULES]
    lacking = [word for word in words if word not in _MODULES]
    if lacking or not ours:
        known = ", ".join(_MODULES)
        c.lack(
            "--recompute-modules", "memory", f"{', '.join(lacking)} cannot be recomputed alone; {known} can"
        )
    else:
        c.set(
            "memory.recompute_modules",
            ",".join(ours),
            "--recompute-modules",
            "core_attn, mlp; layernorm is norm",
        )


def _offload(c: Conversion) -> None:
    if c.has("--optimizer-cpu-offload"):
        share = c.number("--optimizer-offload-fraction", 1.0)
        name = "--optimizer-offload-fraction"
        c.set(
            "memory.optimizer_offload_fraction",
            share,
            name,
            "the state waits in host memory; it is updated on the device",
        )
        c.also(
            "--optimizer-cpu-offload", "memory.optimizer_offload_fraction", "the switch that the share needs"
        )
    elif c.has("--swap-optimizer"):
        c.set(
            "memory.optimizer_offload_fraction",
            1.0,
            "--swap-optimizer",
            "all of the state waits in host memory",
        )
    c.drop("--optimizer-offload-fraction", "it needs --optimizer-cpu-offload")
    layers = c.whole("--cpu-offloading-num-layers")
    if layers is not None:
        c.set("memory.cpu_offloading_num_layers", layers, "--cpu-offloading-num-layers", "the same number")
