"""The arguments of a trainer in the text of a shell script or of a command line."""

import re
from collections.abc import Mapping, Sequence

from drivetrain.config.importing.arguments import Argument, Source, Trainer, known_names
from drivetrain.config.importing.shell_values import (
    Command,
    Explain,
    Text,
    commands_of,
    is_absent,
)
from drivetrain.errors import ConfigurationError

__all__ = ["source_of_text"]

_LEAST = 3
"""Known arguments that make a command the trainer's."""
_LAUNCHER = frozenset(
    {
        "nproc-per-node", "nnodes", "node-rank", "master-addr", "master-port", "rdzv-backend", "rdzv-endpoint",
        "rdzv-id", "rdzv-conf", "standalone", "max-restarts", "monitor-interval", "start-method", "role", "module",
        "no-python", "run-path", "log-dir", "redirects", "tee", "local-addr", "local-ranks-filter", "use-env",
        "msrun-log-dir", "worker-num", "local-worker-num", "join", "cluster-time-out", "bind-core",
    }
)  # fmt: skip
_SCRIPT = re.compile(r".*\.py$")


def source_of_text(
    text: str, where: str, trainer: Trainer | None, given: Mapping[str, str], devices: int | None
) -> Source:
    """The arguments of the command in ``text`` that starts training.

    Raises:
        ConfigurationError: there is none, or there are several; or the text cannot be understood.
    """
    commands, explain = commands_of(text, where, given)
    words, line = _training_command(commands, where, given)
    before, after = _divided(words)
    named, notes, lost = _arguments(after, line, explain)
    launcher = [one for one in named if one.name[2:].replace("_", "-") in _LAUNCHER]
    launcher += _arguments(before, line, explain)[0]
    own = [one for one in named if one.name[2:].replace("_", "-") not in _LAUNCHER]
    last: dict[str, Argument] = {}
    repeated = []
    for argument in own:
        if argument.name in last:
            repeated.append(last.pop(argument.name))
        last[argument.name] = argument
    if trainer is None:
        all_names = known_names("mindspeed")
        is_mindspeed = any(name in all_names and all_names[name].trainer == "mindspeed" for name in last)
        trainer = "mindspeed" if is_mindspeed else "megatron"
    processes = devices if devices is not None else _processes(launcher)
    return Source(
        trainer, where, last, tuple(repeated), processes, tuple(launcher), tuple(notes), tuple(lost)
    )


def _known_count(words: Sequence[Text]) -> int:
    known = known_names("mindspeed")
    return len({name for word in words if (name := word.text.partition("=")[0]) in known})


def _training_command(
    commands: Sequence[Command], where: str, given: Mapping[str, str]
) -> tuple[list[Text], int]:
    candidates = [(list(command.words), command.line) for command in commands]
    bare = [word for words, _ in candidates if words[0].text.startswith("--") for word in words]
    if bare and not any(
        _known_count(words) >= _LEAST for words, _ in candidates if not words[0].text.startswith("--")
    ):
        # Arguments alone, one or several on a line.
        candidates = [(bare, candidates[0][1])]
    found = [(words, line) for words, line in candidates if _known_count(words) >= _LEAST]
    if not found:
        found = _inside_words(commands, where, given)
    if not found and len(candidates) == 1 and bare and _known_count(bare):
        found = candidates
    if not found:
        raise ConfigurationError(
            f"{where} holds no arguments of Megatron-LM, MindSpeed or torchtitan: none of its {len(commands)} commands "
            f"has {_LEAST} that are known"
        )
    if len(found) > 1:
        lines = ", ".join(str(line) for _, line in found)
        raise ConfigurationError(
            f"{where} starts training {len(found)} times, at the lines {lines}; leave one of the commands in it"
        )
    return found[0]


def _inside_words(
    commands: Sequence[Command], where: str, given: Mapping[str, str]
) -> list[tuple[list[Text], int]]:
    """Commands that others are handed as one word: ``bash -c "torchrun …"``."""
    found = []
    for command in commands:
        for word in command.words:
            if " " not in word.text or "--" not in word.text:
                continue
            inner, _ = commands_of(word.text, where, given)
            missing = word.missing
            for one in inner:
                words = [
                    Text(
                        text.text,
                        tuple(name for name in missing if f"${name.partition(' ')[0]}" in text.text),
                    )
                    for text in one.words
                ]
                if _known_count(words) >= _LEAST:
                    found.append((words, command.line))
    return found


def _divided(words: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """What stands before the trainer's program, and behind it."""
    for place, word in enumerate(words):
        if _SCRIPT.match(word.text):
            return list(words[:place]), list(words[place + 1 :])
    place = next((place for place, word in enumerate(words) if word.text.startswith("--")), 0)
    return list(words[:place]), list(words[place:])


def _arguments(
    words: Sequence[Text], line: int, explain: Explain
) -> tuple[list[Argument], list[tuple[str, str]], list[tuple[str, str]]]:
    """Arguments with their words; words that are empty, or stand before all of them; words that may hold others."""
    found: list[Argument] = []
    notes: list[tuple[str, str]] = []
    lost: list[tuple[str, str]] = []
    for word in words:
        name, equals, value = word.text.partition("=")
        if re.match(r"--?[A-Za-z]", word.text):
            # One dash, as some write it by mistake, is no other argument.
            name = "--" + name.lstrip("-")
            missing = tuple(map(explain, word.missing))
            found.append(Argument(name, (value,) if equals else (), missing, line))
        elif (
            word.missing
            and (_IS_BUNDLE.fullmatch(word.text) or _WHOLE.fullmatch(word.text))
            and not (found and _wants_value(found[-1]) and not _IS_BUNDLE.fullmatch(word.text))
        ):
            reasons = list(map(explain, word.missing))
            if all(map(is_absent, reasons)):
                notes.append((word.text, f"it is empty as far as the file tells: {', '.join(reasons)}"))
            else:
                why = f"it may hold arguments, and its value is unknown: {', '.join(reasons)}"
                lost.append((word.text, f"{why}; give it with --set NAME=VALUE, or write it into the file"))
        elif found:
            last = found[-1]
            missing = (*last.missing, *map(explain, word.missing))
            found[-1] = Argument(last.name, (*last.values, word.text.strip("'\"")), missing, line)
        elif word.missing:
            notes.append((word.text, "it stands before every argument"))
    return found, notes, lost


_WHOLE = re.compile(r"\$\{?[\w@*]+\}?|\$\(.*\)?", re.DOTALL)
"""A variable, or the output of a command, as a whole word."""
_IS_BUNDLE = re.compile(r"\$\{?\w*(ARGS|OPTS|OPTIONS|FLAGS|PARAMS|EXTRA)\w*\}?|\$[@*]", re.IGNORECASE)
"""Variables that hold arguments and no value, by what scripts call them."""


def _wants_value(argument: Argument) -> bool:
    """Whether a word behind it can be its value: it has none yet, and is no known switch."""
    known = known_names("mindspeed").get(argument.name)
    is_switch = argument.name in _SWITCHES or (known is not None and known.is_negative)
    return not argument.values and not is_switch


_SWITCHES = frozenset(
    {
        "--bf16", "--fp16", "--swiglu", "--sequence-parallel", "--use-distributed-optimizer", "--overlap-grad-reduce",
        "--overlap-param-gather", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--use-flash-attn",
        "--use-mcore-models", "--no-load-optim", "--no-load-rng", "--no-save-optim", "--no-save-rng",
        "--log-throughput", "--attention-softmax-in-fp32", "--group-query-attention", "--qk-layernorm", "--mock-data",
        "--eod-mask-loss", "--use-rotary-position-embeddings", "--use-rope-scaling", "--deterministic-mode",
        "--recompute-activations", "--accumulate-allreduce-grads-in-fp32", "--use-torch-fsdp2", "--use-megatron-fsdp",
        "--no-position-embedding", "--reset-position-ids", "--reset-attention-mask", "--tp-comm-overlap",
        "--use-cpu-initialization", "--finetune", "--async-save", "--calculate-per-token-loss", "--manual-gc",
        "--add-qkv-bias", "--no-masked-softmax-fusion", "--apply-layernorm-1p",
        "--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb", "--use-mc2", "--moe-grouped-gemm",
    }
)  # fmt: skip
"""Switches that scripts put right before a variable with more arguments."""


def _processes(launcher: Sequence[Argument]) -> int | None:
    """Processes that a launcher's arguments start; None where they do not tell."""
    values: dict[str, int] = {}
    for argument in launcher:
        name = argument.name[2:].replace("_", "-")
        if name in ("nproc-per-node", "nnodes", "worker-num"):
            if argument.missing or len(argument.values) != 1 or not argument.values[0].isdigit():
                return None
            values[name] = int(argument.values[0])
    if "worker-num" in values:
        return values["worker-num"]
    if "nproc-per-node" not in values:
        return None
    return values["nproc-per-node"] * values.get("nnodes", 1)
