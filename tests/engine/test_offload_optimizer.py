"""AdamW with a share of its moments on the host: the same numbers to the bit, the bytes it says, the bound it keeps."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain.config import OptimizerConfig
from drivetrain.engine.checkpoint import load_checkpoint, save_checkpoint, whole_state
from drivetrain.engine.memory.offload_copies import CopyEngine
from drivetrain.engine.memory.offload_optimizer import (
    ALIGNMENT,
    OffloadedAdamW,
    StateOffload,
    offloaded_parameters,
)
from drivetrain.engine.optimizer import build_optimizer, optimizer_state
from drivetrain.engine.parallel.streams import Event
from tiny_training import LLAMA, Training

CPU = torch.device("cpu")
SETTINGS = OptimizerConfig(lr=1e-2, weight_decay=0.1)
FRACTIONS = (0.0, 0.3, 1.0)


class Model(nn.Module):
    """Parameters of many sizes: smaller than a vector of the processor, and larger than several buckets."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shapes = [(3,), (17, 5), (ALIGNMENT, 7), (1001,), (193, 101), (2, ALIGNMENT)]
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes
        )

    def give_gradients(self, step: int, *, without: int | None = None) -> None:
        generator = torch.Generator().manual_seed(100 + step)
        for index, weight in enumerate(self.weights):
            gradient = torch.randn(weight.shape, generator=generator)
            weight.grad = None if index == without else gradient


def offloading(fraction: float, staging_elements: int = ALIGNMENT) -> StateOffload:
    """Buckets of so many elements."""
    return StateOffload(fraction, CopyEngine(CPU), staging_bytes=2 * 2 * 4 * staging_elements)


def trained(
    offload: StateOffload | None, fused: bool, steps: int = 3
) -> tuple[dict[str, torch.Tensor], torch.optim.AdamW]:
    model = Model()
    optimizer = build_optimizer(model, SETTINGS, fused=fused, offload=offload)
    for step in range(steps):
        model.give_gradients(step, without=2 if step == 1 else None)
        optimizer.step()
    if isinstance(optimizer, OffloadedAdamW):
        optimizer.settle()
    weights = {name: one.detach() for name, one in model.named_parameters()}
    return {**weights, **optimizer_state(optimizer)}, optimizer


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("elements", [ALIGNMENT, 5 * ALIGNMENT, 10**6])
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_weights_moments_and_counts_are_those_of_the_plain_optimizer_to_the_bit(
    fraction: float, elements: int, fused: bool
) -> None:
    plain, _ = trained(None, fused)
    offloaded, _ = trained(offloading(fraction, elements), fused)
    assert plain.keys() == offloaded.keys()
    different = [name for name in plain if not torch.equal(plain[name], offloaded[name])]
    assert different == []


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.3, 0.5, 0.99, 1.0])
def test_the_share_on_the_host_is_what_fits_of_whole_parameters(fraction: float) -> None:
    sizes = [weight.numel() for weight in Model().weights]
    chosen = offloaded_parameters(sizes, fraction)
    taken = sum(sizes[index] for index in chosen)
    assert taken <= fraction * sum(sizes)
    left = [size for index, size in enumerate(sizes) if index not in chosen]
    assert all(taken + size > fraction * sum(sizes) for size in left), "another one would have fitted"
    assert chosen == sorted(chosen)
    if fraction == 1.0:
        assert chosen == list(range(len(sizes)))


def test_parameters_without_elements_stay_and_count_their_steps() -> None:
    assert offloaded_parameters([0, 5, 0], 1.0) == [1]
    empty = nn.Parameter(torch.empty(0, 3))
    optimizer = build_optimizer([("rows", empty)], SETTINGS, offload=offloading(1.0))
    empty.grad = torch.empty(0, 3)
    optimizer.step()
    assert optimizer.state[empty]["step"] == 1


def test_both_moments_of_the_share_travel_there_and_back_in_each_update_and_nothing_else() -> None:
    offload = offloading(0.3)
    _, optimizer = trained(offload, fused=False, steps=1)
    assert isinstance(optimizer, OffloadedAdamW)
    sizes = [weight.numel() for weight in Model().weights]
    expected = sum(sizes[index] for index in offloaded_parameters(sizes, 0.3)) * 4 * 2
    moved = offload.engine.take()
    assert (moved.to_host_bytes, moved.to_device_bytes) == (expected, expected)
    assert (optimizer.host_bytes, optimizer.bytes_per_update) == (expected, 2 * expected)


def test_a_share_of_nothing_moves_nothing() -> None:
    offload = offloading(0.0)
    _, optimizer = trained(offload, fused=False)
    assert isinstance(optimizer, OffloadedAdamW)
    assert (optimizer.host_bytes, optimizer.staging_bytes, offload.engine.take().nbytes) == (0, 0, 0)


class Watching(CopyEngine):
    """Notes where on the device the states go to."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.places: dict[int, int] = {}

    def to_device(self, pairs, after=None) -> Event:  # type: ignore[no-untyped-def]
        for _, place in pairs:
            storage = place.untyped_storage()
            self.places[storage.data_ptr()] = storage.nbytes()
        return super().to_device(pairs, after)


@pytest.mark.parametrize("elements", [ALIGNMENT, 3 * ALIGNMENT])
def test_two_buckets_are_all_that_is_on_the_device_and_their_bound_is_kept(elements: int) -> None:
    engine = Watching()
    bound = 2 * 2 * 4 * elements
    model = Model()
    optimizer = build_optimizer(model, SETTINGS, offload=StateOffload(1.0, engine, bound))
    assert isinstance(optimizer, OffloadedAdamW)
    model.give_gradients(0)
    optimizer.step()
    assert len(engine.places) == 2
    assert sum(engine.places.values()) == optimizer.staging_bytes <= bound
    assert optimizer.host_bytes > 2 * bound, "or there was nothing to bound"


class Slow(CopyEngine):
    """The way to the host is held up before each copy; the order must hold all the same."""

    def to_host(self, pairs) -> Event:  # type: ignore[no-untyped-def]
        held = threading.Event()
        threading.Timer(0.01, held.set).start()
        self.outward.run(held.wait)
        return super().to_host(pairs)


def test_a_bucket_that_is_late_on_its_way_back_is_not_overwritten() -> None:
    plain, _ = trained(None, fused=False)
    offload = StateOffload(1.0, Slow(CPU), staging_bytes=2 * 2 * 4 * ALIGNMENT)
    offloaded, _ = trained(offload, fused=False)
    assert [name for name in plain if not torch.equal(plain[name], offloaded[name])] == []


@pytest.mark.parametrize("saved_with", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("resumed_with", [None, 0.3, 1.0])
def test_a_run_goes_on_to_the_bit_whatever_the_share_was_when_it_was_saved(
    saved_with: float, resumed_with: float | None, tmp_path: Path
) -> None:
    def training(fraction: float | None) -> Training:
        one = Training(LLAMA)
        offload = None if fraction is None else offloading(fraction)
        one.optimizer = build_optimizer(one.decoder, OptimizerConfig(lr=1e-2), offload=offload)
        return one

    torch.manual_seed(0)
    whole = training(None)
    expected = whole.train(4)[2:]
    torch.manual_seed(0)
    first = training(saved_with)
    first.train(2)
    path = save_checkpoint(
        tmp_path,
        2,
        model=LLAMA,
        state=whole_state(first.decoder, first.optimizer),
        trainer_state={},
        keep_latest_k=2,
    )
    state = torch.get_rng_state()
    second = training(resumed_with)
    load_checkpoint(path, LLAMA, whole_state(second.decoder, second.optimizer))
    torch.set_rng_state(state)
    assert second.train(2) == expected
    for name, value in optimizer_state(whole.optimizer).items():
        assert torch.equal(value, optimizer_state(second.optimizer)[name]), name
