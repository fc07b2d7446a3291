"""Initial weights, each parameter from a generator of its own."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from drivetrain.config.model import ModelConfig
from drivetrain.engine.model.decoder import Decoder

__all__ = ["initial_value", "initialize", "parameter_generator"]

RESIDUAL_OUTPUTS = (".attention.output.weight", ".mlp.down.weight")


def initialize(decoder: Decoder, seed: int) -> None:
    """Fill every parameter of ``decoder``, which is whole, in place with its :func:`initial_value`."""
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            assert not parameter.is_meta, f"{name} is on the meta device: materialise it first"
            parameter.copy_(initial_value(decoder.model, name, parameter.shape, seed))


def initial_value(model: ModelConfig, name: str, shape: Sequence[int], seed: int) -> Tensor:
    """What the whole parameter called ``name`` starts from: ``shape``, fp32, on the CPU.

    Matrices and embeddings: normal, standard deviation ``model.init_method_std``; those that write into the
    residual stream (attention output, MLP down) divided by sqrt(2 x num_layers), as in GPT-2 and Megatron.
    Norm weights 1, biases 0.

    The numbers of a parameter depend on ``seed`` and its name alone: not on the order of construction, on
    other parameters, on the device, the number of threads or the compute dtype (an fp64 model holds the
    same fp32 numbers), and not on the layout: a rank that holds a part takes it out of the whole.
    """
    owner, kind = name.split(".")[-2:]
    if kind == "bias":
        return torch.zeros(tuple(shape))
    if owner.endswith("norm"):
        return torch.ones(tuple(shape))
    residual_std = model.init_method_std / math.sqrt(2 * model.num_layers)
    std = residual_std if name.endswith(RESIDUAL_OUTPUTS) else model.init_method_std
    return _normal(shape, std, parameter_generator(seed, name))


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """The CPU generator of the parameter called ``name``; Python's own hash differs from run to run."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _normal(shape: Sequence[int], std: float, generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu").mul_(std)
