"""Initial weights, each parameter from a generator of its own."""

import hashlib
import math

import torch
from torch import Tensor

from drivetrain.engine.model.decoder import Decoder

__all__ = ["initialize", "parameter_generator"]

RESIDUAL_OUTPUTS = (".attention.output.weight", ".mlp.down.weight")


def initialize(decoder: Decoder, seed: int) -> None:
    """Fill every parameter of ``decoder`` in place.

    Matrices and embeddings: normal, standard deviation ``model.init_method_std``; those that write into the
    residual stream (attention output, MLP down) divided by sqrt(2 x num_layers), as in GPT-2 and Megatron.
    Norm weights 1, biases 0.

    The numbers of a parameter depend on ``seed`` and its name alone: not on the order of construction, on
    other parameters, on the device, the number of threads or the compute dtype (an fp64 model holds the
    same fp32 numbers). They are drawn on the CPU and copied.
    """
    model = decoder.model
    residual_std = model.init_method_std / math.sqrt(2 * model.num_layers)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            assert not parameter.is_meta, f"{name} is on the meta device: materialise it first"
            owner, kind = name.split(".")[-2:]
            if kind == "bias":
                parameter.zero_()
            elif owner.endswith("norm"):
                parameter.fill_(1.0)
            else:
                std = residual_std if name.endswith(RESIDUAL_OUTPUTS) else model.init_method_std
                parameter.copy_(_normal(parameter.shape, std, parameter_generator(seed, name)))


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """The CPU generator of the parameter called ``name``; Python's own hash differs from run to run."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _normal(shape: torch.Size, std: float, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").mul_(std)
