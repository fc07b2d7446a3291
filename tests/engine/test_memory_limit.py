"""Live bytes are exact, over the limit is an error with category and tensor, and counting leaves no trace."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from drivetrain.config.training import OptimizerConfig
from drivetrain.engine.memory import (
    LiveBytes,
    apply_cuda_limit,
    count_step,
    translate_out_of_memory,
    unseen_with_compile,
)
from drivetrain.engine.optimizer import build_optimizer, clip_gradients
from drivetrain.engine.random_state import capture_random_state
from drivetrain.errors import ConfigurationError, OutOfMemory

ROWS, WIDTH, HIDDEN, OUT = 32, 8, 16, 4
FLOAT = 4
WEIGHT_1, BIAS_1 = HIDDEN * WIDTH * FLOAT, HIDDEN * FLOAT
WEIGHT_2, BIAS_2 = OUT * HIDDEN * FLOAT, OUT * FLOAT
PARAMETERS = WEIGHT_1 + BIAS_1 + WEIGHT_2 + BIAS_2
MOMENTS_AND_STEPS = 2 * PARAMETERS + 4 * FLOAT


def mlp(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN),
        nn.GELU(),
        nn.Dropout(dropout) if dropout else nn.Identity(),
        nn.Linear(HIDDEN, OUT),
    )


def step_on(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, clip: float = 0.5
) -> Callable[[], None]:
    def step() -> None:
        model(x).square().sum().backward()
        clip_gradients(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *model.buffers(), *states]]


def test_peak_of_a_two_layer_mlp_is_the_sum_of_its_tensors() -> None:
    model = mlp()
    adamw = build_optimizer(model, OptimizerConfig(fused=True))
    x = torch.randn(ROWS, WIDTH)
    count = count_step(step_on(model, adamw, x), decoder=model, optimizer=adamw, limit_bytes=None)
    # The peak is where backward has just made the second layer's gradients: its input is still saved, and
    # so is the first layer's.
    rows = ROWS * FLOAT
    saved = rows * WIDTH + rows * HIDDEN + rows * HIDDEN  # x, before GELU, after GELU
    flowing = rows * OUT + rows * HIDDEN  # gradients of the output and of the second layer's input
    activations = saved + flowing + WEIGHT_2 + BIAS_2 + FLOAT + FLOAT  # not yet .grad; the loss, the one
    assert count.by_category == {
        "parameters": PARAMETERS,
        "gradients": 0,
        "optimizer": MOMENTS_AND_STEPS,
        "activations": activations,
    }
    assert count.peak_bytes == PARAMETERS + MOMENTS_AND_STEPS + activations


def test_gradients_and_the_temporaries_of_the_optimizer_have_their_categories() -> None:
    model = mlp()
    adamw = build_optimizer(model, OptimizerConfig(fused=False, weight_decay=0.0))
    x = torch.randn(1, WIDTH)
    count = count_step(step_on(model, adamw, x), decoder=model, optimizer=adamw, limit_bytes=None)
    # With one row the peak is in the update of the largest matrix: sqrt(exp_avg_sq) and its quotient.
    assert count.by_category == {
        "parameters": PARAMETERS,
        "gradients": PARAMETERS,
        "optimizer": MOMENTS_AND_STEPS + 2 * WEIGHT_1,
        "activations": WIDTH * FLOAT,
    }


def test_gradients_accumulated_over_micro_batches_count_once() -> None:
    model = mlp()
    adamw = build_optimizer(model, OptimizerConfig())
    x = torch.randn(ROWS, WIDTH)

    def backward(times: int) -> Callable[[], None]:
        def step() -> None:
            for _ in range(times):
                model(x).square().sum().backward()

        return step

    once, twice, thrice = (
        count_step(backward(times), decoder=model, optimizer=adamw, limit_bytes=None) for times in (1, 2, 3)
    )
    assert twice.peak_bytes == once.peak_bytes + PARAMETERS
    assert thrice == twice


def test_buffers_and_a_tied_matrix_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.output = nn.Linear(4, 10, bias=False)
            self.output.weight = self.embedding.weight
            self.register_buffer("table", torch.ones(3, 4), persistent=False)

        def forward(self, token_ids: Tensor) -> Tensor:
            return self.output(self.embedding(token_ids) * self.table)

    model = Tied()
    adamw = build_optimizer(model, OptimizerConfig())
    count = count_step(
        step_on(model, adamw, torch.tensor([1, 2, 3])), decoder=model, optimizer=adamw, limit_bytes=None
    )
    assert count.by_category["parameters"] == 10 * 4 * FLOAT + 3 * 4 * FLOAT


def test_views_share_a_storage_and_it_lives_as_long_as_the_last_of_them() -> None:
    with LiveBytes() as live:
        base = torch.zeros(100)
        view = base[10:20].reshape(2, 5)
        assert live.live_bytes == 400
        del base
        assert live.live_bytes == 400
        view += 1
        assert live.live_bytes == 400
        del view
        assert live.live_bytes == 0
    assert live.peak_bytes == 400


def test_a_resized_storage_counts_with_its_new_size() -> None:
    with LiveBytes() as live:
        tensor = torch.zeros(10)
        tensor.resize_(100)
        assert live.live_bytes == 400
        tensor.untyped_storage().resize_(0)
        tensor.detach()
        assert live.live_bytes == 0
    assert live.peak_bytes == 400


def test_tensors_from_before_count_when_they_are_tracked_or_first_read() -> None:
    tracked, read, unused = torch.zeros(10), torch.zeros(20), torch.zeros(30)
    view = tracked[2:]
    with LiveBytes() as live:
        live.track("parameters", {"tracked": tracked, "again": view})
        assert live.live_bytes == 40
        read.sum()
        assert live.live_bytes == 40 + 80
    assert live.peak_by_category == {
        "parameters": 40,
        "gradients": 0,
        "optimizer": 0,
        "activations": 80 + 4,
    }
    assert len(unused) == 30


def test_nothing_is_counted_after_the_block() -> None:
    with LiveBytes() as live:
        tensor = torch.zeros(10)
    assert live.live_bytes == 40
    torch.zeros(1000)
    del tensor
    gc.collect()
    assert (live.live_bytes, live.peak_bytes) == (40, 40)


def peak(model: nn.Module, adamw: torch.optim.AdamW, x: Tensor) -> int:
    return count_step(step_on(model, adamw, x), decoder=model, optimizer=adamw, limit_bytes=None).peak_bytes


def test_the_peak_itself_is_allowed_and_one_byte_less_is_not() -> None:
    model = mlp()
    adamw = build_optimizer(model, OptimizerConfig())
    x = torch.randn(ROWS, WIDTH)
    step, limit = step_on(model, adamw, x), peak(model, adamw, x)
    count_step(step, decoder=model, optimizer=adamw, limit_bytes=limit)
    with pytest.raises(OutOfMemory) as caught:
        count_step(step, decoder=model, optimizer=adamw, limit_bytes=limit - 1)
    assert caught.value.category == "activations"
    assert (caught.value.live_bytes, caught.value.limit_bytes) == (limit, limit - 1)
    assert "float32 tensor of shape (1, 4), made by aten.sum" in caught.value.tensor


@pytest.mark.parametrize(
    ("limit", "category", "tensor"),
    [
        (WEIGHT_1 - 1, "parameters", "float32 tensor of shape (16, 8), 0.weight"),
        (PARAMETERS + FLOAT + WEIGHT_1, "optimizer", "float32 tensor of shape (16, 8), 0.weight/exp_avg_sq"),
        (
            PARAMETERS + MOMENTS_AND_STEPS + 1024 + 1,
            "activations",
            "float32 tensor of shape (32, 16), made by aten.a",
        ),
    ],
)
def test_out_of_memory_names_category_and_tensor(limit: int, category: str, tensor: str) -> None:
    model = mlp()
    adamw = build_optimizer(model, OptimizerConfig())
    with pytest.raises(OutOfMemory) as caught:
        count_step(
            step_on(model, adamw, torch.randn(ROWS, WIDTH)), decoder=model, optimizer=adamw, limit_bytes=limit
        )
    assert caught.value.category == category
    assert tensor in caught.value.tensor
    assert "memory.device_memory_limit_bytes" in str(caught.value)


@pytest.mark.parametrize("share", [None, 1.0, 0.99, 0.9, 0.7, 0.5, 0.1])
@pytest.mark.parametrize("fused", [True, False])
def test_counting_leaves_no_trace_whether_it_raises_or_not(share: float | None, fused: bool) -> None:
    model = mlp(dropout=0.5)
    model.append(nn.BatchNorm1d(OUT))  # has buffers that a step changes
    adamw = build_optimizer(model, OptimizerConfig(fused=fused))
    x = torch.randn(ROWS, WIDTH)
    step_on(model, adamw, x)()
    model[0].weight.grad = torch.ones(HIDDEN, WIDTH)
    before, random_before, lr = state_of(model, adamw), capture_random_state(), adamw.param_groups[0]["lr"]
    limit = None if share is None else int(share * peak(model, adamw, x))

    def step() -> None:
        for group in adamw.param_groups:
            group["lr"] = 7.0
        step_on(model, adamw, x)()

    try:
        count_step(step, decoder=model, optimizer=adamw, limit_bytes=limit)
        raised = False
    except OutOfMemory:
        raised = True
    assert raised == (share is not None and share < 1)
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(model, adamw), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert adamw.param_groups[0]["lr"] == lr
    after = capture_random_state()
    assert all(
        torch.equal(random_before[name], after[name]) for name in ("torch_cpu", "python_key", "numpy_key")
    )
    step_on(model, adamw, x)()  # no hook is left behind, training goes on


def test_an_optimizer_without_state_has_none_afterwards() -> None:
    model = mlp()
    adamw = torch.optim.AdamW(model.parameters())
    count = count_step(
        step_on(model, adamw, torch.randn(1, WIDTH)), decoder=model, optimizer=adamw, limit_bytes=None
    )
    assert count.by_category["optimizer"] >= MOMENTS_AND_STEPS
    assert not adamw.state


class Block(nn.Module):
    """Something of our own: torch never compiles its own layers as the outermost frame."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()


def test_a_compiled_block_runs_eagerly_while_it_is_counted_and_compiled_after_it() -> None:
    model = Block()
    adamw = build_optimizer(model, OptimizerConfig())
    x = torch.randn(ROWS, WIDTH)
    expected = peak(model, adamw, x)
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    model.compile(backend=backend)
    assert peak(model, adamw, x) == expected
    assert not compiled
    assert "eagerly" in unseen_with_compile()
    model(x)
    assert compiled


def test_the_cuda_limit_is_set_as_a_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[float] = []

    class Properties:
        total_memory = 1000

    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: Properties())
    monkeypatch.setattr(
        "torch.cuda.set_per_process_memory_fraction", lambda fraction, device: fractions.append(fraction)
    )
    device = torch.device("cuda:0")
    assert apply_cuda_limit(250, device) == 0.25
    assert fractions == [0.25]
    with pytest.raises(ConfigurationError, match="the most is 1,000"):
        apply_cuda_limit(1001, device)


def test_out_of_memory_of_torch_becomes_ours() -> None:
    with (
        pytest.raises(OutOfMemory) as caught,
        translate_out_of_memory(1000, torch.device("cuda:0")),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has ...")
    assert caught.value.category == "unknown"
    assert caught.value.tensor == "a request for 20.50 MiB on cuda:0"
    assert caught.value.live_bytes == int(20.5 * 2**20)


def test_without_a_limit_the_error_of_torch_is_left_as_it_is() -> None:
    with (
        pytest.raises(torch.OutOfMemoryError),
        translate_out_of_memory(None, torch.device("cuda:0")),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has ...")
