"""Hugging Face folders in and out, against transformers itself."""

import json
from pathlib import Path

import pytest
import torch
from model_examples import FAMILIES, decoder_of, model_of, packed_batch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from drivetrain.engine.model.batch import whole_sequences
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.huggingface import (
    export_folder,
    huggingface_architecture,
    load_weights,
    read_config,
    state_from_huggingface,
    state_to_huggingface,
)
from drivetrain.errors import CheckpointError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TOKENS = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(0))


def exported(folder: Path, family: str = "llama", **arguments) -> Decoder:
    model = model_of(family)
    decoder = decoder_of(model)
    export_folder(decoder.state_dict(), model, folder, **arguments)
    return decoder


def edit_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_our_logits_from_an_exported_folder(tmp_path, family):
    decoder = exported(tmp_path, family)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(peer).__name__ == huggingface_architecture(decoder.model)
    assert peer.dtype == torch.float32
    with torch.no_grad():
        wanted, found = decoder(whole_sequences(TOKENS)), peer(TOKENS).logits
    assert wanted.std() > 0.3
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


PEERS = {
    "llama": ("LlamaConfig", {}),
    "llama_gqa_untied": ("LlamaConfig", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "llama_bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama3_scaling": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 16}),
    "gpt2": ("GPT2Config", {"n_inner": 48}),
    "gpt2_untied": ("GPT2Config", {"tie_word_embeddings": False}),
}


def peer_of(family: str):
    """A randomly initialised model of transformers, its norms and biases random too."""
    name, changes = PEERS[family]
    if name == "GPT2Config":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "vocab_size": 61}
        sizes |= {"bos_token_id": None, "eos_token_id": None}
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"vocab_size": 61, "max_position_embeddings": 64, "tie_word_embeddings": True}
        sizes |= {"bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, name)(**(sizes | {"initializer_range": 0.2} | changes))
    torch.manual_seed(5)
    peer = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return peer


@pytest.mark.parametrize("family", PEERS)
def test_our_decoder_computes_the_logits_of_a_folder_transformers_saved(tmp_path, family):
    peer = peer_of(family)
    peer.save_pretrained(tmp_path)
    decoder = Decoder(read_config(tmp_path, seq_length=24), torch.float32).eval()
    assert decoder.model.seq_length == 24
    load_weights(tmp_path, decoder)
    with torch.no_grad():
        wanted, found = peer(TOKENS).logits, decoder(whole_sequences(TOKENS))
    assert wanted.std() > 0.3
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_positions_beyond_the_original_context_are_scaled_as_transformers_scales_them(tmp_path):
    decoder = exported(tmp_path, "llama3_scaling")
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.randint(61, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(peer(tokens).logits, decoder(whole_sequences(tokens)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_fp32_export_comes_back_to_the_bit(tmp_path, family):
    decoder = exported(tmp_path, family)
    back = Decoder(read_config(tmp_path, seq_length=24), torch.bfloat16)
    assert huggingface_architecture(back.model) == huggingface_architecture(decoder.model)
    load_weights(tmp_path, back)
    wanted = decoder.state_dict()
    assert list(back.state_dict()) == list(wanted)
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_states_convert_there_and_back(family):
    decoder = decoder_of(model_of(family))
    tensors = state_to_huggingface(decoder.state_dict(), decoder.model)
    back = state_from_huggingface(tensors, decoder.model)
    for name, tensor in decoder.state_dict().items():
        assert torch.equal(back[name], tensor), name


def test_big_states_are_sharded_with_an_index(tmp_path):
    decoder = exported(tmp_path, "qwen3", max_shard_bytes=20_000)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    back = Decoder(read_config(tmp_path), torch.float32).eval()
    load_weights(tmp_path, back)
    with torch.no_grad():
        wanted = decoder(whole_sequences(TOKENS))
        torch.testing.assert_close(peer(TOKENS).logits, wanted, rtol=0, atol=1e-4)
        assert torch.equal(back(whole_sequences(TOKENS)), wanted)


def test_the_tokenizer_goes_along_and_its_end_of_document_is_known(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "hello": 1, "world": 2}, "<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    exported(tmp_path / "folder", tokenizer_file=tmp_path / "tokenizer.json")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert loaded("hello world hello")["input_ids"] == [1, 2, 1]
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|endoftext|>", 0)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert peer.generation_config.eos_token_id == 0


def test_no_temporary_file_stays(tmp_path):
    exported(tmp_path)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"normalization": "LayerNorm"}, "model.normalization is 'LayerNorm'"),
        ("llama", {"activation_func": "gelu"}, "model.activation_func is 'gelu'"),
        ("qwen3", {"add_bias_linear": True}, "model.add_bias_linear is True"),
        ("gpt2", {"add_bias_linear": False}, "model.add_bias_linear is False"),
        ("gpt2", {"num_query_groups": 2}, "model.num_query_groups is 2"),
        ("gpt2", {"kv_channels": 16}, "model.kv_channels"),
        ("gpt2", {"normalization": "RMSNorm"}, "model.normalization is 'RMSNorm'"),
        ("llama", {"hidden_size": 30, "kv_channels": 8}, "model.hidden_size"),
    ],
)
def test_a_model_without_equivalent_says_which_field_has_none(tmp_path, family, changes, named):
    model = model_of(family, **changes)
    assert huggingface_architecture(model) is None
    with pytest.raises(CheckpointError, match=named):
        export_folder(Decoder(model, torch.float32).state_dict(), model, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_an_export_does_not_overwrite_a_model(tmp_path):
    exported(tmp_path)
    with pytest.raises(CheckpointError, match="holds a model already"):
        exported(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM.*LlamaForCausalLM"),
        ("llama", {"architectures": "absent", "model_type": "absent"}, "architecture nothing"),
        ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu'; Drivetrain has only 'silu'"),
        ("llama", {"attention_bias": True}, "attention_bias is True and mlp_bias is False"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary scaling 'linear'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rotary scaling 'yarn'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 without low_freq_factor"),
        ("llama", {"rope_parameters": {"rope_type": "default", "mscale": 1}}, "unknown rotary keys mscale"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"sliding_window": 4096}, "unknown keys sliding_window"),
        ("llama", {"quantization_config": {}, "auto_map": {}}, "auto_map, quantization_config"),
        ("llama", {"hidden_size": "absent"}, "no hidden_size"),
        ("llama", {"hidden_size": "wide"}, "hidden_size"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"activation_function": "gelu"}, "activation_function is 'gelu'"),
        ("gpt2", {"embd_pdrop": 0.5}, "embd_pdrop is 0.5 and resid_pdrop is 0.0"),
    ],
)
def test_a_config_that_we_have_no_setting_for_is_refused(tmp_path, family, changes, message):
    exported(tmp_path, family)
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


def test_both_spellings_of_the_rotary_base_are_read(tmp_path):
    exported(tmp_path)
    edit_config(tmp_path, rope_theta=1234.0)
    assert read_config(tmp_path).rotary_base == 1234.0
    edit_config(tmp_path, rope_theta="absent", rope_parameters={"rope_type": "default", "rope_theta": 777})
    assert read_config(tmp_path).rotary_base == 777.0


def test_weights_of_another_function_are_refused_even_where_shapes_fit(tmp_path):
    exported(tmp_path)
    edit_config(tmp_path, rope_theta=1234.0, rms_norm_eps=1e-3)
    with pytest.raises(CheckpointError, match=r"norm_epsilon is 0.001 there.*rotary_base is 1234.0 there"):
        load_weights(tmp_path, decoder_of(model_of("llama")))


def test_missing_unexpected_and_misshapen_tensors_are_all_listed(tmp_path):
    exported(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    tensors["extra.weight"] = torch.zeros(1)
    tensors["model.embed_tokens.weight"] = torch.zeros(3, 32)
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as raised:
        load_weights(tmp_path, decoder_of(model_of("llama")))
    for named in ("model.norm.weight", "extra.weight", "(3, 32) instead of (61, 32)"):
        assert named in str(raised.value)


def test_bf16_weights_widen_and_fp64_weights_are_refused(tmp_path):
    exported(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, file)
    decoder = decoder_of(model_of("llama"))
    load_weights(tmp_path, decoder)
    assert torch.equal(decoder.embedding.weight, tensors["model.embed_tokens.weight"].bfloat16().float())
    save_file({name: tensor.double() for name, tensor in tensors.items()}, file)
    with pytest.raises(CheckpointError, match=r"float64, which torch\.float32 does not hold"):
        load_weights(tmp_path, decoder)


def test_old_gpt2_names_constants_and_a_saved_tied_output_are_understood(tmp_path):
    wanted = exported(tmp_path, "gpt2").state_dict()
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 40, 40)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, file)
    decoder = decoder_of(model_of("gpt2"), seed=8)
    load_weights(tmp_path, decoder)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in decoder.state_dict().items())
    tensors["lm_head.weight"] += 1
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"unexpected \(lm_head.weight\)"):
        load_weights(tmp_path, decoder)


def test_pickles_are_refused_by_name(tmp_path):
    exported(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a pickle, which is never loaded"):
        load_weights(tmp_path, decoder_of(model_of("llama")))


def test_damaged_and_missing_files_are_user_errors(tmp_path):
    decoder = decoder_of(model_of("llama"))
    with pytest.raises(CheckpointError, match=r"config.json does not exist"):
        read_config(tmp_path)
    exported(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_weights(tmp_path, decoder)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
        read_config(tmp_path)


def test_an_index_may_not_point_outside_its_folder(tmp_path):
    exported(tmp_path / "folder")
    (tmp_path / "folder" / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside the folder"):
        load_weights(tmp_path / "folder", decoder_of(model_of("llama")))


def test_a_loaded_model_trains_on_packed_documents(tmp_path):
    exported(tmp_path, "qwen3")
    decoder = Decoder(read_config(tmp_path, seq_length=24), torch.bfloat16)
    load_weights(tmp_path, decoder)
    decoder.loss_sum(packed_batch([[5, 19], [24]])).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in decoder.parameters())
