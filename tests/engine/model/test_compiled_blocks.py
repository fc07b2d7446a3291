"""Compiled blocks: the same numbers, and nothing compiled anew for another packing."""

import pytest
import torch
from model_examples import decoder_of, gradients_of, model_of, packed_batch

from differences import relative_difference

pytestmark = [
    # Raised by the compiler itself while it imports and traces.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

LAYOUTS = [
    [[24], [24]],
    [[5, 19], [24]],
    [[1, 2, 3, 18], [12, 12]],
    [[8, 8, 8], [8, 8, 8]],
    [[7, 17], [1, 22, 1]],
    [[24], [3, 21]],
]


class CountingBackend:
    """Runs what it is given uncompiled, and counts the graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]):
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["llama_gqa_untied", "qwen3", "gpt2"])
def test_layers_and_packings_share_two_graphs(family):
    decoder = decoder_of(model_of(family, num_layers=4), torch.float64).train()
    batches = [packed_batch(rows, seed=index) for index, rows in enumerate(LAYOUTS)]
    wanted = [gradients_of(decoder, batch) for batch in batches]
    backend = CountingBackend()
    decoder.compile_blocks(backend=backend)
    for batch, expected in zip(batches, wanted, strict=True):
        for name, gradient in gradients_of(decoder, batch).items():
            assert relative_difference(gradient, expected[name]) < 1e-12, name
    # Before attention and after it; four layers and six packings add none.
    assert backend.graphs == 2


def test_another_number_of_tokens_compiles_at_most_once_more():
    decoder = decoder_of(model_of("llama")).eval()
    backend = CountingBackend()
    decoder.compile_blocks(backend=backend)
    with torch.no_grad():
        for length in (24, 9, 10, 11, 12, 13, 14, 15):
            decoder(packed_batch([[length]]))
    assert backend.graphs <= 4


def test_inductor_gives_the_gradients_of_eager():
    decoder = decoder_of(model_of("llama_gqa_untied"), torch.float64).train()
    batches = [packed_batch(rows, seed=index) for index, rows in enumerate(LAYOUTS[:3])]
    wanted = gradients_of(decoder, *batches)
    decoder.compile_blocks()
    for name, gradient in gradients_of(decoder, *batches).items():
        assert relative_difference(gradient, wanted[name]) < 1e-12, name
