"""Nothing passes from one document to another: not a bit, not a not-a-number, in either direction."""

import pytest
import torch
from torch import Tensor

from drivetrain.engine.ops.attention import OPERATOR, Documents, Mask
from drivetrain.engine.ops.attention.cases import alibi_slopes

LENGTHS = (21, 34, 34, 9)
SECOND = slice(21, 55)
MASKS = {
    "causal": Mask(documents=Documents.of_lengths(LENGTHS)),
    "full": Mask(causal=False, documents=Documents.of_lengths(LENGTHS)),
    "window": Mask(window=50, documents=Documents.of_lengths(LENGTHS)),
    "prefix": Mask(prefix=(30, 3, 40, 1), documents=Documents.of_lengths(LENGTHS)),
    "alibi": Mask(slopes=alibi_slopes(4), documents=Documents.of_lengths(LENGTHS)),
}


def _drawn(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(98, 4, 16), (98, 2, 16), (98, 2, 16), (98, 4, 16)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _results(backend: str, mask: Mask, given: list[Tensor]) -> list[Tensor]:
    """Output, and gradients of queries, keys and values."""
    found = OPERATOR.backend(backend)
    assert found is not None
    *leaves, upstream = (one.clone() for one in given)
    for leaf in leaves:
        leaf.requires_grad_()
    out = found.call(*leaves, mask)
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", ["eager", "dense", "chunked"])
@pytest.mark.parametrize("with_what", ["other numbers", "not-a-number"])
def test_perturbing_other_documents_leaves_outputs_and_gradients_equal_to_the_bit(
    backend: str, name: str, dtype: torch.dtype, with_what: str
) -> None:
    """transformers#46634, WrinkleFree#53: the loss still falls where documents see each other."""
    given = _drawn(dtype)
    before = _results(backend, MASKS[name], given)
    perturbed = [one.clone() for one in given]
    for one in perturbed:
        for other in (slice(0, 21), slice(55, 98)):
            one[other] = one[other] * -3.0 + 1.0 if with_what == "other numbers" else float("nan")
    after = _results(backend, MASKS[name], perturbed)
    for what, was, now in zip(("output", "of q", "of k", "of v"), before, after, strict=True):
        assert torch.equal(was[SECOND], now[SECOND]), what
        assert not torch.equal(was[:21], now[:21]), f"{what} of the perturbed document itself did not change"


def test_documents_are_taken_from_borders_and_not_from_positions() -> None:
    """Qwen3.8#104, transformers#39814: the same tokens are one document or several, as is stated."""
    q, k, v, _ = _drawn(torch.float32)
    one, several = OPERATOR.reference(q, k, v, Mask()), OPERATOR.reference(q, k, v, MASKS["causal"])
    assert isinstance(one, Tensor)
    assert isinstance(several, Tensor)
    assert torch.equal(one[:21], several[:21])
    assert not torch.allclose(one[21:], several[21:])
