"""The products of a tensor-parallel layer whose collectives can be cut, as a tuned file names them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from drivetrain.config import RunConfig
from drivetrain.config.derive import microbatches_per_rank
from drivetrain.config.hosts import by_host

__all__ = ["OPERATOR", "ChunkCall", "Kind", "chunk_calls", "link_text"]

OPERATOR = "tp_chunks"
"""What entries of a tuned file are called that say into how many chunks a product is cut."""

Kind = Literal["copied", "gathered", "summed", "scattered"]
"""What happens to the input before the products, or to the output behind it."""


@dataclass(frozen=True)
class ChunkCall:
    """Products of one input on one rank.

    Attributes:
        product: ``qkv``, ``output``, ``gate_up`` or ``down``.
        kind: copied or gathered inputs, summed or scattered outputs.
        tokens: T of a micro-batch.
        inputs: K of each weight (N, K) that this rank has.
        outputs: N of each of them.
        calls_per_step: on one rank.
    """

    product: str
    kind: Kind
    tokens: int
    inputs: int
    outputs: tuple[int, ...]
    calls_per_step: float

    def rows(self, ranks: int) -> int:
        """Of a rank, which chunks are made of."""
        return self.tokens // ranks if self.kind in ("gathered", "scattered") else self.tokens

    def text(self, dtype: str, device: str, ranks: int, link: str) -> str:
        """By which it is found in a tuned file, but for the number of tokens."""
        sizes = " + ".join(map(str, self.outputs))
        return f"{OPERATOR} on {device}: {self.kind} {dtype}[tokens, {self.inputs}] to {sizes}; {ranks} ranks, {link}"


def chunk_calls(config: RunConfig) -> tuple[ChunkCall, ...]:
    """The four products of a layer of ``config``, in the order in which a layer comes to them."""
    model, parallelism = config.model, config.parallelism
    ranks = parallelism.tensor_model_parallel_size
    before: Kind = "gathered" if parallelism.sequence_parallel else "copied"
    behind: Kind = "scattered" if parallelism.sequence_parallel else "summed"
    queries = model.num_attention_heads * model.head_size // ranks
    keys = max(1, model.query_groups // ranks) * model.head_size
    width, hidden = model.ffn_size // ranks, model.hidden_size
    entering = (width, width) if model.activation_func == "swiglu" else (width,)
    tokens = config.training.micro_batch_size * model.seq_length
    data_parallel = parallelism.data_parallel_size or 1
    layers = -(-model.num_layers // parallelism.pipeline_model_parallel_size)
    calls = float(layers * microbatches_per_rank(config, data_parallel))
    return (
        ChunkCall("qkv", before, tokens, hidden, (queries, keys, keys), calls),
        ChunkCall("output", behind, tokens, queries, (hidden,), calls),
        ChunkCall("gate_up", before, tokens, hidden, entering, calls),
        ChunkCall("down", behind, tokens, width, (hidden,), calls),
    )


def link_text(device: str, ranks: Sequence[int], local_world_size: int) -> str:
    """What lies between ``ranks`` of a group, as far as it can be known without measuring it.

    Two links of one description may differ in rate all the same: how fast a switch, or a limit that somebody set, lets
    them be is not among what an interface tells.
    """
    hosts = len(by_host(sorted(ranks), local_world_size))
    where = "on one machine" if hosts == 1 else f"on {hosts} machines"
    if device == "cuda":
        return f"nccl {where}"
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface is None:
        return f"gloo {where}"
    return f"gloo over {interface}{_speed(interface)} {where}"


def _speed(interface: str) -> str:
    """What an interface says of itself; nothing where it says nothing (the loopback; one that is down)."""
    try:
        text = Path("/sys/class/net", interface, "speed").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return f" ({text} Mbit/s)" if text.isdigit() else ""
