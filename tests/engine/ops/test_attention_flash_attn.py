"""The mapping to flash-attn: names, dtypes and conventions of its arguments, against a stand-in that knows only those.

The stand-in computes what version 2.8.3 documents, pair by pair; nothing here says that the library itself was run.
"""

import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from drivetrain.engine.ops.attention import CAUSAL, FULL, OPERATOR, Documents, Dropout, Mask
from drivetrain.engine.ops.attention.cases import KINDS, alibi_slopes
from drivetrain.engine.ops.attention.docs import RULES, crosses_of


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """``flash_attn_varlen_func`` of 2.8.3 by its documentation, in fp32, without dropout."""
    for borders, x, longest in ((cu_seqlens_q, q, max_seqlen_q), (cu_seqlens_k, k, max_seqlen_k)):
        assert borders.dtype == torch.int32
        assert borders.dim() == 1
        assert borders.is_contiguous()
        assert borders.device == x.device
        assert borders[0] == 0
        assert borders[-1] == len(x), "tokens behind the last border are left as memory was found"
        assert (borders.diff() >= 0).all()
        assert longest == int(borders.diff().max())
    assert len(cu_seqlens_q) == len(cu_seqlens_k)
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert q.shape[1] % k.shape[1] == 0
    assert q.shape[2] <= 256
    assert softmax_scale is not None
    assert isinstance(softcap, float)
    assert isinstance(dropout_p, float)
    assert not (softcap > 0.0 and dropout_p > 0.0), "the library refuses both"
    assert deterministic
    assert not return_attn_probs
    assert block_table is None
    if alibi_slopes is not None:
        assert alibi_slopes.dtype == torch.float32
        assert alibi_slopes.shape == (q.shape[1],)
        assert alibi_slopes.device == q.device
        assert not alibi_slopes.requires_grad
    left, right = window_size
    if causal:
        right = 0
    outs = []
    for first_q, last_q, first_k, last_k in zip(
        cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True
    ):
        queries = q[first_q:last_q].float().transpose(0, 1)
        groups = q.shape[1] // k.shape[1]
        keys, values = (
            x[first_k:last_k].float().repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v)
        )
        scores = queries @ keys.transpose(1, 2) * softmax_scale
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        shift = keys.shape[1] - queries.shape[1]
        apart = torch.arange(queries.shape[1])[:, None] + shift - torch.arange(keys.shape[1])
        if alibi_slopes is not None:
            scores = scores - alibi_slopes[:, None, None] * apart.abs()
        hidden = torch.zeros_like(apart, dtype=torch.bool)
        if right >= 0:
            hidden |= -apart > right
        if left >= 0:
            hidden |= apart > left
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0)
        outs.append((weights @ values).transpose(0, 1))
    return torch.cat(outs).to(q.dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The arguments of each call, by the names of the recorded signature, defaults included."""
    seen: list[dict[str, object]] = []

    def flash_attn_varlen_func(*given: object, **named: object) -> Tensor:
        bound = inspect.signature(_varlen).bind(*given, **named)
        bound.apply_defaults()
        seen.append(bound.arguments)
        dropout = bound.arguments["dropout_p"]
        assert isinstance(dropout, float)
        return _varlen(*bound.args)

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return seen


def _drawn(mask: Mask, tail: int = 0, dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
    queries = keys = 100
    if mask.documents is not None:
        queries, keys = (
            int(mask.documents.cu_seqlens_q[-1]) + tail,
            int(mask.documents.cu_seqlens_k[-1]) + tail,
        )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((queries, 4, 16), (keys, 2, 16), (keys, 2, 16))
    )
    return SimpleNamespace(q=q, k=k, v=v, mask=mask)


def _call(given: SimpleNamespace, scale: float | None = None) -> Tensor:
    backend = OPERATOR.backend("flash_attn")
    assert backend is not None
    out = backend.call(given.q, given.k, given.v, given.mask, scale)
    assert isinstance(out, Tensor)
    return out


SERVED = [kind for kind, mask in KINDS.items() if RULES["flash_attn"](mask, crosses_of(mask)) is None]


def test_most_kinds_are_served() -> None:
    assert {"causal", "full", "window", "documents", "alibi", "soft-cap", "dropout"} <= set(SERVED)
    assert {"prefix", "dropout, seeded", "cross lengths, top left"}.isdisjoint(SERVED)


@pytest.mark.parametrize("kind", [kind for kind in SERVED if kind != "dropout"])
def test_what_it_documents_is_what_the_mask_says(kind: str, calls: list[dict[str, object]]) -> None:
    given = _drawn(KINDS[kind])
    exact = OPERATOR.reference(given.q.double(), given.k.double(), given.v.double(), given.mask)
    torch.testing.assert_close(_call(given).double(), exact, rtol=0.02, atol=0.01)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("mask", "arguments"),
    [
        (
            CAUSAL,
            {"causal": True, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None, "dropout_p": 0.0},
        ),
        (FULL, {"causal": False, "window_size": (-1, -1)}),
        (Mask(window=1), {"causal": True, "window_size": (0, 0)}),
        (Mask(window=17), {"causal": True, "window_size": (16, 0)}),
        (Mask(softcap=30.0), {"softcap": 30.0}),
        (Mask(dropout=Dropout(0.1)), {"dropout_p": 0.1}),
        (Mask(documents=Documents.of_lengths([60, 0, 40])), {"max_seqlen_q": 60, "max_seqlen_k": 60}),
    ],
    ids=str,
)
def test_arguments_are_those_of_the_recorded_signature(
    mask: Mask, arguments: dict[str, object], calls: list[dict[str, object]]
) -> None:
    _call(_drawn(mask))
    assert {name: calls[0][name] for name in arguments} == arguments
    assert calls[0]["softmax_scale"] == 0.25


def test_scale_and_slopes_are_passed_on(calls: list[dict[str, object]]) -> None:
    slopes = alibi_slopes(4).double()
    _call(_drawn(Mask(slopes=slopes)), scale=0.5)
    assert calls[0]["softmax_scale"] == 0.5
    passed = calls[0]["alibi_slopes"]
    assert isinstance(passed, Tensor)
    assert torch.equal(passed, slopes.float())


def test_borders_are_int32_with_a_leading_zero_and_cover_all_tokens_that_are_passed(
    calls: list[dict[str, object]],
) -> None:
    given = _drawn(Mask(documents=Documents(torch.tensor([0, 30, 30, 75], dtype=torch.int64))), tail=10)
    given.q[75:] = float("nan")
    out = _call(given)
    borders = calls[0]["cu_seqlens_q"]
    assert isinstance(borders, Tensor)
    assert borders.tolist() == [0, 30, 75], "documents that are empty on both sides are left out"
    assert torch.equal(out[75:], torch.zeros_like(out[75:]))
    assert out[:75].isfinite().all()


def test_gradients_of_a_tail_are_zero(calls: list[dict[str, object]]) -> None:
    given = _drawn(Mask(documents=Documents([0, 40])), tail=10)
    for one in (given.q, given.k, given.v):
        one.requires_grad_()
    for gradient in torch.autograd.grad(_call(given).sum(), (given.q, given.k, given.v)):
        assert torch.equal(gradient[40:], torch.zeros_like(gradient[40:]))
        assert gradient[:40].isfinite().all()


def test_without_any_document_the_library_is_not_called(calls: list[dict[str, object]]) -> None:
    given = _drawn(Mask(documents=Documents([0, 0])), tail=5)
    assert torch.equal(_call(given), torch.zeros_like(given.q))
    assert not calls


def test_it_is_said_never_to_have_run() -> None:
    backend = OPERATOR.backend("flash_attn")
    assert backend is not None
    assert backend.ran_on == ()
