"""The only FLOP counter: model and hardware FLOPs of a number of tokens, from shapes.

The rule, which every figure of ours carries as ``FLOPS_RULE``:

* A matrix product of (m, k) and (k, n) is 2*m*k*n FLOPs. Counted are the query, key, value and output
  projections, the MLP, the logits, and both products of attention (queries with keys, probabilities with
  values). An embedding lookup is no product: 0. Norms, rotary embedding, softmax, activations, biases,
  dropout, the loss and the optimizer: 0, as in every published figure.
* Backward is twice forward, so a step is 3 x forward.
* Attention is counted per document. Causal attention is exactly half of the square of a document's
  length (L^2/2 query-key pairs): a kernel need compute no more, up to the diagonal's other half.
* Recomputation is not model work. It is in hardware FLOPs only.

Formulas: Narayanan et al. (arXiv 2104.04473, appendix) from real shapes instead of 4h; PaLM (arXiv
2204.02311, appendix B) for MFU against HFU.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from drivetrain.errors import DrivetrainError
from drivetrain.measure.parameters import parameter_count

if TYPE_CHECKING:  # The schema costs more to import than an account from the cache takes.
    from drivetrain.config.model import ModelConfig

__all__ = [
    "FLOPS_RULE",
    "HARDWARE_FLOPS_RULE",
    "FlopCount",
    "Recompute",
    "RepeatedLayers",
    "attention_pairs",
    "forward_flops",
    "hardware_flops",
    "matrix_product_flops",
    "model_flops",
]

FLOPS_RULE = "matmul + attention, causal half, per document, no recompute"
HARDWARE_FLOPS_RULE = "matmul + attention, causal half, per document, recompute counted"

Recompute = Literal["none", "selective", "full"]
"""What is computed a second time in backward: nothing, the attention core, or every block."""


@dataclass(frozen=True, slots=True)
class RepeatedLayers:
    """Numbers of layers whose products a run computes a second time in backward, in the whole model.

    The last product of a layer is not among those of ``whole``, ``attention`` and ``mlp``: backward needs what enters
    it, and what leaves it nobody. Where it is repeated all the same it counts in ``last_products``.
    """

    whole: int = 0
    """Layers that are repeated from their input on."""
    attention: int = 0
    """Other layers that repeat the attention core."""
    mlp: int = 0
    """Other layers that repeat the MLP."""
    last_products: int = 0
    """Layers that repeat the product with the MLP's last matrix as well."""

    def plus(self, other: "RepeatedLayers") -> "RepeatedLayers":
        """The sum, kind by kind."""
        return RepeatedLayers(
            self.whole + other.whole,
            self.attention + other.attention,
            self.mlp + other.mlp,
            self.last_products + other.last_products,
        )


@dataclass(frozen=True, slots=True)
class FlopCount:
    """FLOPs by kind. ``total`` is their sum; all are exact whole numbers."""

    matmul: int
    """Projections and MLP of all layers."""
    attention: int
    """Queries with keys, and probabilities with values."""
    logits: int
    """The output matrix."""

    @property
    def total(self) -> int:
        """All FLOPs."""
        return self.matmul + self.attention + self.logits

    def times(self, factor: int) -> "FlopCount":
        """Each kind multiplied by `factor`."""
        return FlopCount(self.matmul * factor, self.attention * factor, self.logits * factor)

    def plus(self, other: "FlopCount") -> "FlopCount":
        """The sum, kind by kind."""
        return FlopCount(
            self.matmul + other.matmul, self.attention + other.attention, self.logits + other.logits
        )


def matrix_product_flops(batch: int, m: int, n: int, k: int) -> int:
    """Multiplications and additions of ``batch`` products of (m, k) and (k, n) matrices: 2 * batch * m * n * k."""
    return 2 * batch * m * n * k


def attention_pairs(lengths: Iterable[int], causal: bool = True, window: int | None = None) -> float:
    """Query-key pairs of documents of these lengths (tokens), in one attention head.

    * not causal: L^2; with a window each query sees min(L, window) keys
    * causal: L^2/2
    * causal with a window of w keys, the own one among them: the first w queries are a triangle of w^2/2
      pairs, each later one sees w keys: w*L - w^2/2. It equals L^2/2 at w = L. (Sum over positions of
      min(i, w) is this plus w/2: the triangle's diagonal is counted half, as without a window.)
    """
    return _doubled_pairs(lengths, causal, window) / 2


def _doubled_pairs(lengths: Iterable[int], causal: bool, window: int | None) -> int:
    """Twice the number of pairs, so that halves stay whole numbers."""
    if window is not None and window < 1:
        raise DrivetrainError(
            f"an attention window of {window} tokens: it must hold at least the token itself"
        )
    doubled = 0
    for length in lengths:
        reach = length if window is None else min(window, length)
        doubled += 2 * reach * length - (reach * reach if causal else 0)
    return doubled


def forward_flops(
    model: "ModelConfig",
    *,
    tokens: int,
    sum_squared_lengths: int,
    causal: bool = True,
    window_size: int | None = None,
    lengths: Sequence[int] | None = None,
) -> FlopCount:
    """FLOPs of one forward pass over `tokens` tokens.

    Args:
        model: shapes.
        tokens: tokens processed, padding included.
        sum_squared_lengths: sum over documents of length^2 (a batch of B full sequences: B * S * S).
        causal: half of the square; False counts the whole square, as a counter of executed products does.
        window_size: keys each query sees, its own among them. Needs `lengths`: the sum of squares does not
            tell how many queries are nearer to the start of their document than the window.
        lengths: length of each document; must agree with the two sums.

    Raises:
        DrivetrainError: a window without `lengths`.
    """
    if window_size is None:
        assert lengths is None or sum(n * n for n in lengths) == sum_squared_lengths
        doubled = sum_squared_lengths * (1 if causal else 2)
    elif lengths is None:
        raise DrivetrainError("FLOPs of sliding-window attention need the length of each document")
    else:
        assert sum(lengths) == tokens
        doubled = _doubled_pairs(lengths, causal, window_size)
    parameters = parameter_count(model)
    # Two products of 2 FLOPs per pair, head and channel: 4 x pairs, 2 x doubled pairs.
    attention = 2 * doubled * model.num_layers * model.num_attention_heads * model.head_size
    return FlopCount(
        matmul=2 * tokens * parameters.block_matrices,
        attention=attention,
        logits=2 * tokens * parameters.output_product,
    )


def model_flops(
    model: "ModelConfig",
    *,
    tokens: int,
    sum_squared_lengths: int,
    causal: bool = True,
    window_size: int | None = None,
    lengths: Sequence[int] | None = None,
) -> FlopCount:
    """FLOPs of forward and backward (3 x forward), nothing recomputed. Arguments as for `forward_flops`."""
    return forward_flops(
        model,
        tokens=tokens,
        sum_squared_lengths=sum_squared_lengths,
        causal=causal,
        window_size=window_size,
        lengths=lengths,
    ).times(3)


def hardware_flops(
    model: "ModelConfig",
    *,
    tokens: int,
    sum_squared_lengths: int,
    recompute: Recompute | RepeatedLayers,
    causal: bool = True,
    window_size: int | None = None,
    lengths: Sequence[int] | None = None,
) -> FlopCount:
    """Model FLOPs and the forward work that is done twice. Other arguments as for `forward_flops`.

    ``selective`` repeats the attention core of every layer (Korthikanti et al., arXiv 2205.05198);
    ``full`` repeats every block. The logits are outside the blocks and never repeated. What a fused
    attention kernel repeats inside its own backward is the kernel's affair and not counted. A run of ours says
    layer by layer what it repeats.
    """
    forward = forward_flops(
        model,
        tokens=tokens,
        sum_squared_lengths=sum_squared_lengths,
        causal=causal,
        window_size=window_size,
        lengths=lengths,
    )
    if isinstance(recompute, RepeatedLayers):
        return forward.times(3).plus(_repeated(model, forward, tokens, recompute))
    repeated = {
        "none": FlopCount(0, 0, 0),
        "selective": FlopCount(0, forward.attention, 0),
        "full": FlopCount(forward.matmul, forward.attention, 0),
    }[recompute]
    return forward.times(3).plus(repeated)


def _repeated(model: "ModelConfig", forward: FlopCount, tokens: int, layers: RepeatedLayers) -> FlopCount:
    last = matrix_product_flops(1, tokens, model.hidden_size, model.ffn_size)
    of_layer = forward.matmul // model.num_layers
    entering = last * (2 if model.activation_func == "swiglu" else 1)
    return FlopCount(
        matmul=layers.whole * (of_layer - last) + layers.mlp * entering + layers.last_products * last,
        attention=(layers.whole + layers.attention) * (forward.attention // model.num_layers),
        logits=0,
    )
