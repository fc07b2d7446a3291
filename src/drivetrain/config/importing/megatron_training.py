"""Megatron-LM's arguments of batch, schedule, optimizer, data, precision and what surrounds a run."""

from pathlib import PurePath

from drivetrain.config.importing.conversion import Conversion

__all__ = ["convert_training"]

_STYLES = ("cosine", "WSD", "constant", "linear", "inverse-square-root")
_WSD_STYLES = ("linear", "cosine", "minus_sqrt", "exponential")


def convert_training(c: Conversion, model_ranks: int) -> None:
    """Batch, schedule, optimizer, data, precision, checkpoints.

    Args:
        model_ranks: processes that hold one model.
    """
    _contradictions(c)
    _batch(c, model_ranks)
    _schedule(c)
    _optimizer(c)
    _data(c)
    _precision(c)
    _checkpoints(c)
    _watching(c)


def _contradictions(c: Conversion) -> None:
    for one, other, why in (
        ("--bf16", "--fp16", "one compute dtype"),
        ("--train-iters", "--train-samples", "the length of a run"),
        ("--lr-decay-iters", "--lr-decay-samples", "the length of the decay"),
        ("--lr-warmup-iters", "--lr-warmup-fraction", "the length of the warm-up"),
        ("--lr-warmup-samples", "--lr-warmup-fraction", "the length of the warm-up"),
        ("--num-layers", "--encoder-num-layers", "the number of layers"),
        (
            "--num-layers-per-virtual-pipeline-stage",
            "--num-virtual-stages-per-pipeline-rank",
            "the stages of a pipeline's rank",
        ),
    ):
        if c.has(one) and c.has(other) and not (_zero(c, one) or _zero(c, other) or _agree(c, one, other)):
            c.problems.append(f"{one} and {other} contradict each other: both decide {why}; give one of them")


def _agree(c: Conversion, one: str, other: str) -> bool:
    """Whether both say the same: dumps hold what was derived beside what it was derived from."""
    first, second = c.words(one), c.words(other)
    if (one, other) == ("--train-iters", "--train-samples"):
        iters, samples, batch = (c.whole(name) for name in (one, other, "--global-batch-size"))
        return None not in (iters, samples) and bool(batch) and iters == (samples or 0) // (batch or 1)
    return one == "--num-layers" and first == second


def _zero(c: Conversion, name: str) -> bool:
    return c.words(name) in (("0",), ("none",), ("None",))


def _batch(c: Conversion, model_ranks: int) -> None:
    micro = c.whole("--micro-batch-size")
    if micro is None:
        if not c.has("--micro-batch-size"):
            c.problems.append(
                "--micro-batch-size is not among the arguments, and Megatron has no default for it"
            )
        return
    c.set("training.micro_batch_size", micro, "--micro-batch-size", "the same number")
    whole = c.whole("--global-batch-size")
    if whole is not None:
        c.set("training.global_batch_size", whole, "--global-batch-size", "the same number")
    elif not c.has("--global-batch-size"):
        processes = c.source.processes
        if processes is None:
            c.problems.append(
                "--global-batch-size is not among the arguments, and without the number of processes nobody knows "
                "what it becomes; give training.global_batch_size=N behind the file"
            )
            return
        rule = f"micro-batch size x {max(1, processes // model_ranks)} data-parallel ranks"
        c.set(
            "training.global_batch_size",
            micro * max(1, processes // model_ranks),
            "--global-batch-size",
            rule,
        )


def _schedule(c: Conversion) -> None:
    """Steps and samples become tokens: ours is a function of tokens."""
    batch, length = c.values.get("training.global_batch_size"), c.values.get("model.seq_length")
    steps = _steps(c, batch)
    style = c.choice("--lr-decay-style", _STYLES, "linear")
    if steps is None or batch is None or length is None:
        return
    step_tokens = batch * length
    decay = _tokens(c, "decay", step_tokens, length)
    if decay is None and c.has("--train-samples"):
        # All samples, also those that make no whole step any more.
        decay = "--lr-decay-samples", (c.whole("--train-samples") or 0) * length
    name, decay_tokens = decay if decay is not None else ("--lr-decay-iters", steps * step_tokens)
    warmup_name, warmup = _warmup(c, decay_tokens, step_tokens, length)
    c.set("lr_schedule.lr_warmup_tokens", warmup, warmup_name, f"in tokens: {step_tokens:,} a step")
    if style == "inverse-square-root":
        c.lack("--lr-decay-style", "curve", "a decay with the inverse square root of the steps is not built")
        return
    if style != "constant":
        c.set("lr_schedule.lr_decay_tokens", decay_tokens, name, f"in tokens: {step_tokens:,} a step")
        c.set("lr_schedule.min_lr", c.number("--min-lr", 0.0), "--min-lr", "the same number")
    else:
        for unused in ("--min-lr", "--lr-decay-iters", "--lr-decay-samples"):
            c.drop(unused, "a constant rate does not decay")
    if style == "linear":
        rule = "a final decay of WSD that begins where the warm-up ends, along a line: the same function"
        c.set("lr_schedule.lr_decay_style", "WSD", "--lr-decay-style", rule)
        c.values["lr_schedule.lr_wsd_decay_style"] = "linear"
        c.values["lr_schedule.lr_wsd_decay_tokens"] = max(1, decay_tokens - warmup)
    else:
        c.set("lr_schedule.lr_decay_style", style, "--lr-decay-style", "the same words")
    if style == "WSD":
        _wsd(c, step_tokens, length)


def _steps(c: Conversion, batch: int | None) -> int | None:
    if c.has("--train-samples"):
        samples = c.whole("--train-samples")
        if samples is None or not batch:
            return None
        c.set("training.train_iters", samples // batch, "--train-samples", f"over {batch} samples a step")
        return samples // batch
    if not c.has("--train-iters"):
        c.problems.append("neither --train-iters nor --train-samples is among the arguments")
        return None
    steps = c.whole("--train-iters")
    if steps is not None:
        c.set("training.train_iters", steps, "--train-iters", "the same number")
    return steps


def _tokens(c: Conversion, what: str, step_tokens: int, length: int) -> tuple[str, int] | None:
    """Argument and tokens of ``--lr-WHAT-iters`` or ``--lr-WHAT-samples``."""
    for unit, tokens in (("iters", step_tokens), ("samples", length)):
        name = f"--lr-{what}-{unit}"
        if c.has(name) and not (what == "warmup" and _zero(c, name)):
            value = c.whole(name)
            return None if value is None else (name, value * tokens)
    return None


def _warmup(c: Conversion, decay_tokens: int, step_tokens: int, length: int) -> tuple[str, int]:
    if c.has("--lr-warmup-fraction") and not _zero(c, "--lr-warmup-fraction"):
        share = c.number("--lr-warmup-fraction", 0.0) or 0.0
        if not 0 <= share <= 1:
            nearest = 1 if share > 1 else 0
            c.problems.append(
                f"--lr-warmup-fraction {share:g}: expected a share from 0 to 1; the nearest legal value is {nearest}"
            )
            share = float(nearest)
        return "--lr-warmup-fraction", round(share * decay_tokens)
    return _tokens(c, "warmup", step_tokens, length) or ("--lr-warmup-iters", 0)


def _wsd(c: Conversion, step_tokens: int, length: int) -> None:
    style = c.choice("--lr-wsd-decay-style", _WSD_STYLES, "exponential")
    if style == "exponential":
        c.lack(
            "--lr-wsd-decay-style",
            "curve",
            "an exponential final decay is not built; linear, cosine and minus_sqrt are",
        )
    else:
        c.set("lr_schedule.lr_wsd_decay_style", style, "--lr-wsd-decay-style", "the same words")
    found = _tokens(c, "wsd-decay", step_tokens, length)
    if found is None:
        c.problems.append("--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples")
        return
    c.set("lr_schedule.lr_wsd_decay_tokens", found[1], found[0], f"in tokens: {step_tokens:,} a step")


def _optimizer(c: Conversion) -> None:
    if c.has("--lr"):
        rate = c.number("--lr")
        if rate is not None:
            c.set("optimizer.lr", rate, "--lr", "the same number")
    else:
        c.problems.append("--lr is not among the arguments, and Megatron has no default for it")
    for field, name, default in (
        ("optimizer.weight_decay", "--weight-decay", 0.01),
        ("optimizer.adam_beta1", "--adam-beta1", 0.9),
        ("optimizer.adam_beta2", "--adam-beta2", 0.999),
        ("optimizer.adam_eps", "--adam-eps", 1e-8),
        ("training.clip_grad", "--clip-grad", 1.0),
    ):
        c.set(field, c.number(name, default), name, "the same number")
    c.set("run.seed", c.whole("--seed", 1234), "--seed", "the same number; both draw other weights from it")


def _data(c: Conversion) -> None:
    name = "--data-path" if c.has("--data-path") or not c.has("--train-data-path") else "--train-data-path"
    words = c.words(name)
    if c.has("--mock-data"):
        c.lack("--mock-data", "curve", "random tokens are not built: the run reads data.data_path")
    elif not c.has(name):
        c.lack(name, "curve", "without data.data_path a run reads the source of Python's standard library")
    elif c.unreadable(name):
        c.lack(
            name,
            "curve",
            f"its value is unknown, {' and '.join(c.unreadable(name))}: give data.data_path=PREFIX behind the file",
        )
    elif len(words) == 1 or (len(words) % 2 == 0 and all(_is_weight(word) for word in words[::2])):
        c.set(
            "data.data_path",
            " ".join(words),
            name,
            "the same prefix, or weights and prefixes, of indexed corpora",
        )
    else:
        c.lack(
            name,
            "curve",
            "corpora without weights are mixed by their sizes there; here each needs one: give "
            "data.data_path='0.3 a 0.7 b' behind the file",
        )
    _split(c)
    for field in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss"):
        switch = f"--{field.replace('_', '-')}"
        c.set(f"data.{field}", c.has(switch), switch, "the same switch")
    c.set("data.num_workers", c.whole("--num-workers", 2), "--num-workers", "the same number")
    if not c.has("--calculate-per-token-loss") and c.has("--eod-mask-loss"):
        reason = (
            "the loss is over all tokens of a step that carry loss, as with it; without it Megatron weighs each "
            "micro-batch alike, however few do"
        )
        c.lack("--calculate-per-token-loss", "curve", reason)
    c.drop("--calculate-per-token-loss", "the loss is always over all tokens of a step that carry loss")
    _tokenizer(c)


def _is_weight(word: str) -> bool:
    try:
        return float(word) > 0
    except ValueError:
        return False


def _split(c: Conversion) -> None:
    if not c.has("--split"):
        return
    given = c.text("--split")
    if given is None:
        return
    text = given.strip("'\"")
    parts = [part.strip() for part in text.replace("/", ",").split(",") if part.strip()]
    if not parts or len(parts) > 3 or not all(_is_share(part) for part in parts):
        c.problems.append(f"--split {text}: expected up to three weights with commas between, as 949,50,1")
        return
    shares = [float(part) for part in parts] + [0.0] * (3 - len(parts))
    held_out = shares[1] + shares[2]
    c.set(
        "data.split",
        f"{shares[0]:.12g},{held_out:.12g}",
        "--split",
        "training, and validation with test in one; which documents those are is drawn here, there the last ones",
    )


def _is_share(word: str) -> bool:
    return word.replace(".", "", 1).isdigit() and word.isascii()


def _tokenizer(c: Conversion) -> None:
    for name in ("--tokenizer-model", "--tokenizer-name-or-path"):
        if not c.has(name):
            continue
        path = c.words(name)
        if c.unreadable(name) or len(path) != 1 or PurePath(path[0]).suffix != ".json":
            reason = (
                "the corpus holds tokens already; to show text, give data.tokenizer_path=…/tokenizer.json"
            )
            c.drop(name, reason)
        else:
            c.set("data.tokenizer_path", path[0], name, "a tokenizer.json")
    c.drop("--tokenizer-type", "the corpus holds tokens already")


def _precision(c: Conversion) -> None:
    half = next((name for name in ("--bf16", "--fp16") if c.has(name)), None)
    name, dtype = half or "--bf16", half.removeprefix("--") if half else "fp32"
    rule = "the compute dtype; masters are fp32" if half else "fp32, where neither --bf16 nor --fp16 is given"
    c.set("precision.params_dtype", dtype, name, rule)
    c.set(
        "precision.grad_reduce_dtype",
        "bf16" if c.has("--grad-reduce-in-bf16") else "fp32",
        "--grad-reduce-in-bf16",
        "the dtype on the wire; sums are in fp32 here",
    )
    c.drop("--accumulate-allreduce-grads-in-fp32", "gradients are always accumulated in fp32 here")
    scales = {
        "loss_scale": ("--loss-scale", None),
        "initial_loss_scale": ("--initial-loss-scale", 2.0**32),
        "min_loss_scale": ("--min-loss-scale", 1.0),
        "loss_scale_window": ("--loss-scale-window", 1000),
        "hysteresis": ("--hysteresis", 2),
    }
    constant = c.has("--loss-scale")
    for field, (argument, default) in scales.items():
        whole = field in ("loss_scale_window", "hysteresis")
        if dtype != "fp16":
            c.drop(argument, f"the loss is not scaled with {dtype}")
        elif constant and field != "loss_scale":
            c.drop(argument, "the loss scale is constant")
        elif c.has(argument) or default is not None:
            value = c.whole(argument, int(default or 0)) if whole else c.number(argument, default)
            c.set(f"precision.{field}", value, argument, "the same number")
    _state_dtype(c)


def _state_dtype(c: Conversion) -> None:
    names = ("--exp-avg-dtype", "--exp-avg-sq-dtype")
    dtypes = {name: c.text(name, "fp32") for name in names}
    if not c.has("--use-precision-aware-optimizer"):
        for name in names:
            c.drop(name, "without --use-precision-aware-optimizer both moments are fp32")
        return
    if set(dtypes.values()) in ({"fp32"}, {"bf16"}):
        dtype = dtypes[names[0]]
        c.set(
            "precision.optimizer_state_dtype",
            dtype,
            names[0],
            "the dtype of both moments; bf16 is rounded at random",
        )
        c.also(names[1], "precision.optimizer_state_dtype", "the dtype of both moments")
        c.also(
            "--use-precision-aware-optimizer",
            "precision.optimizer_state_dtype",
            "what the moments' dtypes need",
        )
        return
    for name, dtype in dtypes.items():
        if c.has(name):
            c.lack(name, "curve", f"moments are both fp32 or both bf16 here, not {dtype}")


def _checkpoints(c: Conversion) -> None:
    if c.has("--save-interval"):
        c.set("checkpoint.save_interval", c.whole("--save-interval"), "--save-interval", "the same number")
    if c.has("--async-save"):
        c.set("checkpoint.async_save", True, "--async-save", "the same switch")
    c.drop("--save", "a run is saved in its own directory (run.runs_dir)")
    if c.has("--load"):
        resumes = c.has("--save") and c.words("--save") == c.words("--load") and not c.has("--finetune")
        if resumes:
            c.drop("--load", "what --save wrote: a run goes on by naming its directory")
        else:
            c.lack(
                "--load",
                "curve",
                "the first weights would be random; a Hugging Face folder of the same weights is taken with "
                "checkpoint.initial_load_path=FOLDER behind the file",
            )
    if c.has("--pretrained-checkpoint"):
        c.lack(
            "--pretrained-checkpoint",
            "curve",
            "the first weights would be random; see checkpoint.initial_load_path",
        )
    c.drop("--finetune", "it says how --load begins")


def _watching(c: Conversion) -> None:
    c.set("monitor.log_interval", c.whole("--log-interval", 100), "--log-interval", "the same number")
    batches, rule = c.whole("--eval-iters", 100), "global batches of one evaluation"
    if str(c.values.get("data.split", "")).endswith(",0"):
        batches, rule = 0, "0, because --split leaves nothing held out"
    c.set("training.eval_iters", batches, "--eval-iters", rule)
    if batches == 0:
        c.drop("--eval-interval", "nothing is evaluated")
    elif c.has("--eval-interval"):
        c.set("training.eval_interval", c.whole("--eval-interval"), "--eval-interval", "the same number")
    check = "--check-weight-hash-across-dp-replicas-interval"
    if c.has(check):
        c.set(
            "monitor.check_weight_hash_across_dp_replicas_interval", c.whole(check), check, "the same number"
        )
    deterministic = next(
        (one for one in ("--deterministic-mode", "--npu-deterministic", "--use-deter-comp") if c.has(one)),
        None,
    )
    if deterministic is not None:
        c.set("run.deterministic", True, deterministic, "the same switch")
    _profile(c)


def _profile(c: Conversion) -> None:
    if not c.has("--profile") and not c.has("--use-pytorch-profiler"):
        for name in ("--profile-step-start", "--profile-step-end", "--profile-ranks"):
            c.drop(name, "nothing is profiled without --profile")
        return
    name = "--profile" if c.has("--profile") else "--use-pytorch-profiler"
    c.set("profiler.profile", True, name, "a window of torch's profiler")
    c.also("--use-pytorch-profiler", "profiler.profile", "torch's profiler is the one there is")
    start = c.whole("--profile-step-start", 10)
    c.set("profiler.profile_step_start", start, "--profile-step-start", "the same step")
    c.set(
        "profiler.profile_step_end", c.whole("--profile-step-end", 12), "--profile-step-end", "the same step"
    )
    if c.has("--profile-ranks"):
        c.set(
            "profiler.profile_ranks", ",".join(c.words("--profile-ranks")), "--profile-ranks", "with commas"
        )
