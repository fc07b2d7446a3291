"""What ``check`` says of dtypes is what a step has."""

import json
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drivetrain.config import LaunchFacts, Layout, RunConfig, load_config
from drivetrain.config.tensor_dtypes import tensor_classes
from drivetrain.engine.model.batch import whole_sequences
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.model.rotary import rotation
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import ProcessGroup, Ranks
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.precision import LossScaler, compute_dtype
from drivetrain.engine.step import Stepper
from runs_on_the_spot import Tiny

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SMALL = [
    *(
        "model.num_layers=2",
        "model.hidden_size=32",
        "model.ffn_hidden_size=48",
        "model.num_attention_heads=2",
    ),
    *(
        "model.seq_length=16",
        "model.vocab_size=300",
        "training.micro_batch_size=2",
        "training.global_batch_size=4",
    ),
]
GPT = [
    *("model.normalization=LayerNorm", "model.activation_func=gelu", "model.add_bias_linear=true"),
    "model.position_embedding_type=learned_absolute",
]
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
# One operator or another, as torch decomposes the call.
NORMS = {"_fused_rms_norm": 1, "native_layer_norm": 1, "rsqrt": 0}
ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")


class Seen(TorchDispatchMode):
    """Dtypes of what operators take and give, by the operator's name."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[str, set[str]] = defaultdict(set)
        self.given: dict[str, list[set[str]]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.taken[name] |= set(names_of(args))
        for number, one in enumerate(out if isinstance(out, tuple) else (out,)):
            while len(self.given[name]) <= number:
                self.given[name].append(set())
            self.given[name][number] |= set(names_of(one))
        return out


def names_of(values: Any) -> list[str]:
    return [
        NAMES[one.dtype]
        for one in tree_leaves(values)
        if isinstance(one, torch.Tensor) and one.dtype in NAMES
    ]


def classes_of_step(config: RunConfig) -> dict[str, set[str]]:
    """Class of tensors → the dtypes that a step had of it."""
    dtype = compute_dtype(config.precision)
    decoder = Decoder(config.model, dtype)
    initialize(decoder, 0)
    mesh = Mesh.form(Layout(), 0)
    found: dict[str, set[str]] = defaultdict(set)
    for block in decoder.blocks.values():
        block.register_forward_hook(lambda _block, _given, out: found["activations"].update(names_of(out)))
        block.register_full_backward_hook(
            lambda _block, given, out: found["activation gradients"].update(names_of([given, out]))
        )
    stepper = Stepper(
        decoder=decoder,
        sync=gradient_sync(decoder, mesh, Traffic(), zero_stage=0),
        optimizer=build_optimizer(decoder, config.optimizer),
        group=ProcessGroup(Ranks()),
        mesh=mesh,
        device=torch.device("cpu"),
        num_microbatches=2,
        max_norm=1.0,
        pipeline=None,
        loss_scaler=LossScaler(config.precision) if dtype == torch.float16 else None,
    )
    batch = whole_sequences(torch.randint(config.model.vocab_size, (2, config.model.seq_length)))

    def look() -> None:
        found["gradients"].update(names_of([held.tensor for held in stepper.sync.gradients().values()]))

    with Seen() as seen:
        figures = stepper.step(iter([batch, batch]), 1e-3, stop_requested=False, on_gradients=look)
        logits = decoder(batch)
    found["masters"].update(names_of(list(decoder.parameters())))
    found["optimizer state"].update(
        names_of([list(state.values()) for state in stepper.optimizer.state.values()])
    )
    found["gradient norm"].update(names_of([figures.grad_norm, figures.clip_coefficient]))
    found["parameters"] = {name for product in PRODUCTS for name in seen.taken[product]}
    found["activations"].update(*(given for product in PRODUCTS for given in seen.given[product]))
    found["activations"].update(names_of(logits))
    found["island: embedding"] |= seen.given["embedding"][0]
    found["island: norms"] = {
        name for norm, at in NORMS.items() for given in seen.given[norm][at : at + 1] for name in given
    }
    found["island: loss"] = seen.given["_softmax"][0] | set(names_of(figures.loss_sum))
    found["island: attention softmax"] = {
        name for kernel in ATTENTION for given in seen.given[kernel][1:2] for name in given
    }
    if config.model.position_embedding_type == "rope":
        found["island: rotary angles"] = seen.given["cos"][0] | seen.given["sin"][0]
        turn = rotation(config.model, batch.position_ids.flatten(), dtype)
        found["rotary tables"] = set(names_of([turn.cosine, turn.sine]))
    return dict(found)


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_step_has_the_dtypes_that_are_told(dtype: str, family: str) -> None:
    config = load_config(
        "llama-2m", [*SMALL, f"precision.params_dtype={dtype}", *(GPT if family == "gpt" else [])]
    ).config
    told = {one.name: one.dtype for one in tensor_classes(config, LaunchFacts())}
    seen = classes_of_step(config)
    # Sums inside of a product show in its result alone: test_fp16_gradients.py has a sum that fp16 could not hold.
    unseen = {name for name, one in told.items() if one is None} | {"product sums"}
    if not seen["island: attention softmax"]:
        # Where plain products of 16 bits serve instead of torch's kernel.
        assert dtype == "bf16"
        unseen.add("island: attention softmax")
        del seen["island: attention softmax"]
    assert seen == {name: {one} for name, one in told.items() if name not in unseen}


def test_what_travels_is_told_where_something_does() -> None:
    def told(world_size: int, *overrides: str) -> dict[str, str | None]:
        config = load_config("llama-2m", ["precision.params_dtype=fp16", *overrides]).config
        return {one.name: one.dtype for one in tensor_classes(config, LaunchFacts(world_size=world_size))}

    wires = ("gradient wire", "tensor-parallel wire", "pipeline wire")
    assert [told(1)[name] for name in wires] == [None, None, None]
    assert told(2)["gradient wire"] == "fp32"
    assert told(2, "precision.grad_reduce_dtype=bf16")["gradient wire"] == "bf16"
    assert told(2, "parallelism.tensor_model_parallel_size=2")["tensor-parallel wire"] == "fp16"
    assert told(2, "parallelism.pipeline_model_parallel_size=2")["pipeline wire"] == "fp16"


def test_check_lists_them(tiny: Tiny) -> None:
    overrides = ("precision.params_dtype=fp16", "precision.initial_loss_scale=1024")
    document = json.loads(tiny.run("check", str(tiny.file), *overrides, "--json").stdout)
    config = load_config(str(tiny.file), list(overrides)).config
    expected = tensor_classes(config, LaunchFacts())
    assert [(one["name"], one["dtype"], one["note"]) for one in document["precision"]] == [
        (one.name, one.dtype, one.note) for one in expected
    ]
    text = tiny.run("check", str(tiny.file), *overrides).stdout
    assert all(one.name in text and one.note in text for one in expected)


def test_check_refuses_contradictions_of_the_loss_scale(tiny: Tiny) -> None:
    done = tiny.run("check", str(tiny.file), "precision.loss_scale=1024")
    assert done.returncode == 1
    assert "loss-scale-needs-fp16" in done.stdout
    assert "precision.params_dtype=fp16" in done.stdout
