"""Causal self-attention that never crosses a document border: document by document, each whole.

Torch's SDPA, as the operator's backend ``eager`` calls it, everywhere but in bf16 on CPUs where plain products were
measured to be faster; or the operator ``attention``, where a run asks for it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn

from drivetrain.config.model import ModelConfig
from drivetrain.engine.model.dropout import AttentionFactors
from drivetrain.engine.model.linear import JointProducts, Linear
from drivetrain.engine.model.norm import make_norm
from drivetrain.engine.model.operators import UsesOperators, several, single
from drivetrain.engine.model.rotary import Rotation, rotate
from drivetrain.engine.ops import attention as attention_operator
from drivetrain.engine.ops import qkv_product, rotary
from drivetrain.engine.ops.attention import eager
from drivetrain.engine.ops.attention.mask import CAUSAL, Documents, Dropout, Mask, Span
from drivetrain.engine.ops.attention.products import attention_by_products, pays
from drivetrain.engine.ops.selection import Selection

__all__ = ["Attention", "DocumentLayout", "attend"]


class DocumentLayout:
    """Where documents lie among the T tokens, as runs of neighbours of equal length.

    A run of n documents of length L is a reshape of n x L neighbouring tokens and one call: whole
    sequences cost one call per layer, whatever the batch size.

    Attributes:
        runs: (number of documents, length of each), in token order.

    Deliberately a plain class and not a tuple: torch.compile guards on the contents of tuples, and would
    compile each block again for every new packing.
    """

    def __init__(self, cu_seqlens: Tensor) -> None:
        borders: Sequence[int] = cu_seqlens.tolist()
        lengths = [last - first for first, last in pairwise(borders)]
        self.runs = [(len(list(run)), length) for length, run in groupby(lengths)]
        self._cu_seqlens = cu_seqlens

    @cached_property
    def mask(self) -> Mask:
        """The same as the operator ``attention`` reads it."""
        return Mask(documents=Documents(self._cu_seqlens))


def attend_run(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    documents: int,
    dropout: float,
    factors: AttentionFactors | None = None,
) -> Tensor:
    """Causal attention inside each of ``documents`` equally long documents; returns (T, H, K)."""
    if dropout == 0.0 and pays(q_THK, documents):
        return attention_by_products(q_THK, k_TGK, v_TGK, documents)
    if dropout > 0.0 and factors is not None:
        q, k, v = (x.reshape(documents, -1, *x.shape[1:]).transpose(1, 2) for x in (q_THK, k_TGK, v_TGK))
        out = _weighted_by(q, k, v, factors(q_THK, documents))
        return out.transpose(1, 2).flatten(0, 1)
    length = q_THK.shape[0] // documents
    spans = [
        Span(first, first + length, first, first + length, prefix=0)
        for first in range(0, q_THK.shape[0], length)
    ]
    mask = CAUSAL if dropout == 0.0 else Mask(dropout=Dropout(dropout))
    # As torch computes its own default, to the bit.
    scale = 1.0 / math.sqrt(q_THK.shape[-1])
    return eager.run(q_THK, k_TGK, v_TGK, spans, mask, scale)


def _weighted_by(q_NHLK: Tensor, k_NGLK: Tensor, v_NGLK: Tensor, factors_NHLL: Tensor) -> Tensor:
    """Causal attention whose weights are multiplied by ``factors_NHLL`` after the softmax: (N, H, L, K)."""
    heads_per_group = q_NHLK.shape[1] // k_NGLK.shape[1]
    k_NHLK, v_NHLK = (x.repeat_interleave(heads_per_group, dim=1) for x in (k_NGLK, v_NGLK))
    scores_NHLL = (q_NHLK * q_NHLK.shape[-1] ** -0.5) @ k_NHLK.transpose(-2, -1)
    later_LL = torch.ones(scores_NHLL.shape[-2:], dtype=torch.bool, device=q_NHLK.device).triu(1)
    weights_NHLL = scores_NHLL.masked_fill(later_LL, float("-inf")).softmax(dim=-1)
    out_NHLK: Tensor = (weights_NHLL * factors_NHLL) @ v_NHLK
    return out_NHLK


# Compiled blocks break their graph here, so that a new packing of documents compiles nothing anew.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    layout: DocumentLayout,
    dropout: float,
    factors: AttentionFactors | None = None,
    serving: Selection | None = None,
) -> Tensor:
    """Causal attention of each query to its own document, scaled by 1/sqrt(K).

    Args:
        q_THK: queries, (T, H, K).
        k_TGK, v_TGK: keys and values, (T, G, K), of the queries' dtype; head h reads group h // (H / G).
        layout: document borders.
        dropout: probability that an attention weight is dropped.
        factors: draws which are; None leaves it to torch.
        serving: computes it instead.

    Returns:
        (T, H, K) in the queries' dtype.
    """
    if serving is not None:
        assert factors is None, "an operator draws its own dropout"
        mask = layout.mask if dropout == 0.0 else replace(layout.mask, dropout=Dropout(dropout))
        return single(serving.call(attention_operator.OPERATOR, q=q_THK, k=k_TGK, v=v_TGK, mask=mask))
    if len(layout.runs) == 1:
        return attend_run(q_THK, k_TGK, v_TGK, layout.runs[0][0], dropout, factors)
    # split, not slices: its backward is one concatenation instead of a zero-filled tensor per document.
    tokens = [documents * length for documents, length in layout.runs]
    queries, keys, values = (torch.split(x, tokens) for x in (q_THK, k_TGK, v_TGK))
    pieces = zip(queries, keys, values, layout.runs, strict=True)
    return torch.cat([attend_run(q, k, v, documents, dropout, factors) for q, k, v, (documents, _) in pieces])


class Attention(UsesOperators, nn.Module):
    """What lies around ``attend``: projections, optional norm of queries and keys, rotary embedding.

    The block calls ``project``, ``attend`` and ``output`` itself. With ``attend`` one call deeper its graph
    break would cut a compiled block into four graphs instead of two.

    Query, key and value are separate matrices: one packed matrix was no faster (4.94 ms against three of
    1.64 ms at T = 4096, D = 320, bf16), and separate ones carry over to other formats as they are.

    Attributes:
        joint_products: computes queries, keys and values of the input where it is not for the matrices alone to do.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        heads, groups, width = model.num_attention_heads, model.query_groups, model.head_size
        bias = model.add_bias_linear
        self.head_size = width
        self.joint_products: JointProducts | None = None
        self.query = Linear(model.hidden_size, heads * width, bias=bias)
        self.key = Linear(model.hidden_size, groups * width, bias=bias)
        self.value = Linear(model.hidden_size, groups * width, bias=bias)
        self.output = Linear(heads * width, model.hidden_size, bias=bias)
        self.query_norm = make_norm(model, width) if model.qk_layernorm else None
        self.key_norm = make_norm(model, width) if model.qk_layernorm else None

    def project(self, x_TD: Tensor, turn: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (T, H, K), keys and values (T, G, K); ``turn`` is absent in models with learned positions."""
        q_THK, k_TGK, v_TGK = (
            features.unflatten(-1, (-1, self.head_size)) for features in self._queries_keys_values(x_TD)
        )
        if self.query_norm is not None and self.key_norm is not None:
            q_THK, k_TGK = self.query_norm(q_THK), self.key_norm(k_TGK)
        if turn is not None:
            q_THK, k_TGK = self._turned(q_THK, turn), self._turned(k_TGK, turn)
        return q_THK, k_TGK, v_TGK

    def _queries_keys_values(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        if self.joint_products is not None:
            return self.joint_products(x_TD)
        matrices = (self.query, self.key, self.value)
        serving = self.serving("qkv_product")
        # Keys and values that several tensor-parallel ranks hold alike are no plain matrices.
        if serving is None or not all(type(one) is Linear and one.bias is None for one in matrices):
            return tuple(one(x_TD) for one in matrices)
        query, key, value = (one.weight.to(x_TD.dtype) for one in matrices)
        return several(serving.call(qkv_product.OPERATOR, x=x_TD, query=query, key=key, value=value))

    def _turned(self, x_THK: Tensor, turn: Rotation) -> Tensor:
        if (serving := self.serving("rotary")) is None:
            return rotate(x_THK, turn)
        cosine, sine = (angles.squeeze(1) for angles in turn)
        return single(serving.call(rotary.OPERATOR, x=x_THK, cosine=cosine, sine=sine))
