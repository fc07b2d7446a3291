"""Activations that wait on the host: the same gradients to the bit, each storage once, views as they were, the bound
kept on the way there and back, and what is in order when copies are late."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from drivetrain.config import ModelConfig
from drivetrain.engine.compilation import graphs_compiled
from drivetrain.engine.memory import offload_activations
from drivetrain.engine.memory.offload_activations import LEAST_BYTES, ActivationOffload, LayerTensors, Parked
from drivetrain.engine.memory.offload_copies import CopyEngine
from drivetrain.engine.model.batch import Batch, whole_sequences
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.parallel.streams import Event

CPU = torch.device("cpu")
LAYERS = 4
LLAMA = ModelConfig(
    num_layers=LAYERS, hidden_size=32, num_attention_heads=4, num_query_groups=2, seq_length=16, vocab_size=50
)
GPT = ModelConfig(
    num_layers=LAYERS,
    hidden_size=32,
    num_attention_heads=2,
    seq_length=16,
    vocab_size=50,
    normalization="LayerNorm",
    position_embedding_type="learned_absolute",
    activation_func="gelu",
    add_bias_linear=True,
    hidden_dropout=0.1,
)


class Watching(CopyEngine):
    """Keeps what travelled: sizes by layer, and which storages of the device are still alive."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.left: list[list[int]] = []
        self.arrived: list[list[int]] = []
        self.on_device: list[list[weakref.ref[torch.UntypedStorage]]] = []

    def to_host(self, pairs) -> Event:  # type: ignore[no-untyped-def]
        self.left.append([source.nbytes for source, _ in pairs])
        self.on_device.append([weakref.ref(source.untyped_storage()) for source, _ in pairs])
        return super().to_host(pairs)

    def to_device(self, pairs, after=None) -> Event:  # type: ignore[no-untyped-def]
        self.arrived.append([source.nbytes for source, _ in pairs])
        return super().to_device(pairs, after)

    def alive(self) -> list[int]:
        """Storages of each layer that left which are still on the device."""
        self.outward.record().wait()
        self.take()
        return [sum(one() is not None for one in layer) for layer in self.on_device]


def built(model: ModelConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(model, dtype)
    initialize(decoder, 0)
    return decoder


def batch_of(seed: int = 0, rows: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return whole_sequences(torch.randint(50, (rows, 16), generator=generator))


def gradients(decoder: Decoder, batches: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(5)
    losses = []
    for number in range(batches):
        loss = decoder.loss_sum(batch_of(number))
        loss.backward()
        losses.append(loss.item())
    found = {name: one.grad.clone() for name, one in decoder.named_parameters() if one.grad is not None}
    for one in decoder.parameters():
        one.grad = None
    return losses, found


def offloaded(decoder: Decoder, layers: int, engine: CopyEngine | None = None) -> CopyEngine:
    engine = CopyEngine(CPU) if engine is None else engine
    decoder.run_layers = ActivationOffload(engine, decoder.blocks, layers).run_layers
    return engine


def assert_equal(left: Any, right: Any) -> None:
    assert left[0] == right[0]
    assert left[1].keys() == right[1].keys()
    assert [name for name in left[1] if not torch.equal(left[1][name], right[1][name])] == []


@pytest.mark.parametrize("layers", range(LAYERS + 1))
@pytest.mark.parametrize(
    ("model", "dtype"), [(LLAMA, torch.float32), (GPT, torch.float32), (LLAMA, torch.bfloat16)]
)
def test_losses_and_gradients_are_the_same_to_the_bit(
    model: ModelConfig, dtype: torch.dtype, layers: int
) -> None:
    plain = gradients(built(model, dtype), batches=2)
    decoder = built(model, dtype)
    engine = offloaded(decoder, layers)
    assert_equal(gradients(decoder, batches=2), plain)
    assert (engine.take().nbytes > 0) == (layers > 0)
    engine.close()


def saved_storages(decoder: Decoder, layers: int) -> list[dict[int, int]]:
    """By layer, the storages that autograd saves while it runs, without parameters and small ones: their bytes."""
    found: list[dict[int, int]] = []
    kept: list[Tensor] = []

    def run_layers(names: Any, run: Callable[[str, Tensor], Tensor], x_TD: Tensor) -> Tensor:
        for name in names:
            parameters = {one.untyped_storage().data_ptr() for one in decoder.blocks[name].parameters()}
            seen: dict[int, int] = {}

            def note(
                tensor: Tensor, seen: dict[int, int] = seen, parameters: set[int] = parameters
            ) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in parameters and storage.nbytes() >= LEAST_BYTES:
                    seen[storage.data_ptr()] = storage.nbytes()
                    kept.append(tensor)
                return tensor

            with saved_tensors_hooks(note, lambda tensor: tensor):
                x_TD = run(name, x_TD)
            found.append(seen)
        return x_TD

    decoder.run_layers = run_layers
    gradients(decoder)
    decoder.run_layers = None
    return found[:layers]


@pytest.mark.parametrize("layers", [1, 3])
def test_each_storage_that_backward_needs_travels_once_in_each_direction(layers: int) -> None:
    decoder, engine = built(LLAMA), Watching()
    expected = [sum(layer.values()) for layer in saved_storages(decoder, layers)]
    offloaded(decoder, layers, engine)
    gradients(decoder)
    assert [sum(layer) for layer in engine.left] == expected
    assert [sum(layer) for layer in engine.arrived] == expected[::-1]
    assert sum(expected) > 0
    moved = engine.take()
    assert (moved.to_host_bytes, moved.to_device_bytes) == (sum(expected), sum(expected))
    engine.close()


def test_the_last_layer_is_used_where_it_is_when_nothing_came_after_it() -> None:
    decoder, engine = built(LLAMA), Watching()
    offloaded(decoder, LAYERS, engine)
    gradients(decoder)
    assert len(engine.left) == LAYERS
    assert [sum(layer) for layer in engine.arrived] == [sum(layer) for layer in engine.left[-2::-1]]
    gc.collect()
    assert engine.alive() == [0] * LAYERS, "what was not let go goes with the pass"
    engine.close()


def test_one_layer_is_on_its_way_out_while_another_computes() -> None:
    decoder, engine = built(LLAMA), Watching()
    offload = ActivationOffload(engine, decoder.blocks, LAYERS - 1)
    held: list[list[bool]] = []

    def run_layers(names: Any, run: Callable[[str, Tensor], Tensor], x_TD: Tensor) -> Tensor:
        def watched(name: str, x_TD: Tensor) -> Tensor:
            out_TD = run(name, x_TD)
            held.append([count > 1 for count in engine.alive()])
            return out_TD

        return offload.run_layers(names, watched, x_TD)

    decoder.run_layers = run_layers
    gradients(decoder)
    # Seen from the end of each layer, before it leaves itself. What enters a layer is held by who calls it.
    assert held == [[], [True], [False, True], [False, False, True]]
    gc.collect()
    assert engine.alive() == [0] * (LAYERS - 1)
    engine.close()


def test_a_layer_is_fetched_while_the_one_after_it_is_used() -> None:
    decoder, engine = built(LLAMA), Watching()
    offloaded(decoder, LAYERS - 1, engine)
    begun: list[tuple[str, int]] = []
    for name, block in decoder.blocks.items():
        # The output matrix of the MLP is the first of a block whose gradient is computed.
        block.mlp.down.weight.register_hook(lambda _, name=name: begun.append((name, len(engine.arrived))))
    decoder.loss_sum(batch_of()).backward()
    assert begun == [("3", 1), ("2", 2), ("1", 3), ("0", 3)]
    engine.close()


def test_without_gradients_nothing_moves() -> None:
    decoder, engine = built(LLAMA), Watching()
    offloaded(decoder, LAYERS, engine)
    with torch.no_grad():
        decoder.loss_sum(batch_of())
    assert (engine.left, engine.take().nbytes) == ([], 0)


def test_a_graph_that_is_dropped_leaves_nothing_and_the_next_is_right() -> None:
    plain = gradients(built(LLAMA))
    decoder, engine = built(LLAMA), Watching()
    offloaded(decoder, LAYERS - 1, engine)
    loss = decoder.loss_sum(batch_of())
    del loss
    gc.collect()
    assert engine.alive() == [0] * (LAYERS - 1)
    assert_equal(gradients(decoder), plain)
    engine.close()


def test_a_second_backward_of_the_same_graph_finds_what_the_first_one_found() -> None:
    decoder = built(LLAMA)
    engine = offloaded(decoder, LAYERS - 1)
    loss = decoder.loss_sum(batch_of())
    loss.backward(retain_graph=True)
    first = {name: one.grad.clone() for name, one in decoder.named_parameters() if one.grad is not None}
    loss.backward()
    for name, one in decoder.named_parameters():
        assert one.grad is not None
        assert torch.equal(one.grad, 2 * first[name]), name
    engine.close()


class Late(Watching):
    """Copies of one direction are held up."""

    def __init__(self, direction: str) -> None:
        super().__init__()
        self._direction = direction

    def _hold_up(self) -> None:
        held = threading.Event()
        threading.Timer(0.01, held.set).start()
        getattr(self, self._direction).run(held.wait)

    def to_host(self, pairs) -> Event:  # type: ignore[no-untyped-def]
        self._hold_up()
        return super().to_host(pairs)

    def to_device(self, pairs, after=None) -> Event:  # type: ignore[no-untyped-def]
        self._hold_up()
        return super().to_device(pairs, after)


@pytest.mark.parametrize("direction", ["outward", "inward"])
def test_copies_that_are_late_change_nothing(direction: str) -> None:
    plain = gradients(built(LLAMA), batches=2)
    decoder, engine = built(LLAMA), Late(direction)
    offloaded(decoder, LAYERS - 1, engine)
    assert_equal(gradients(decoder, batches=2), plain)
    engine.close()


def layer_of(engine: CopyEngine) -> LayerTensors:
    return LayerTensors(engine)


def through_the_host(engine: CopyEngine, *tensors: Tensor) -> list[Tensor]:
    """Put away together, let go, and brought back."""
    layer = layer_of(engine)
    parked = [layer.put(tensor) for tensor in tensors]
    layer.leave()
    layer.let_go()
    return [one.restore() if isinstance(one, Parked) else one for one in parked]


def test_views_come_back_as_they_were_and_their_storage_travels_once() -> None:
    engine = Watching()
    base = torch.arange(4000, dtype=torch.float32)
    views = [
        base[7:3007],
        base.view(40, 100).t(),
        base[::3],
        base[:600].view(torch.int32),
        base.view(2, 2000)[1],
    ]
    found = through_the_host(engine, *views)
    for view, back in zip(views, found, strict=True):
        assert torch.equal(view, back)
        assert (view.dtype, view.stride(), view.storage_offset()) == (
            back.dtype,
            back.stride(),
            back.storage_offset(),
        )
        assert back.data_ptr() != view.data_ptr()
    assert len({back.untyped_storage().data_ptr() for back in found}) == 1
    assert engine.left == [[16_000]]
    assert engine.arrived == [[16_000]]
    engine.close()


def test_what_was_written_into_a_storage_before_the_layer_ended_is_there() -> None:
    engine = Watching()
    buffer = torch.zeros(2, 1000)
    layer = layer_of(engine)
    buffer[0] = 1
    first = layer.put(buffer[0])
    buffer[1] = 2
    second = layer.put(buffer[1])
    layer.leave()
    layer.let_go()
    assert isinstance(first, Parked)
    assert isinstance(second, Parked)
    assert first.restore().eq(1).all()
    assert second.restore().eq(2).all()
    engine.close()


def test_small_tensors_parameters_and_others_than_plain_ones_stay() -> None:
    engine = Watching()
    weight = nn.Parameter(torch.zeros(1000))
    layer = LayerTensors(engine, lambda: [weight])
    sparse = torch.eye(100).to_sparse()
    for tensor in (
        torch.zeros(LEAST_BYTES // 4 - 1),
        weight,
        weight[:900].detach(),
        sparse,
        torch.zeros(1000, device="meta"),
    ):
        assert layer.put(tensor) is tensor
    layer.leave()
    assert engine.left == []


def test_tensors_that_are_put_away_one_by_one_travel_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_activations, "GROUP_BYTES", 10_000)
    engine = Watching()
    offload = ActivationOffload(engine)
    tensors = [torch.full((1000,), float(number)) for number in range(7)]
    parked = [offload.put(tensor) for tensor in tensors]
    assert engine.left == [[4000] * 3, [4000] * 3], "the seventh still waits for others"
    small = offload.put(torch.ones(3))
    offload.flush()
    assert engine.left[2:] == [[4000]]
    del tensors
    for number, one in reversed(list(enumerate(parked))):
        assert one.restore().eq(number).all()
    assert small.restore().eq(1).all()
    assert engine.arrived == [[4000] * 3, [4000] * 3], "the last was still there"
    engine.close()


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.long
# Raised by the compiler itself while it imports and traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("layers", [1, LAYERS])
def test_compiled_blocks_give_the_same_to_the_bit_and_compile_nothing_more(layers: int) -> None:
    plain_decoder = built(LLAMA)
    plain_decoder.compile_blocks()
    before = graphs_compiled()
    plain = gradients(plain_decoder, batches=2)
    alone = graphs_compiled() - before
    torch._dynamo.reset()
    decoder = built(LLAMA)
    decoder.compile_blocks()
    engine = offloaded(decoder, layers)
    before = graphs_compiled()
    assert_equal(gradients(decoder, batches=2), plain)
    assert graphs_compiled() - before == alone > 0
    assert engine.take().nbytes > 0
    engine.close()
