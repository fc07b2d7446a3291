"""The specification of masks: what is refused, what a query sees, and that nothing is inferred."""

from typing import Any

import pytest
import torch

from drivetrain.engine.ops.attention import OPERATOR, Documents, Dropout, Mask
from drivetrain.engine.ops.attention.cases import KINDS
from drivetrain.engine.ops.attention.dropout import kept
from drivetrain.engine.ops.attention.mask import Span
from drivetrain.engine.ops.attention.pattern import pattern_of
from drivetrain.errors import DrivetrainError


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Mask(window=0), "its own included"),
        (lambda: Mask(window=-1), "below 1"),
        (lambda: Mask(window=4, causal=False), "needs causal"),
        (lambda: Mask(prefix=4, causal=False), "needs causal"),
        (lambda: Mask(prefix=4, window=4), "exclude each other"),
        (lambda: Mask(prefix=-1), "the least is 0"),
        (lambda: Mask(prefix=(1, 2)), "2 prefix lengths for 1 documents"),
        (lambda: Mask(softcap=0.0), "not above 0"),
        (lambda: Mask(softcap=float("nan")), "not above 0"),
        (lambda: Mask(alignment="centre"), "top_left nor bottom_right"),  # type: ignore[arg-type]
        (lambda: Mask(slopes=torch.ones(4, requires_grad=True)), r"slopes\.detach"),
        (lambda: Mask(slopes=torch.ones(4, dtype=torch.bfloat16)), "give fp32"),
        (lambda: Dropout(1.0), r"\[0, 1\)"),
        (lambda: Dropout(0.1, seed=-1), "seed -1"),
        (lambda: Documents([3, 5]), "leading 0"),
        (lambda: Documents([0]), "leading 0"),
        (lambda: Documents([0, 5, 4]), "falls from 5 to 4 at document 1"),
        (lambda: Documents(torch.tensor([0.0, 4.0])), "int32"),
        (lambda: Documents([0, 4], [0, 2, 4]), "1 documents, cu_seqlens_k 2"),
        (lambda: Documents([0, 2**31]), "int32 holds"),
    ],
)
def test_a_wrong_specification_says_what_would_be_right(make: Any, says: str) -> None:
    with pytest.raises(DrivetrainError, match=says):
        make()


def test_lengths_that_differ_need_a_stated_alignment_where_positions_count() -> None:
    """SDPA aligns top left, flash-attn bottom right: neither is taken for granted."""
    with pytest.raises(
        DrivetrainError, match="document 0 has 3 queries and 5 keys: state alignment, top_left or"
    ):
        Mask().spans(3, 5)
    with pytest.raises(DrivetrainError, match="document 1 has"):
        Mask(causal=False, slopes=torch.ones(1), documents=Documents([0, 2, 4], [0, 2, 5])).spans(4, 5)
    assert Mask(causal=False).spans(3, 5) == [Span(0, 3, 0, 5, 0)]
    assert Mask(alignment="top_left").spans(3, 5) == [Span(0, 3, 0, 5, 0)]


def test_documents_beyond_the_tokens_are_refused() -> None:
    with pytest.raises(DrivetrainError, match="end at 9, but there are 8 queries"):
        Mask(documents=Documents([0, 9])).spans(8, 8)


def test_masks_are_equal_where_all_backends_decide_alike() -> None:
    def packed(*lengths: int) -> Mask:
        return Mask(documents=Documents.of_lengths(lengths))

    assert packed(3, 4) == packed(1, 2)
    assert hash(packed(3, 4)) == hash(packed(1, 2))
    assert Mask(dropout=Dropout(0.1, 1)) == Mask(dropout=Dropout(0.1, 2))
    different = [*KINDS.values(), Mask(window=3), Mask(softcap=3.0), Mask(dropout=Dropout(0.2))]
    for number, one in enumerate(different):
        assert all(one != other for other in different[number + 1 :] if str(one) != str(other))
        assert one == one
    crossed = Mask(causal=False, documents=Documents([0, 2], [0, 3]))
    assert crossed != Mask(causal=False, documents=Documents([0, 2], [0, 2]))


def _sees(mask: Mask, span: Span, query: int, key: int) -> bool:
    """The definition, one pair at a time."""
    position = query + (span.keys - span.queries if mask.alignment == "bottom_right" else 0)
    if not mask.causal:
        return True
    if key < span.prefix:
        return True
    return key <= position and (mask.window is None or position - key < mask.window)


@pytest.mark.parametrize("name", KINDS)
def test_blocks_of_the_pattern_are_the_definition_pair_by_pair(name: str) -> None:
    mask = KINDS[name]
    documents = mask.documents
    queries, keys = (
        (45, 45) if documents is None else (documents.cu_seqlens_q[-1], documents.cu_seqlens_k[-1])
    )
    for span in mask.spans(int(queries), int(keys)):
        pattern = pattern_of(mask, span)
        for first in range(0, span.queries, 8):
            rows = range(first, min(first + 8, span.queries))
            reachable = pattern.keys(rows, span.keys)
            for key in set(range(span.keys)) - set(reachable):
                assert not any(_sees(mask, span, query, key) for query in rows), (name, rows, key)
            for start in range(reachable.start, reachable.stop, 8):
                columns = range(start, min(start + 8, reachable.stop))
                seen = pattern.allowed(rows, columns, torch.device("cpu"))
                expected = torch.tensor([[_sees(mask, span, i, j) for j in columns] for i in rows])
                assert torch.equal(torch.ones_like(expected) if seen is None else seen, expected), (
                    name,
                    rows,
                    columns,
                )


def test_the_reference_is_the_equation_pair_by_pair() -> None:
    """Written out in loops, with everything at once: documents, bottom right, window, soft-cap, slopes, groups."""
    generator = torch.Generator().manual_seed(0)
    documents = Documents.of_lengths([3, 5, 2], [5, 4, 2])
    slopes = torch.tensor([0.3, 0.7, 0.1, 0.5])
    mask = Mask(window=3, documents=documents, alignment="bottom_right", slopes=slopes, softcap=1.5)
    q = torch.randn(11, 4, 6, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(12, 2, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    out = OPERATOR.reference(q=q, k=k, v=v, mask=mask, scale=0.8)
    assert isinstance(out, torch.Tensor)
    expected = torch.zeros_like(q)
    for span in mask.spans(11, 12):
        offset = span.keys - span.queries
        for i in range(span.queries):
            for h in range(4):
                seen = [j for j in range(span.keys) if _sees(mask, span, i, j)]
                scores = torch.stack(
                    [
                        1.5 * torch.tanh(0.8 * (q[span.first_q + i, h] @ k[span.first_k + j, h // 2]) / 1.5)
                        - slopes[h].double() * abs(i + offset - j)
                        for j in seen
                    ]
                    or [torch.tensor(0.0, dtype=torch.float64)]
                )
                weights = scores.exp() / scores.exp().sum()
                for weight, j in zip(weights, seen, strict=False):
                    expected[span.first_q + i, h] += weight * v[span.first_k + j, h // 2]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-14)
    assert (expected[10] == 0).all(), "the last query has no document"


def test_gradients_of_the_reference_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    documents = Documents.of_lengths([3, 4], [2, 5])
    q = torch.randn(8, 2, 3, generator=generator, dtype=torch.float64).requires_grad_()
    k, v = (torch.randn(7, 1, 3, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    for mask in (
        Mask(documents=documents, alignment="bottom_right", slopes=torch.tensor([0.5, 0.2]), softcap=2.0),
        Mask(documents=documents, alignment="top_left", prefix=(1, 4), dropout=Dropout(0.3, seed=5)),
    ):
        for backend in ("dense", "chunked"):
            found = OPERATOR.backend(backend)
            assert found is not None
            torch.autograd.gradcheck(
                lambda q, k, v, call=found.call, mask=mask: call(q, k, v, mask), (q, k, v)
            )


def test_dropout_is_even_and_independent_of_the_blocks() -> None:
    device = torch.device("cpu")
    whole = kept(seed=7, probability=0.25, heads=3, rows=range(400), columns=range(300), device=device)
    block = kept(
        seed=7, probability=0.25, heads=3, rows=range(100, 164), columns=range(77, 250), device=device
    )
    assert torch.equal(whole[:, 100:164, 77:250], block)
    share = whole.double().mean().item()
    assert abs(share - 0.75) < 5 * (0.75 * 0.25 / whole.numel()) ** 0.5
    # Rows, columns, heads and seeds have nothing to do with each other: what two agree on is chance.
    other = kept(seed=8, probability=0.25, heads=3, rows=range(400), columns=range(300), device=device)
    upper = kept(
        seed=7 + 2**40, probability=0.25, heads=3, rows=range(400), columns=range(300), device=device
    )
    chance = 0.75**2 + 0.25**2
    for one, two in (
        (whole[0], whole[1]),
        (whole[:, :-1], whole[:, 1:]),
        (whole[:, :, :-1], whole[:, :, 1:]),
        (whole[0, :300], whole[0, :300].T),
        (whole, other),
        (whole, upper),
    ):
        assert abs((one == two).double().mean().item() - chance) < 5 * (0.25 / one.numel()) ** 0.5
