"""The chunked backend: memory linear in the length, the same inside compiled code, one answer however it is cut."""

import functools

import pytest
import torch
from torch import Tensor

from drivetrain.engine.memory import LiveBytes
from drivetrain.engine.ops.attention import CAUSAL, Documents, Dropout, Mask, chunked, dense
from drivetrain.engine.ops.attention.cases import KINDS, alibi_slopes
from drivetrain.engine.ops.attention.registered import _backward, _chunked, _flattened, attention_chunked

HEADS, WIDTH = 2, 16


def _drawn(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, HEADS, WIDTH, generator=generator, dtype=dtype) for _ in range(3)]


def _peak_of_chunked(tokens: int, mask: Mask) -> int:
    """Most bytes alive in forward and backward, on top of the three inputs and the incoming gradient."""
    given = _drawn(tokens)
    spans, rule = mask.spans(tokens, tokens), chunked.Rule(mask, 1, 0.25)
    gradient = torch.ones(tokens, HEADS, WIDTH)
    with LiveBytes() as live:
        # The operator hides from the count what it makes and frees: these are the functions it calls.
        out, log = chunked.forward(*given, spans, rule)
        chunked.backward(gradient, *given, out, log, spans, rule)
    return live.peak_bytes - 4 * tokens * HEADS * WIDTH * 4


@pytest.mark.parametrize(
    "mask", [CAUSAL, Mask(softcap=3.0, slopes=alibi_slopes(2), dropout=Dropout(0.1, 2))], ids=str
)
def test_memory_grows_with_the_length_and_not_with_its_square(mask: Mask) -> None:
    short, long = _peak_of_chunked(1024, mask), _peak_of_chunked(4096, mask)
    blocks = 12 * HEADS * chunked.QUERIES * chunked.KEYS * 8
    of_tokens = 4096 * HEADS * (10 * WIDTH + 4) * 4
    assert long < blocks + of_tokens
    assert long < 4.0 * short
    scores = HEADS * 4096**2 * 4
    assert long < scores / 3, "one fp32 matrix of scores"


def test_the_dense_softmax_would_not_pass_as_linear() -> None:
    """The count sees what is quadratic."""
    peaks = []
    for tokens in (512, 1024):
        given = _drawn(tokens)
        with LiveBytes() as live:
            dense.attention(*given)
        peaks.append(live.peak_bytes)
    assert peaks[1] > 3.0 * peaks[0]


@pytest.mark.parametrize("name", [name for name in KINDS if name != "dropout"])
@pytest.mark.parametrize(("queries", "keys"), [(7, 5), (64, 16), (1, 100)])
def test_the_answer_does_not_depend_on_the_blocks(
    name: str, queries: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = KINDS[name]
    q, k, v = _cut(mask)
    upstream = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(1))
    expected = attention_chunked(q, k, v, mask)
    of_expected = torch.autograd.grad(expected, (q, k, v), upstream)
    monkeypatch.setattr(chunked, "QUERIES", queries)
    monkeypatch.setattr(chunked, "KEYS", keys)
    out = attention_chunked(q, k, v, mask)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-14)
    for one, other in zip(torch.autograd.grad(out, (q, k, v), upstream), of_expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def _cut(mask: Mask) -> list[Tensor]:
    queries = keys = 45
    if mask.documents is not None:
        queries, keys = int(mask.documents.cu_seqlens_q[-1]), int(mask.documents.cu_seqlens_k[-1])
    generator = torch.Generator().manual_seed(0)
    shapes = [(queries, 4, 8), (keys, 2, 8), (keys, 2, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def test_dropped_weights_are_the_same_when_a_forward_is_recomputed() -> None:
    """pytorch#190717: it drew another mask. With a seed it cannot; without, the generator is put back."""
    for dropout in (Dropout(0.3, seed=9), Dropout(0.3)):
        results = []
        for recompute in (False, True):
            torch.manual_seed(5)
            given = [one.requires_grad_() for one in _drawn(40)]
            call = functools.partial(attention_chunked, mask=Mask(dropout=dropout))
            if recompute:
                out = torch.utils.checkpoint.checkpoint(call, *given, use_reentrant=False)
            else:
                out = call(*given)
            assert isinstance(out, Tensor)
            results.append([out, *torch.autograd.grad(out.square().sum(), given)])
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_dropout_without_a_seed_differs_from_call_to_call() -> None:
    given = _drawn(40)
    mask = Mask(dropout=Dropout(0.3))
    assert not torch.equal(attention_chunked(*given, mask), attention_chunked(*given, mask))


@pytest.mark.parametrize("name", ["causal", "prefix + documents", "alibi + documents", "dropout, seeded"])
def test_the_operator_keeps_the_rules_of_torch(name: str) -> None:
    q, k, v = _cut(KINDS[name])
    flat = _flattened(q, KINDS[name], None)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_chunked, (q, k, v, *flat), test_utils=tests)
    with torch.no_grad():
        out, log = _chunked(q, k, v, *flat)
    plain = [one.detach() for one in (out, q, k, v, out, log)]
    torch.library.opcheck(_backward, (*plain, *flat, True), test_utils=tests)


def test_compiled_code_calls_it_without_breaking_the_graph_and_another_packing_compiles_nothing() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return attention_chunked(q * 2, k, v, mask) + 1

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
    for lengths in ((20, 20), (15, 25), (1, 39)):
        given = [one.requires_grad_() for one in _drawn(40)]
        mask = Mask(documents=Documents.of_lengths(lengths))
        out, expected = compiled(*given, mask), layer(*given, mask)
        assert torch.equal(out, expected)
        for one, other in zip(
            torch.autograd.grad(out.sum(), given), torch.autograd.grad(expected.sum(), given), strict=True
        ):
            assert torch.equal(one, other)
    assert len(graphs) == 1


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Torch's own, when Inductor is imported.
def test_inductor_compiles_what_lies_around_it() -> None:
    """pytorch#180642: compiled custom operators gave wrong outputs."""

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = Mask(window=7, slopes=None)
        return attention_chunked(q * 2, k, v.sin(), mask).cos()

    given = [one.requires_grad_() for one in _drawn(40)]
    out, expected = torch.compile(layer, fullgraph=True)(*given), layer(*given)
    torch.testing.assert_close(out, expected)
    for one, other in zip(
        torch.autograd.grad(out.sum(), given), torch.autograd.grad(expected.sum(), given), strict=True
    ):
        torch.testing.assert_close(one, other)
