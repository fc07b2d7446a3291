"""What attention got wrong elsewhere, by the issue that told; each backend that runs here is asked.

Some of the list are tests next door: head widths, head counts and short documents are cases of the numerics grid, leaks
and borders are in ``test_attention_leaks.py``, refusals in ``test_attention_refusals.py``.
"""

import pytest
import torch
from torch import Tensor

from drivetrain.engine.ops.attention import CAUSAL, OPERATOR, Documents, Mask
from drivetrain.engine.ops.attention.cases import alibi_slopes

BACKENDS = ("eager", "dense", "chunked")
on_each_backend = pytest.mark.parametrize("backend", BACKENDS)


def _drawn(
    tokens: int, keys: int | None = None, heads: int = 4, groups: int = 2, width: int = 16
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens_of_keys = tokens if keys is None else keys
    shapes = [(tokens, heads, width), (tokens_of_keys, groups, width), (tokens_of_keys, groups, width)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def _call(backend: str, given: list[Tensor], mask: Mask) -> Tensor:
    found = OPERATOR.backend(backend)
    assert found is not None
    out = found.call(*given, mask)
    assert isinstance(out, Tensor)
    return out


def _gradients(out: Tensor, given: list[Tensor]) -> tuple[Tensor, ...]:
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    return torch.autograd.grad(out, given, upstream)


@on_each_backend
@pytest.mark.parametrize("tail", [0, 1, 25])
@pytest.mark.parametrize("lengths", [(40,), (17, 0, 23)], ids=["one document", "three"])
def test_tokens_behind_the_last_document_give_zero_whatever_they_hold(
    backend: str, tail: int, lengths: tuple[int, ...]
) -> None:
    """torchtitan#1237, transformers#45621 (padding times 0 is nan), flash-attention#2324 (gradients left as memory was
    found), TransformerEngine#3484 (one group with a padded tail)."""
    given = _drawn(40 + tail)
    with torch.no_grad():
        for one in given:
            one[40:] = float("nan")
    out = _call(backend, given, Mask(documents=Documents.of_lengths(lengths)))
    assert out[:40].isfinite().all()
    assert torch.equal(out[40:], torch.zeros_like(out[40:]))
    upstream = torch.ones_like(out)
    upstream[40:] = float("nan")
    for gradient in torch.autograd.grad(out, given, upstream):
        assert gradient[:40].isfinite().all()
        assert torch.equal(gradient[40:], torch.zeros_like(gradient[40:]))


@on_each_backend
@pytest.mark.parametrize(
    "mask", [Mask(alignment="bottom_right"), Mask(alignment="bottom_right", slopes=alibi_slopes(4))]
)
def test_queries_that_see_no_key_give_zero_and_finite_gradients(backend: str, mask: Mask) -> None:
    """flash-attention#2421, #1537, #443: more queries than keys. Also the fully masked row."""
    given = _drawn(20, keys=6)
    out = _call(backend, given, mask)
    assert torch.equal(out[:14], torch.zeros_like(out[:14]))
    assert (out[14:] != 0).all()
    of_q, of_k, of_v = _gradients(out, given)
    assert torch.equal(of_q[:14], torch.zeros_like(of_q[:14]))
    assert all(gradient.isfinite().all() for gradient in (of_q, of_k, of_v))


@on_each_backend
def test_empty_documents_and_documents_without_keys_are_served(backend: str) -> None:
    """flash-attention#2568: zero-length sequences were out-of-range reads."""
    documents = Documents.of_lengths([0, 5, 4, 0, 6], [0, 3, 0, 7, 8])
    given = _drawn(15, keys=18)
    out = _call(backend, given, Mask(causal=False, documents=documents))
    assert torch.equal(out[5:9], torch.zeros_like(out[5:9]))
    of_q, of_k, of_v = _gradients(out, given)
    assert torch.equal(of_q[5:9], torch.zeros_like(of_q[5:9]))
    for gradient in (of_k, of_v):
        assert torch.equal(gradient[3:10], torch.zeros_like(gradient[3:10])), (
            "keys of a document without queries"
        )
        assert (gradient[:3] != 0).any()


@on_each_backend
@pytest.mark.parametrize("documents", [Documents([0, 0]), Documents([0, 0, 0])])
def test_a_call_without_any_document_gives_zero(backend: str, documents: Documents) -> None:
    given = _drawn(6)
    out = _call(backend, given, Mask(documents=documents))
    assert torch.equal(out, torch.zeros_like(out))
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in _gradients(out, given))


@on_each_backend
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_sequences_shorter_than_window_and_block_have_right_gradients(backend: str, tokens: int) -> None:
    """fla#1140, libflash_attn#11: a window longer than the sequence lost causality, or its gradients."""
    given = _drawn(tokens)
    for mask in (Mask(window=2), Mask(window=100)):
        exact = [one.detach().double().requires_grad_() for one in given]
        expected = _call("dense", exact, CAUSAL if tokens <= (mask.window or 0) else mask)
        out = _call(backend, given, mask)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
        of_exact = torch.autograd.grad(expected, exact, torch.ones_like(expected))
        for one, other in zip(torch.autograd.grad(out, given, torch.ones_like(out)), of_exact, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=5e-6)


@on_each_backend
def test_a_window_counts_the_keys_that_are_seen(backend: str) -> None:
    """transformers#39408, zml#763, flash-attention#1133, hippogriff#7: windows off by one."""
    given = _drawn(30)
    alone = _call(backend, given, Mask(window=1))
    torch.testing.assert_close(alone, given[2].repeat_interleave(2, dim=1), rtol=1e-6, atol=1e-6)
    causal = _call(backend, given, CAUSAL)
    for window in (30, 31, 10_000):
        torch.testing.assert_close(_call(backend, given, Mask(window=window)), causal, rtol=1e-6, atol=1e-6)
    shorter = _call(backend, given, Mask(window=29))
    torch.testing.assert_close(shorter[:29], causal[:29], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(shorter[29], causal[29], atol=1e-4)


@on_each_backend
def test_a_window_sees_exactly_its_keys(backend: str) -> None:
    """Changing a value changes the outputs of the queries that see it, and of no others."""
    given = _drawn(30)
    before = _call(backend, given, Mask(window=5))
    changed = [one.detach().clone() for one in given]
    changed[2][10] += 1.0
    after = _call(backend, changed, Mask(window=5))
    moved = (before != after).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert moved == [10, 11, 12, 13, 14]


@on_each_backend
def test_causal_alignment_is_the_stated_one(backend: str) -> None:
    """SDPA aligns top left, flash-attn bottom right: with 2 queries and 5 keys they see 1 and 2, or 4 and 5."""
    given = _drawn(2, keys=5)
    for alignment, sees in (("top_left", (1, 2)), ("bottom_right", (4, 5))):
        mask = Mask(alignment=alignment)  # type: ignore[arg-type]
        of_v = torch.autograd.grad(_call(backend, given, mask)[0].sum(), given[2])[0]
        assert int((of_v != 0).any(dim=(1, 2)).sum()) == sees[0], alignment
        of_v = torch.autograd.grad(_call(backend, given, mask)[1].sum(), given[2])[0]
        assert int((of_v != 0).any(dim=(1, 2)).sum()) == sees[1], alignment


@on_each_backend
@pytest.mark.parametrize(
    "mask", [CAUSAL, Mask(window=600), Mask(slopes=alibi_slopes(2)), Mask(prefix=700)], ids=str
)
def test_the_mask_holds_at_long_lengths(backend: str, mask: Mask) -> None:
    """vllm-ascend#15503: the mask was ignored beyond 512 keys, for a shape that was accepted."""
    given = [one.detach() for one in _drawn(1300, heads=2, groups=1, width=8)]
    changed = [one.clone() for one in given]
    changed[2][1000:] += 1.0
    before, after = _call(backend, given, mask), _call(backend, changed, mask)
    assert torch.equal(before[:1000], after[:1000])
    assert (before[1000:] != after[1000:]).any(dim=(1, 2)).all()


@on_each_backend
@pytest.mark.parametrize(
    "layout", ["tokens first", "heads first", "features with gaps", "reversed strides of a packed product"]
)
def test_layouts_in_memory_give_the_same(backend: str, layout: str) -> None:
    """apex#1568, SkyRL#1886, vllm-ascend#13699: a layout was read wrong, or a copy of it got the gradient."""
    given = [one.detach() for one in _drawn(40, heads=4, groups=4)]
    laid = [one.clone() for one in given]
    if layout == "heads first":
        laid = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in given]
    elif layout == "features with gaps":
        laid = [torch.stack([one, one + 1], dim=-1)[..., 0] for one in given]
    elif layout == "reversed strides of a packed product":
        laid = list(torch.cat(given, dim=1).chunk(3, dim=1))
    leaves = [one.requires_grad_() for one in laid]
    mask = Mask(documents=Documents.of_lengths([15, 25]))
    out, plain = _call(backend, leaves, mask), [one.requires_grad_() for one in given]
    expected = _call(backend, plain, mask)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(_gradients(out, leaves), _gradients(expected, plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@on_each_backend
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 3), (3, 1), (7, 7), (6, 2)])
def test_each_query_head_reads_its_own_group(backend: str, heads: int, groups: int) -> None:
    """TransformerEngine#1182: 3 or 7 heads were mis-shaped."""
    given = [one.detach() for one in _drawn(20, heads=heads, groups=groups)]
    mask = Mask(documents=Documents.of_lengths([12, 8]))
    out = _call(backend, given, mask)
    for head in range(heads):
        group = head // (heads // groups)
        alone = [given[0][:, head : head + 1], *(one[:, group : group + 1] for one in given[1:])]
        torch.testing.assert_close(out[:, head : head + 1], _call("dense", alone, mask), rtol=1e-4, atol=1e-6)


def test_flex_attention_is_right_for_a_shorter_packing_after_a_longer_one() -> None:
    """pytorch#136232: a block mask of another length gave nan."""
    for lengths in ((100, 60), (20, 30, 7)):
        given = [one.detach() for one in _drawn(sum(lengths))]
        mask = Mask(documents=Documents.of_lengths(lengths))
        torch.testing.assert_close(
            _call("flex", given, mask), _call("dense", given, mask), rtol=1e-4, atol=1e-5
        )


@on_each_backend
@pytest.mark.parametrize("longest", [1, 2, 3])
def test_many_short_documents_have_gradients_of_the_right_size(backend: str, longest: int) -> None:
    """TransformerEngine#2186: short tails gave gradients of keys that were far too large."""
    lengths = [1 + number % longest for number in range(20)]
    given = _drawn(sum(lengths))
    mask = Mask(documents=Documents.of_lengths(lengths))
    exact = [one.detach().double().requires_grad_() for one in given]
    expected = torch.autograd.grad(_call("dense", exact, mask).sum(), exact)
    for one, other in zip(
        torch.autograd.grad(_call(backend, given, mask).sum(), given), expected, strict=True
    ):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_backward_passes_through_one_forward_are_independent(backend: str) -> None:
    """quack#209, unsloth-zoo#610: the second returned what the first had left."""
    given = _drawn(20)
    out = _call(backend, given, CAUSAL)
    first = torch.autograd.grad(out, given, torch.ones_like(out), retain_graph=True)
    second = torch.autograd.grad(out, given, 2 * torch.ones_like(out), retain_graph=True)
    third = torch.autograd.grad(out, given, torch.zeros_like(out))
    for one, two, three in zip(first, second, third, strict=True):
        torch.testing.assert_close(2 * one, two, rtol=1e-6, atol=1e-7)
        assert torch.equal(three, torch.zeros_like(three))
