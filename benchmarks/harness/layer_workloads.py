"""Workload of a whole Llama layer, forward and backward: the model's own block with its operators, and two plain peers.

The peers are written here as in a textbook, one with torch's SDPA and one with the softmax written out; all three
compute with the very same parameters, which are bf16 so that nobody casts masters. Torch is imported when a workload is
built.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from harness.sides import Sides

__all__ = ["TARGETS", "LayerSizes", "Peer", "layer_workloads", "llama_layer"]

Peer = Literal["sdpa", "naive"]
TARGETS: Mapping[Peer, float] = {"sdpa": 1.25, "naive": 1.75}
"""That many times as fast."""

IN_WORDS: Mapping[Peer, str] = {
    "sdpa": "torch eager with SDPA and F.rms_norm",
    "naive": "torch eager, norm and softmax written out",
}


@dataclass(frozen=True)
class LayerSizes:
    """Of the layer: one document of ``tokens``; hidden size is heads x width."""

    tokens: int = 2048
    heads: int = 16
    width: int = 128
    between: int = 5632


def layer_workloads() -> dict[str, Callable[[], Sides]]:
    """By key, what builds the two sides of a workload."""
    return {f"llama_layer {peer}": lambda peer=peer: llama_layer(peer) for peer in TARGETS}  # type: ignore[misc]


def llama_layer(peer: Peer, sizes: LayerSizes = LayerSizes(), fused: str = "auto") -> Sides:
    """The block of ``engine/model`` with its operators against a plain layer.

    Ours is what ``fusion.level = all fusion.linear = transposed_gradient`` does, but that each product is one of its
    own: a joined one has no weight's gradient in the quick layout.

    Args:
        fused: backend of the operators that are no products.
    """
    import torch

    from drivetrain.config.fusion import LEVELS
    from drivetrain.config.model import ModelConfig
    from drivetrain.engine.model.attention import DocumentLayout
    from drivetrain.engine.model.decoder import Block
    from drivetrain.engine.model.operators import UsesOperators
    from drivetrain.engine.model.rotary import rotation
    from drivetrain.engine.ops.selection import Selection

    hidden = sizes.heads * sizes.width
    model = ModelConfig(
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=sizes.between,
        num_attention_heads=sizes.heads,
        seq_length=sizes.tokens,
        vocab_size=2,
    )
    block = Block(model)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    with torch.no_grad():
        for parameter in block.parameters():
            rows = parameter.shape
            # Weights of norms around 1; products about as large as what is multiplied.
            parameter.copy_(
                1 + drawn(*rows, scale=0.1) if len(rows) == 1 else drawn(*rows, scale=rows[-1] ** -0.5)
            )
    block.to(torch.bfloat16)
    requested = dict.fromkeys(LEVELS["all"] - {"qkv_product", "gate_up_product"}, fused)
    selection = Selection(requested={**requested, "linear": "transposed_gradient"})
    for module in block.modules():
        if isinstance(module, UsesOperators):
            module.take_operators(selection)
    x = drawn(sizes.tokens, hidden).bfloat16().requires_grad_()
    upstream = drawn(sizes.tokens, hidden).bfloat16()
    layout = DocumentLayout(torch.tensor([0, sizes.tokens], dtype=torch.int32))
    turn = rotation(model, torch.arange(sizes.tokens), torch.bfloat16)
    weights = dict(block.named_parameters())
    leaves = [x, *weights.values()]
    plain = _PlainLayer(weights, sizes, turn.cosine, turn.sine, model.norm_epsilon, peer)

    def side(forward: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        def once() -> Any:
            out = forward()
            return (out.detach(), *torch.autograd.grad(out, leaves, upstream))

        return once

    return Sides(
        name=f"Llama layer, {hidden} features, {sizes.between} between, bfloat16",
        ours=side(lambda: block(x, layout, turn)),
        theirs=side(lambda: plain(x)),
        target=TARGETS[peer] if sizes == LayerSizes() else 0.0,
        note=f"forward and backward of one document of {sizes.tokens} tokens, {sizes.heads} heads of {sizes.width}",
        peer=IN_WORDS[peer],
    )


class _PlainLayer:
    """The layer in operators of torch. ``cosine`` and ``sine`` are (T, 1, width / 2)."""

    def __init__(
        self,
        weights: Mapping[str, Any],
        sizes: LayerSizes,
        cosine: Any,
        sine: Any,
        epsilon: float,
        peer: Peer,
    ) -> None:
        import torch

        self.weights, self.sizes, self.epsilon, self.peer = weights, sizes, epsilon, peer
        self.cosine, self.sine = (torch.cat([angles, angles], dim=-1) for angles in (cosine, sine))
        self.later = torch.ones(sizes.tokens, sizes.tokens, dtype=torch.bool).triu(1)

    def __call__(self, x: Any) -> Any:
        import torch.nn.functional as F

        normed = self._norm(x, "attention_norm")
        q, k, v = (
            self._linear(normed, f"attention.{name}").unflatten(1, (-1, self.sizes.width))
            for name in ("query", "key", "value")
        )
        attended = self._attend(*(one.transpose(0, 1) for one in (self._turned(q), self._turned(k), v)))
        x = x + self._linear(attended.transpose(0, 1).flatten(1), "attention.output")
        normed = self._norm(x, "mlp_norm")
        gated = F.silu(self._linear(normed, "mlp.gate")) * self._linear(normed, "mlp.up")
        return x + self._linear(gated, "mlp.down")

    def _linear(self, x: Any, name: str) -> Any:
        import torch.nn.functional as F

        return F.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, x: Any, name: str) -> Any:
        import torch
        import torch.nn.functional as F

        weight = self.weights[f"{name}.weight"]
        if self.peer == "sdpa":
            return F.rms_norm(x, weight.shape, weight, self.epsilon)
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)).to(x.dtype) * weight

    def _turned(self, x: Any) -> Any:
        import torch

        first, second = x.chunk(2, dim=-1)
        return x * self.cosine + torch.cat((-second, first), dim=-1) * self.sine

    def _attend(self, q: Any, k: Any, v: Any) -> Any:
        """(heads, T, width) each."""
        import torch.nn.functional as F

        if self.peer == "sdpa":
            return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        scores = q @ k.transpose(1, 2) * self.sizes.width**-0.5
        weights = scores.masked_fill(self.later, float("-inf")).float().softmax(-1).to(q.dtype)
        return weights @ v
