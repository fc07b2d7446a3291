"""The mapping of masks to Transformer Engine and to Ascend, against stand-ins that take what those document.

Nothing here says that a library was run.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from stand_in import install
from torch import Tensor

from drivetrain.engine.ops.attention import (
    CAUSAL,
    FULL,
    OPERATOR,
    Documents,
    Dropout,
    Mask,
    npu,
    transformer_engine,
)
from drivetrain.engine.ops.attention.cases import KINDS, alibi_slopes
from drivetrain.engine.ops.numerics import Upstream, grade
from drivetrain.engine.ops.operator import Backend, Case
from drivetrain.engine.ops.signature import Signature, signature_of
from drivetrain.errors import DrivetrainError

Calls = list[dict[str, Any]]
RULES: dict[str, Callable[[Signature], str | None]] = {
    "transformer_engine": transformer_engine.rule,
    "npu": npu.rule,
}
DTYPES = {
    "transformer_engine": (torch.bfloat16, torch.float16),
    "npu": (torch.bfloat16, torch.float32, torch.float16),
}
LAYOUTS: tuple[Upstream, ...] = ("dense", "expanded", "transposed")


def _document(
    q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None, bias: Tensor | float = 0.0
) -> Tensor:
    """(L, H, K) of one document in fp32; ``hidden`` is True where a key is not seen."""
    heads_per_group = q.shape[1] // k.shape[1]
    keys, values = (one.float().repeat_interleave(heads_per_group, 1).transpose(0, 1) for one in (k, v))
    scores = scale * (q.float().transpose(0, 1) @ keys.transpose(1, 2)) + bias
    if hidden is not None:
        assert not hidden.all(-1).any(), "a query that sees no key"
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)


class _DotProductAttention:
    """``transformer_engine.pytorch.DotProductAttention`` of 2.18 for packed documents, without its dropout."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        assert qkv_format == "thd"
        assert softmax_scale is not None
        self.heads, self.width, self.groups = num_attention_heads, kv_channels, num_gqa_groups
        self.scale, self.dropout = softmax_scale, attention_dropout

    def __call__(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
    ) -> Tensor:
        assert query_layer.shape[1:] == (self.heads, self.width)
        assert key_layer.shape[1:] == value_layer.shape[1:] == (self.groups, self.width)
        assert query_layer.dtype in (torch.float16, torch.bfloat16)
        assert attn_mask_type is not None
        assert "padding" in attn_mask_type, "packed documents"
        causal = "causal" in attn_mask_type
        assert window_size is not None
        left, right = window_size
        assert (right == 0 and left >= -1) if causal else (left, right) == (-1, -1)
        for borders, x, longest in (
            (cu_seqlens_q, query_layer, max_seqlen_q),
            (cu_seqlens_kv, key_layer, max_seqlen_kv),
        ):
            assert borders is not None
            assert borders.dtype == torch.int32
            assert borders.device == x.device
            assert borders[0] == 0
            assert borders[-1] == len(x)
            assert longest == int(borders.diff().max())
        if core_attention_bias_type == "alibi":
            assert alibi_slopes is not None
            assert alibi_slopes.dtype == torch.float32
            assert alibi_slopes.shape == (self.heads,)
        else:
            assert core_attention_bias_type == "no_bias"
            assert alibi_slopes is None
        assert cu_seqlens_q is not None
        assert cu_seqlens_kv is not None
        outs = []
        ends = zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_kv[:-1], cu_seqlens_kv[1:], strict=True)
        for first_q, last_q, first_k, last_k in ends:
            queries, keys = int(last_q - first_q), int(last_k - first_k)
            shift = keys - queries
            apart = torch.arange(queries)[:, None] - torch.arange(keys)
            # Aligned top left, unless its name says otherwise; ALiBi bottom right.
            distance = apart + shift if "bottom_right" in attn_mask_type else apart
            hidden = None
            if causal:
                hidden = (distance < 0) | ((distance > left) if left >= 0 else False)
            bias: Tensor | float = 0.0
            if alibi_slopes is not None:
                bias = -alibi_slopes[:, None, None] * (apart + shift)
            documents = (query_layer[first_q:last_q], key_layer[first_k:last_k], value_layer[first_k:last_k])
            outs.append(_document(*documents, self.scale, hidden, bias))
        # Heads side by side.
        return torch.cat(outs).reshape(len(query_layer), -1)


def _npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, None, None, None, int, int, int]:
    """``torch_npu.npu_fusion_attention`` of op-plugin 517f2e7 for packed documents, without dropout."""
    assert input_layout == "TND"
    assert head_num == query.shape[1] <= 256
    assert query.shape[2] <= 768
    assert query.dtype == key.dtype == value.dtype
    assert query.is_contiguous()
    assert key.is_contiguous()
    assert value.is_contiguous()
    assert pse is None
    assert prefix is None
    assert 0.0 < keep_prob <= 1.0
    assert isinstance(actual_seq_qlen, list)
    assert isinstance(actual_seq_kvlen, list)
    assert len(actual_seq_qlen) == len(actual_seq_kvlen)
    assert actual_seq_qlen[-1] == len(query)
    assert actual_seq_kvlen[-1] == len(key)
    if atten_mask is not None:
        assert sparse_mode in (2, 3, 4)
        assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1)), "True is hidden"
    outs = []
    borders = (
        [0, *actual_seq_qlen],
        actual_seq_qlen,
        [0, *actual_seq_kvlen],
        actual_seq_kvlen,
    )
    for first_q, last_q, first_k, last_k in zip(*borders, strict=False):
        queries, keys = last_q - first_q, last_k - first_k
        assert not (queries and not keys)
        apart = torch.arange(queries)[:, None] - torch.arange(keys)
        hidden = None
        # Without a mask its mode is not looked at.
        if atten_mask is not None and sparse_mode == 2:
            hidden = apart < 0
        elif atten_mask is not None and sparse_mode == 3:
            hidden = apart + keys - queries < 0
        elif atten_mask is not None:
            hidden = (apart + keys - queries < -next_tockens) | (apart + keys - queries > pre_tockens)
        documents = (query[first_q:last_q], key[first_k:last_k], value[first_k:last_k])
        outs.append(_document(*documents, scale, hidden))
    return torch.cat(outs), None, None, None, 0, 0, 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Arguments of each call of either library, by name."""
    seen: Calls = []

    class Recorded(_DotProductAttention):
        def __call__(self, *given: Any, **named: Any) -> Tensor:
            bound = inspect.signature(_DotProductAttention.__call__).bind(self, *given, **named)
            seen.append({**bound.arguments, **vars(self)})
            return super().__call__(*given, **named)

    def recorded(*given: Any, **named: Any) -> Any:
        seen.append(inspect.signature(_npu_fusion_attention).bind(*given, **named).arguments)
        return _npu_fusion_attention(*given, **named)

    install(
        monkeypatch,
        {
            "transformer_engine": {},
            "transformer_engine.pytorch": {"DotProductAttention": Recorded},
            "torch_npu": {"npu_fusion_attention": recorded},
        },
    )
    # Modules are kept, and others' stand-ins would be among them.
    transformer_engine.module_of.cache_clear()
    yield seen
    transformer_engine.module_of.cache_clear()


def _backend(name: str) -> Backend:
    backend = OPERATOR.backend(name)
    assert backend is not None
    return backend


SHAPES = {
    "two tokens",
    "a tail of no document",
    "window of the length",
    "8 heads, 1 groups",
    "width 96",
    "scale",
    "large scores",
    "heads before tokens in memory",
    "features with gaps",
}


def _graded(name: str, cases: Iterable[Case], dtypes: Sequence[torch.dtype]) -> tuple[set[str], list[str]]:
    """Names of the cases that are served, each in one of the dtypes in turn, and what is wrong with them."""
    anywhere = replace(_backend(name), supports=RULES[name])
    problems, served = [], set()
    for number, case in enumerate(cases):
        dtype = dtypes[number % len(dtypes)]
        found = grade(OPERATOR, anywhere, case, dtype, upstream=LAYOUTS[number // 3 % 3])
        problems += [f"{case.name}, {dtype}: {problem}" for problem in found.problems]
        if found.refused is None:
            served.add(case.name)
    return served, problems


@pytest.mark.parametrize("name", RULES)
def test_the_mapping_is_as_near_to_float64_as_the_dense_softmax(name: str, calls: Calls) -> None:
    cases = [case for case in OPERATOR.cases() if case.name in KINDS or case.name in SHAPES]
    served, problems = _graded(name, cases, DTYPES[name])
    assert problems == []
    assert served >= SHAPES | {"causal", "full", "window", "window + documents", "cross lengths, top left"}
    assert ("alibi + documents" in served) == (name == "transformer_engine")
    refused = {"prefix", "dropout, seeded", "cross lengths, bottom right", "documents without keys"}
    assert refused.isdisjoint(served)
    assert calls


@pytest.mark.long
@pytest.mark.parametrize("name", RULES)
def test_the_mapping_passes_the_whole_grid(name: str, calls: Calls) -> None:
    for dtype in DTYPES[name]:
        assert _graded(name, OPERATOR.cases(), [dtype])[1] == []


def _call(name: str, mask: Mask, scale: float | None = None, tokens: int = 100) -> Tensor:
    q, k, v = (torch.randn(tokens, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
    out = _backend(name).call(q, k, v, mask, scale)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize(
    ("mask", "arguments"),
    [
        (CAUSAL, {"attn_mask_type": "padding_causal", "window_size": (-1, 0)}),
        (FULL, {"attn_mask_type": "padding", "window_size": (-1, -1)}),
        (Mask(window=1), {"attn_mask_type": "padding_causal", "window_size": (0, 0)}),
        (Mask(window=17), {"window_size": (16, 0)}),
        (Mask(dropout=Dropout(0.1)), {"dropout": 0.1}),
        (Mask(slopes=alibi_slopes(4)), {"core_attention_bias_type": "alibi"}),
        (Mask(documents=Documents.of_lengths([60, 0, 40])), {"max_seqlen_q": 60, "max_seqlen_kv": 60}),
    ],
    ids=str,
)
def test_transformer_engine_is_told_the_mask(mask: Mask, arguments: dict[str, Any], calls: Calls) -> None:
    _call("transformer_engine", mask)
    assert {name: calls[0][name] for name in arguments} == arguments
    assert calls[0]["scale"] == 0.25


@pytest.mark.parametrize(
    ("mask", "arguments"),
    [
        (CAUSAL, {"sparse_mode": 2, "next_tockens": 0, "keep_prob": 1.0, "actual_seq_qlen": [100]}),
        (FULL, {"sparse_mode": 0, "atten_mask": None, "next_tockens": 2147483647}),
        (Mask(window=17), {"sparse_mode": 4, "pre_tockens": 16, "next_tockens": 0}),
        (Mask(dropout=Dropout(0.25)), {"keep_prob": 0.75}),
        (Mask(documents=Documents.of_lengths([60, 0, 40])), {"actual_seq_qlen": [60, 100]}),
    ],
    ids=str,
)
def test_ascend_is_told_the_mask(mask: Mask, arguments: dict[str, Any], calls: Calls) -> None:
    _call("npu", mask)
    assert {name: calls[0][name] for name in arguments} == arguments
    assert calls[0]["scale"] == 0.25


@pytest.mark.parametrize("name", RULES)
def test_a_scale_is_passed_on(name: str, calls: Calls) -> None:
    _call(name, CAUSAL, scale=0.5)
    assert calls[0]["scale"] == 0.5


@pytest.mark.parametrize("name", RULES)
def test_tokens_of_no_document_are_zero_and_get_zero_gradients(name: str, calls: Calls) -> None:
    given = [torch.randn(50, heads, 16, dtype=torch.bfloat16).requires_grad_() for heads in (4, 2, 2)]
    with torch.no_grad():
        for one in given:
            one[40:] = float("nan")
    out = _backend(name).call(*given, Mask(documents=Documents([0, 40])))
    assert isinstance(out, Tensor)
    assert not out[40:].any()
    for gradient in torch.autograd.grad(out.sum(), given):
        assert not gradient[40:].any()
        assert gradient[:40].isfinite().all()


@pytest.mark.parametrize("name", RULES)
def test_without_any_document_the_library_is_not_called(name: str, calls: Calls) -> None:
    assert not _call(name, Mask(documents=Documents([0, 0])), tokens=5).any()
    assert not calls


def test_more_documents_than_ascend_takes_are_refused(calls: Calls) -> None:
    with pytest.raises(DrivetrainError, match=r"takes 1,024 documents; the call has 1,025"):
        _call("npu", Mask(documents=Documents.of_lengths([1] * 1025)), tokens=1025)


@pytest.mark.parametrize(
    ("name", "tokens", "heads", "width", "said"),
    [
        ("transformer_engine", 10, 4, 264, "heads are 264 wide"),
        ("transformer_engine", 10, 4, 20, "heads are 20 wide"),
        ("npu", 10, 4, 776, "heads are 776 wide"),
        ("npu", 10, 257, 16, "257 heads"),
        ("npu", 1_000_001, 1, 16, "1,000,001 tokens"),
    ],
)
def test_shapes_that_are_not_documented_are_refused(
    name: str, tokens: int, heads: int, width: int, said: str
) -> None:
    x = torch.empty(tokens, heads, width, dtype=torch.bfloat16, device="meta")
    why = RULES[name](signature_of("attention", {"q": x, "k": x, "v": x}))
    assert why is not None
    assert said in why
