"""Hugging Face folders in and out: config.json, safetensors, tokenizer. Nothing here unpickles."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drivetrain.archive.atomic import sync_folder, write_bytes, write_json
from drivetrain.config.model import ModelConfig
from drivetrain.engine.data.tokenizer import end_of_document_id, load_tokenizer
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.huggingface_config import (
    config_from_huggingface,
    config_to_huggingface,
    huggingface_architecture,
)
from drivetrain.engine.model.huggingface_state import state_from_huggingface, state_to_huggingface
from drivetrain.errors import CheckpointError, EnvironmentFault

__all__ = [
    "describe_folder",
    "export_folder",
    "huggingface_architecture",
    "load_weights",
    "read_config",
    "require_same_model",
    "state_from_huggingface",
    "state_to_huggingface",
]

MAX_SHARD_BYTES = 5 * 10**9
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def export_folder(
    decoder_state: Mapping[str, Tensor],
    model: ModelConfig,
    path: Path | str,
    tokenizer_file: Path | str | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load.

    Values and dtype are kept: an fp32 state comes back to the bit. One file up to ``max_shard_bytes``, numbered
    shards and an index above. ``config.json`` is written last: a folder that has it is complete.

    Args:
        decoder_state: ``decoder.state_dict()``, all of one dtype.
        model: the configuration the decoder was built from.
        path: the folder; made if need be, and must not hold a model yet.
        tokenizer_file: a tokenizer.json, copied.

    Raises:
        CheckpointError: no Hugging Face equivalent, or a model is there already.
        DataError: ``tokenizer_file`` is missing or no tokenizer.
        EnvironmentFault: the disk is full or not writable.
    """
    folder = Path(path)
    config_to_huggingface(model)  # raises before anything is written
    taken = [name for name in ("config.json", _WEIGHTS, _INDEX) if (folder / name).exists()]
    if taken:
        raise CheckpointError(f"{folder} holds a model already ({', '.join(taken)}); name another folder")
    tensors = state_to_huggingface(decoder_state, model)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    assert len(dtypes) == 1, f"a state of several dtypes: {dtypes}"
    token, token_id = _end_of_document(tokenizer_file)
    folder.mkdir(parents=True, exist_ok=True)
    _save_tensors(tensors, folder, max_shard_bytes)
    _describe(model, folder, tokenizer_file, dtypes.pop(), token, token_id)


def describe_folder(
    model: ModelConfig, folder: Path, tokenizer_file: Path | None, dtype: torch.dtype
) -> None:
    """Write everything but the weights into ``folder``, which holds them already. Errors as ``export_folder``."""
    token, token_id = _end_of_document(tokenizer_file)
    _describe(model, folder, tokenizer_file, dtype, token, token_id)


def _describe(
    model: ModelConfig,
    folder: Path,
    tokenizer_file: Path | str | None,
    dtype: torch.dtype,
    token: str | None,
    token_id: int | None,
) -> None:
    if tokenizer_file is not None:
        write_bytes(folder / "tokenizer.json", Path(tokenizer_file).read_bytes())
        write_json(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": model.max_positions,
                "clean_up_tokenization_spaces": False,
                "eos_token": token,
            },
        )
    end = {"bos_token_id": None, "eos_token_id": token_id}
    write_json(folder / "generation_config.json", end)
    described = config_to_huggingface(model) | end | {"torch_dtype": str(dtype).removeprefix("torch.")}
    write_json(folder / "config.json", described)


def read_config(path: Path | str, seq_length: int | None = None) -> ModelConfig:
    """The model section of a Hugging Face folder.

    Args:
        path: the folder.
        seq_length: tokens of a training sequence; the longest position of the model when absent.

    Raises:
        CheckpointError: no folder, no readable config.json, or one that our decoder has no setting for.
    """
    file = Path(path) / "config.json"
    return config_from_huggingface(_read_object(file), str(file), seq_length)


def load_weights(path: Path | str, decoder: Decoder) -> None:
    """Copy the weights of a Hugging Face folder into ``decoder``, in place.

    bf16 and fp16 tensors widen to the fp32 masters exactly; tensors wider than the masters are refused.

    Raises:
        CheckpointError: no safetensors, a damaged file, tensors that do not fit, or another function than
            ``decoder.model``.
    """
    folder = Path(path)
    require_same_model(folder, decoder.model)
    state = state_from_huggingface(dict(_tensors_of(folder)), decoder.model)
    parameters = dict(decoder.named_parameters())
    for name, tensor in state.items():
        kept = parameters[name].dtype
        if not tensor.is_floating_point() or torch.promote_types(tensor.dtype, kept) != kept:
            raise CheckpointError(f"{folder}: {name} is {tensor.dtype}, which {kept} does not hold exactly")
    with torch.no_grad():
        for name, tensor in state.items():
            parameters[name].copy_(tensor)


def require_same_model(folder: Path, model: ModelConfig) -> None:
    """Compare the folder's config.json with ``model``; no weight is read.

    Raises:
        CheckpointError: it is no such folder, or its weights would compute another function.
    """
    differing = _differing_fields(read_config(folder, model.seq_length), model)
    if differing:
        raise CheckpointError(f"{folder} holds another model: " + "; ".join(differing))


def _differing_fields(found: ModelConfig, wanted: ModelConfig) -> list[str]:
    """Fields that change the function and differ: "field: folder's value, not ours"."""
    ignored = {
        "seq_length",
        "max_position_embeddings",
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
    }
    if wanted.position_embedding_type == "learned_absolute":
        ignored |= {"rotary_base"}
    if not (found.use_rope_scaling or wanted.use_rope_scaling):
        ignored |= {name for name in ModelConfig.model_fields if name.startswith("rope_scaling_")}
    derived = {
        "ffn_hidden_size": "ffn_size",
        "num_query_groups": "query_groups",
        "kv_channels": "head_size",
    }
    differing: list[str] = []
    for name in ModelConfig.model_fields:
        source = derived.get(name, name)
        theirs, ours = getattr(found, source), getattr(wanted, source)
        if name not in ignored and theirs != ours:
            differing.append(f"model.{name} is {theirs!r} there and {ours!r} here")
    return differing


def _tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    if (folder / _WEIGHTS).exists():
        files = {_WEIGHTS: None}
    elif (folder / _INDEX).exists():
        weight_map = _read_object(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(one, str) for one in weight_map.values()):
            raise CheckpointError(f"{folder / _INDEX}: no weight_map")
        files = dict.fromkeys(weight_map.values())
    else:
        pickled = sorted(file.name for file in folder.glob("*.bin")) + sorted(
            file.name for file in folder.glob("*.pt*")
        )
        hint = (
            f"; {pickled[0]} is a pickle, which is never loaded: convert it to safetensors" if pickled else ""
        )
        raise CheckpointError(f"{folder}: neither {_WEIGHTS} nor {_INDEX}{hint}")
    for name in files:
        if Path(name).name != name:
            raise CheckpointError(f"{folder / _INDEX}: {name} lies outside the folder")
        try:
            with safe_open(folder / name, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - the reader has keys() and no iterator
                    yield key, opened.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from None


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist; a Hugging Face folder has one") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is no JSON object")
    return value


def _end_of_document(tokenizer_file: Path | str | None) -> tuple[str | None, int | None]:
    """The token that ends a document and its id, where there is a tokenizer and it has one."""
    if tokenizer_file is None:
        return None, None
    tokenizer = load_tokenizer(Path(tokenizer_file))
    token_id = end_of_document_id(tokenizer)
    return (None if token_id is None else str(tokenizer.id_to_token(token_id))), token_id


def _save_tensors(tensors: Mapping[str, Tensor], folder: Path, max_shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        _save_file(shards[0], folder / _WEIGHTS)
        return
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        _save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _save_file(tensors: Mapping[str, Tensor], file: Path) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(held, temporary, metadata={"format": "pt"})
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(file)
        sync_folder(file.parent)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise EnvironmentFault(
            f"{file} could not be written: {error}; free some space or name another folder"
        ) from None
