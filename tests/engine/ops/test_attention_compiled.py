"""Attention inside compiled code: one graph where that is promised, and no compilation for another packing anywhere."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.engine.ops.attention import CAUSAL, FULL, Documents, Dropout, Mask, dense, eager
from drivetrain.engine.ops.attention.cases import alibi_slopes
from drivetrain.engine.ops.modules_attention import Attention
from drivetrain.engine.ops.selection import Selection


class _Graphs:
    """A backend of torch.compile that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.count += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()


def _drawn(tokens: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, heads, 16, generator=generator) for heads in (4, 2, 2)]


@pytest.mark.parametrize(
    "mask", [CAUSAL, FULL, Mask(window=5), Mask(prefix=5), Mask(slopes=alibi_slopes(4))], ids=str
)
@pytest.mark.parametrize("call", [eager.attention, dense.attention], ids=["eager", "dense"])
def test_without_documents_it_is_in_the_graph(call: Any, mask: Mask) -> None:
    graphs, given = _Graphs(), _drawn()
    out = torch.compile(lambda *three: call(*three, mask) + 1, backend=graphs, fullgraph=True)(*given)
    assert torch.equal(out, call(*given, mask) + 1)
    assert graphs.count == 1


def _packings() -> list[Mask]:
    """More than torch.compile would compile one function for."""
    return [Mask(documents=Documents([0, border, 20, 40])) for border in range(1, 12)]


@pytest.mark.parametrize("call", [eager.attention, dense.attention], ids=["eager", "dense"])
def test_another_packing_compiles_nothing(call: Any) -> None:
    graphs, given = _Graphs(), _drawn()
    compiled = torch.compile(lambda q, k, v, mask: call(q * 2, k, v, mask) + 1, backend=graphs)
    counts = []
    for mask in _packings():
        assert torch.equal(compiled(*given, mask), call(given[0] * 2, *given[1:], mask) + 1)
        counts.append(graphs.count)
    assert set(counts) == {2}, "before and after the break"


def test_a_module_is_one_graph_for_all_packings_where_its_backend_is_an_operator_of_torch() -> None:
    module = Attention(32, 4, num_query_groups=2, selection=Selection({"attention": "chunked"}))
    plain = Attention(32, 4, num_query_groups=2)
    plain.load_state_dict(module.state_dict())
    graphs = _Graphs()
    compiled = torch.compile(module, backend=graphs, fullgraph=True)
    for mask in _packings():
        x = torch.randn(40, 32)
        torch.testing.assert_close(compiled(x, mask), plain(x, mask), rtol=1e-4, atol=1e-6)
    assert graphs.count == 1
    assert not module.selection.served, "what runs in compiled code is not counted"


# Torch looks at .grad of what flows over a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_module_compiles_nothing_anew_for_batches_and_packings_with_eager() -> None:
    module = Attention(32, 4)
    graphs = _Graphs()
    compiled = torch.compile(module, backend=graphs)
    counts = []
    for mask in _packings():
        x = torch.randn(2, 20, 32)
        for given in ((x, mask), (x,)):
            torch.testing.assert_close(compiled(*given), module(*given), rtol=1e-4, atol=1e-6)
        counts.append(graphs.count)
    assert counts[2:] == [counts[2]] * len(counts[2:])


def test_calls_do_not_compile_anew_because_they_are_counted() -> None:
    """A count that a graph depends on changes with each call."""
    selection = Selection()
    module = nn.Sequential(Attention(32, 4, selection=selection), Attention(32, 4, selection=selection))
    module(torch.randn(40, 32))
    graphs = _Graphs()
    compiled = torch.compile(module, backend=graphs, fullgraph=True)
    for _ in range(12):
        compiled(torch.randn(40, 32))
        selection.served["attention", "eager"] += 1
    assert graphs.count == 1


def test_a_fallback_is_not_decided_while_tracing_since_it_could_not_be_recorded() -> None:
    module = Attention(32, 4, selection=Selection({"attention": "triton"}, allow_fallback=True))
    compiled, mask = torch.compile(module, backend=_Graphs(), fullgraph=True), Mask(dropout=Dropout(0.1))
    x = torch.randn(40, 32)
    with pytest.raises(Exception, match="call it once uncompiled"):
        compiled(x, mask)
    module(x, mask)
    assert compiled(x, mask).shape == (40, 32)
    (choice,) = module.selection.choices.values()
    assert choice.is_fallback
