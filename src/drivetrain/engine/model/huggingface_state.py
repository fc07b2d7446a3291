"""Tensor names and layouts of Hugging Face checkpoints, to and from our state dict."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from drivetrain.config.model import ModelConfig
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.huggingface_config import GPT2, huggingface_architecture, obstacles
from drivetrain.errors import CheckpointError

__all__ = ["expected_shapes", "parts_of_huggingface", "state_from_huggingface", "state_to_huggingface"]

_ROTARY_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_ROTARY_ENDS = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "output": "lm_head"}
_GPT2_LAYER = {
    "attention_norm": "ln_1",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_GPT2_ENDS = {
    "embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "output": "lm_head",
}
# GPT-2 keeps its matrices as (in, out), and query, key and value as one.
_GPT2_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_GPT2_PACKED = ("attention.query", "attention.key", "attention.value")
# Constants that older versions of transformers saved among the weights.
_CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def state_to_huggingface(state: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Our tensors under their Hugging Face names and in their layout: same values, same dtype.

    Args:
        state: every parameter of the decoder of ``model`` by name, e.g. ``decoder.state_dict()``.
        model: the configuration the decoder was built from.

    Raises:
        CheckpointError: the model has no Hugging Face equivalent, or ``state`` lacks a parameter, holds another, or
            one of another shape.
    """
    _check_names("the state", state, expected_shapes(model))
    tensors: dict[str, Tensor] = {}
    for theirs, ours in _sources(model).items():
        tensor = torch.cat([state[name] for name in ours]) if len(ours) > 1 else state[ours[0]]
        tensors[theirs] = tensor.t() if theirs.endswith(_GPT2_TRANSPOSED) else tensor
    return tensors


def state_from_huggingface(tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The inverse of ``state_to_huggingface``; ``load_state_dict`` takes what it returns.

    Also read: GPT-2 names without their ``transformer.`` prefix, constants that older versions saved, and an
    output matrix saved besides the embedding it is tied to, if the two are equal.

    Raises:
        CheckpointError: the model has no Hugging Face equivalent, or tensors are missing, unexpected or of
            another shape; all are listed.
    """
    sources = _sources(model)
    tensors = _in_modern_names(tensors, model)
    shapes = expected_shapes(model)
    expected: dict[str, torch.Size] = {}
    for theirs, ours in sources.items():
        first = shapes[ours[0]]
        shape = torch.Size((sum(shapes[name][0] for name in ours), *first[1:]))
        expected[theirs] = torch.Size(reversed(shape)) if theirs.endswith(_GPT2_TRANSPOSED) else shape
    _check_names("the Hugging Face checkpoint", tensors, expected)
    state: dict[str, Tensor] = {}
    for theirs, ours in sources.items():
        tensor = tensors[theirs].t() if theirs.endswith(_GPT2_TRANSPOSED) else tensors[theirs]
        for name, part in zip(ours, torch.chunk(tensor, len(ours)), strict=True):
            state[name] = part.contiguous()
    return {name: state[name] for name in shapes}


def parts_of_huggingface(
    model: ModelConfig,
) -> Iterator[tuple[str, Sequence[tuple[str, tuple[int, ...]]], bool]]:
    """Each Hugging Face tensor: its name, our parameters (name and shape) whose rows it stacks, whether transposed.

    Raises:
        CheckpointError: the model has no Hugging Face equivalent.
    """
    shapes = expected_shapes(model)
    for theirs, ours in _sources(model).items():
        yield theirs, [(name, tuple(shapes[name])) for name in ours], theirs.endswith(_GPT2_TRANSPOSED)


def _sources(model: ModelConfig) -> dict[str, list[str]]:
    """For each Hugging Face tensor the parameters of ours it consists of, stacked along their rows."""
    architecture = huggingface_architecture(model)
    if architecture is None:
        raise CheckpointError("this model has no Hugging Face equivalent: " + "; ".join(obstacles(model)))
    gpt2 = architecture == GPT2
    ends, layer_names = (_GPT2_ENDS, _GPT2_LAYER) if gpt2 else (_ROTARY_ENDS, _ROTARY_LAYER)
    prefix = "transformer.h" if gpt2 else "model.layers"
    sources: dict[str, list[str]] = {}
    for name in expected_shapes(model):
        module, kind = name.rsplit(".", 1)
        if module in ends:
            sources[f"{ends[module]}.{kind}"] = [name]
            continue
        _, layer, part = module.split(".", 2)
        packed = gpt2 and part in _GPT2_PACKED
        theirs = f"{prefix}.{layer}.{'attn.c_attn' if packed else layer_names[part]}.{kind}"
        sources.setdefault(theirs, []).append(name)
    return sources


def expected_shapes(model: ModelConfig) -> dict[str, torch.Size]:
    """Shape of every parameter of a decoder of ``model``, by name; nothing is allocated."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Decoder(model, torch.float32).state_dict().items()}


def _in_modern_names(tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(_CONSTANTS)}
    gpt2 = huggingface_architecture(model) == GPT2
    if gpt2:
        ends = ("transformer.", "lm_head.")
        kept = {name if name.startswith(ends) else f"transformer.{name}": kept[name] for name in kept}
    if not model.untie_embeddings_and_output_weights and "lm_head.weight" in kept:
        embedding = kept.get("transformer.wte.weight" if gpt2 else "model.embed_tokens.weight")
        if embedding is not None and torch.equal(embedding, kept["lm_head.weight"]):
            del kept["lm_head.weight"]
    return kept


def _check_names(what: str, found: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    problems: list[str] = []
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    if missing:
        problems.append(f"{len(missing)} tensors are missing ({_some(missing)})")
    if unexpected:
        problems.append(f"{len(unexpected)} are unexpected ({_some(unexpected)})")
    wrong = [
        f"{name} {tuple(found[name].shape)} instead of {tuple(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    if wrong:
        problems.append(f"{len(wrong)} have another shape ({_some(wrong)})")
    if problems:
        raise CheckpointError(f"{what} does not fit the model: " + "; ".join(problems))


def _some(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    rest = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
