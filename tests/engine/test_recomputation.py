"""What is recomputed changes no bit of a gradient, draws the same dropout, and lowers live bytes in the right order."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.config import MemoryConfig, ModelConfig
from drivetrain.engine.memory.live import LiveBytes
from drivetrain.engine.memory.recompute import Plan, Recomputation, Share, drop_segments
from drivetrain.engine.memory.recompute_choice import plan_of_choices, plan_of_config, repeated_layers
from drivetrain.engine.memory.recompute_segments import Decision, Layer, SavedTensor, Segment, TensorPolicy
from drivetrain.engine.model.batch import Batch, whole_sequences
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.model.parts import PARTS, Part
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.random_state import seed_everything
from drivetrain.measure.flops import hardware_flops, model_flops

LLAMA = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    seq_length=32,
    vocab_size=64,
    qk_layernorm=True,
)
DROPPING_LLAMA = LLAMA.model_copy(update={"hidden_dropout": 0.2, "attention_dropout": 0.2})
GPT = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=32,
    vocab_size=64,
    normalization="LayerNorm",
    position_embedding_type="learned_absolute",
    activation_func="gelu",
    add_bias_linear=True,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
MODELS = {"llama": LLAMA, "llama with dropout": DROPPING_LLAMA, "gpt with dropout": GPT}


def asked(granularity: str, **fields: object) -> Plan:
    return plan_of_config(MemoryConfig(recompute_granularity=granularity, **fields))  # type: ignore[arg-type]


def every_layer(policy: TensorPolicy, parts: Sequence[Part] = (), *, whole: bool = False) -> Plan:
    return lambda names: [
        Share((name,), whole=whole, parts=frozenset(parts), policy=policy) for name in names
    ]


def alternately(saved: SavedTensor) -> Decision:
    """Of what can be computed again, every other tensor."""
    return "recompute" if drop_segments(saved) == "recompute" and saved.index % 2 == 0 else "keep"


PLANS: dict[str, Plan] = {
    "full": asked("full"),
    "uniform, two at a time": asked("full", recompute_method="uniform", recompute_num_layers=2),
    "block, two": asked("full", recompute_method="block", recompute_num_layers=2),
    **{f"selective, {part}": asked("selective", recompute_modules=part) for part in PARTS},
    "selective, three": asked("selective", recompute_modules="core_attn,mlp_act,norm"),
    "selective, norm and mlp": asked("selective", recompute_modules="norm,mlp"),
    "each layer otherwise": plan_of_choices(
        {"0": None, "1": frozenset({"norm", "mlp_act"}), "2": frozenset[Part]()}
    ),
    "every other tensor of a layer": every_layer(alternately, whole=True),
    "every other tensor of parts": every_layer(alternately, ("norm", "mlp", "core_attn")),
}


def packed(model: ModelConfig) -> Batch:
    """Two rows of documents of several lengths."""
    lengths = [5, 11, 16, 3, 3, 26]
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(model.vocab_size, (2, 32), generator=generator)
    return Batch(
        token_ids=ids,
        labels=ids.roll(-1, 1),
        loss_mask=torch.rand(2, 32, generator=generator) > 0.2,
        position_ids=torch.cat([torch.arange(length) for length in lengths]).view(2, 32),
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        num_valid_tokens=50,
        sum_squared_lengths=sum(length**2 for length in lengths),
    )


def trained(
    model: ModelConfig,
    dtype: torch.dtype,
    plan: Plan | None,
    *,
    selection: Selection | None = None,
    batches: int = 2,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of two accumulated micro-batches, from the same weights and random numbers each time."""
    decoder = Decoder(model, dtype)
    initialize(decoder, 7)
    if selection is not None:
        decoder.use_operators(selection)
    if plan is not None:
        Recomputation(decoder, plan)
    seed_everything(11, 0)
    losses = []
    for batch in [packed(model), whole_sequences(packed(model).token_ids)][:batches]:
        loss = decoder.loss_sum(batch) / 50
        loss.backward()
        losses.append(loss.item())
    # What is drawn next must not depend on what was drawn again.
    losses.append(float(torch.rand(())))
    return losses, {name: value.grad for name, value in decoder.named_parameters() if value.grad is not None}


def assert_equal_to_the_bit(
    found: tuple[list[float], dict[str, Tensor]], wanted: tuple[list[float], dict[str, Tensor]]
) -> None:
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert torch.equal(found[1][name], gradient), name


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_equal_to_the_bit_under_every_plan(name: str, dtype: torch.dtype) -> None:
    wanted = trained(MODELS[name], dtype, None)
    for plan in PLANS.values():
        assert_equal_to_the_bit(trained(MODELS[name], dtype, plan), wanted)


def live_peak(model: ModelConfig, plan: Plan | None, dtype: torch.dtype = torch.float32) -> int:
    """Most bytes of activations and gradients alive in a forward and backward pass."""
    decoder = Decoder(model, dtype)
    initialize(decoder, 7)
    if plan is not None:
        Recomputation(decoder, plan)
    batch = whole_sequences(torch.zeros((2, model.seq_length), dtype=torch.int64))
    live = LiveBytes()
    with live:
        live.track("parameters", dict(decoder.named_parameters()))
        (decoder.loss_sum(batch) / 50).backward()
    return live.peak_bytes


@pytest.mark.parametrize("name", ["llama", "gpt with dropout"])
def test_live_bytes_fall_from_none_over_selective_to_full(name: str) -> None:
    model = MODELS[name].model_copy(update={"num_layers": 6, "seq_length": 128})
    none = live_peak(model, None)
    norm, act = (live_peak(model, asked("selective", recompute_modules=part)) for part in ("norm", "mlp_act"))
    several = live_peak(model, asked("selective", recompute_modules="core_attn,mlp_act,norm"))
    most = live_peak(model, asked("selective", recompute_modules="core_attn,mlp,norm"))
    full = live_peak(model, asked("full"))
    assert full < most < several < min(norm, act) <= max(norm, act) < none


def test_block_falls_with_every_layer_that_is_recomputed() -> None:
    model = LLAMA.model_copy(update={"num_layers": 4, "seq_length": 128})
    peaks = [
        live_peak(model, asked("full", recompute_method="block", recompute_num_layers=n)) for n in (1, 2, 3)
    ]
    assert sorted(peaks, reverse=True) == peaks
    assert len(set(peaks)) == 3


@contextmanager
def alive_segments() -> Iterator[list["weakref.ref[Segment]"]]:
    gc.collect()
    found: list[weakref.ref[Segment]] = []
    gc.disable()
    try:
        yield found
    finally:
        gc.enable()


def test_nothing_is_left_of_a_segment_when_its_backward_is_done() -> None:
    """Without the garbage collector: no cycle holds a layer's inputs."""
    weight = torch.nn.Parameter(torch.ones(4, 4))
    with alive_segments() as seen:
        x = torch.rand(4, 4, requires_grad=True)
        segment = Segment("s", lambda x: (x @ weight).sin().exp(), (x,), policy=drop_segments)
        seen.append(weakref.ref(segment))
        out = segment.forget_result()
        del segment
        assert seen[0]() is not None
        out.sum().backward()
        del out
        assert seen[0]() is None


def test_a_dropped_output_is_given_back_to_whoever_saved_a_view_of_it() -> None:
    x = torch.rand(3, 4, requires_grad=True)
    weight = torch.rand(3, 2, requires_grad=True)

    def run(layer: Layer | None) -> tuple[Tensor, Tensor]:
        act = x.sin() if layer is None else layer.run("norm", torch.sin, x, draws=False, stops_early=True)
        (act.t() @ weight).square().sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        found = x.grad, weight.grad
        x.grad = weight.grad = None
        return found

    wanted = run(None)
    with Layer(drop_segments) as layer:
        found = run(layer)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_a_graph_that_is_kept_is_gone_through_again() -> None:
    """Zero-bubble schedules, and second derivatives of a user's own, ask twice for the same tensors."""
    decoder = Decoder(LLAMA, torch.float32)
    initialize(decoder, 7)
    Recomputation(decoder, PLANS["selective, three"])
    loss = decoder.loss_sum(packed(LLAMA))
    names, parameters = zip(*decoder.named_parameters(), strict=True)
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    for name, one, other in zip(names, first, second, strict=True):
        assert torch.equal(one, other), name


def test_another_pass_than_the_first_is_noticed() -> None:
    size = [3]
    x = torch.rand(8, requires_grad=True)
    segment = Segment("odd", lambda x: x[: size[0]].sin().exp().sum(), (x,), policy=drop_segments)
    size[0] = 4
    with pytest.raises(AssertionError, match="the repeated odd saves"):
        segment.forget_result().backward()


def test_evaluation_and_generation_go_without_segments() -> None:
    decoder = Decoder(LLAMA, torch.float32)
    initialize(decoder, 7)
    with torch.no_grad():
        plain = decoder(packed(LLAMA))
        Recomputation(decoder, PLANS["full"])
        assert torch.equal(decoder(packed(LLAMA)), plain)


def test_offloaded_tensors_come_back_where_the_policy_moves_them() -> None:
    moved: list[Tensor] = []

    class Copy:
        def __init__(self, tensor: Tensor) -> None:
            self.copy = tensor.clone()

        def get(self) -> Tensor:
            return self.copy

    class Host:
        def put(self, tensor: Tensor) -> Copy:
            moved.append(tensor)
            return Copy(tensor)

    def in_thirds(saved: SavedTensor) -> Decision:
        if drop_segments(saved) == "keep":
            return "offload" if saved.segment is None else "keep"
        choices: tuple[Decision, ...] = ("keep", "recompute", "offload")
        return choices[saved.index % 3]

    @contextmanager
    def away() -> Iterator[Host]:
        yield Host()

    wanted = trained(LLAMA, torch.float32, None, batches=1)
    for plan in (every_layer(in_thirds, whole=True), every_layer(in_thirds, ("norm", "mlp", "core_attn"))):
        moved.clear()
        decoder = Decoder(LLAMA, torch.float32)
        initialize(decoder, 7)
        Recomputation(decoder, plan, away=away)
        seed_everything(11, 0)
        (decoder.loss_sum(packed(LLAMA)) / 50).backward()
        for name, value in decoder.named_parameters():
            assert value.grad is not None
            assert torch.equal(value.grad, wanted[1][name]), name
        assert moved


class ProductFlops(TorchDispatchMode):
    """Of matrix products as they are executed; attention of a CPU is one operator and none of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


def product_flops(model: ModelConfig, plan: Plan | None) -> int:
    decoder = Decoder(model, torch.float32)
    initialize(decoder, 7)
    if plan is not None:
        Recomputation(decoder, plan)
    counted = ProductFlops()
    with counted:
        decoder.loss_sum(whole_sequences(packed(model).token_ids)).backward()
    return counted.flops


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_hardware_flops_are_those_of_the_products_that_were_executed(model: ModelConfig) -> None:
    without = product_flops(model, None)
    names = [("0", "1", "2")]
    for label in ("full", "uniform, two at a time", "block, two", "selective, mlp", "selective, three"):
        plan = PLANS[label]
        repeated = repeated_layers(
            plan, names, with_last_product=False, hidden_dropout=model.hidden_dropout > 0
        )
        flops = hardware_flops(model, tokens=64, sum_squared_lengths=2 * 32**2, recompute=repeated)
        once = model_flops(model, tokens=64, sum_squared_lengths=2 * 32**2)
        assert flops.matmul - once.matmul == product_flops(model, plan) - without, label
        whole = label in ("full", "uniform, two at a time")
        layers = 3 if whole or label == "selective, three" else 2 if label == "block, two" else 0
        assert flops.attention - once.attention == once.attention // 9 * layers


def test_products_that_are_repeated_to_the_end_count_the_last_one_as_well() -> None:
    plan = PLANS["full"]
    repeated = repeated_layers(plan, [("0", "1", "2")], with_last_product=True)
    full = hardware_flops(LLAMA, tokens=64, sum_squared_lengths=2048, recompute="full")
    assert hardware_flops(LLAMA, tokens=64, sum_squared_lengths=2048, recompute=repeated) == full
