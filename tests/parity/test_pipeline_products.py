"""Every schedule computes what one process computes, and no matrix product twice.

Zero-bubble schedules go through backward twice. What is one node of autograd's graph would compute everything both
times, and gradients would be right all the same: only a count shows it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import parity_cases as cases
import pytest
import torch
from test_pipeline import CPU, SCHEDULES, Case
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.config import ModelConfig
from drivetrain.config.layout import Layout
from drivetrain.config.stages import ZERO_BUBBLE, Schedule
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.ops._in_place_cross_entropy import linear_cross_entropy_sum
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.pipeline import Pipeline, decoder_of_rank
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.tensor_parallel import tensor_parallel
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_ranks

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
)


class _Calls(TorchDispatchMode):
    """Counts what is called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, _types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.found[function.name().partition(".")[0]] += 1
        return function(*arguments, **(named or {}))


@contextmanager
def counted_products() -> Iterator[Counter[str]]:
    """Calls of matrix products, and of attention."""
    found: Counter[str] = Counter()
    with _Calls() as calls:
        yield found
    found.update(of_interest(calls.found))


@contextmanager
def profiled_products() -> Iterator[Counter[str]]:
    """The same where blocks are compiled, which do not run compiled in a dispatch mode. Takes long."""
    found: Counter[str] = Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield found
    found.update(of_interest(Counter(event.name for event in profile.events())))


def of_interest(calls: Counter[str]) -> Counter[str]:
    found = Counter({name: calls[name] for name in ATTENTION if calls[name]})
    found["products"] = sum(calls[name] for name in PRODUCTS)
    return found


def on_one_process(model: ModelConfig) -> Counter[str]:
    decoder = cases.reference_decoder(model)
    with counted_products() as found:
        for batch in cases.micro_batches(model, Case(model).num_microbatches):
            decoder.loss_sum(batch).backward()
    return found


def on_a_rank(
    schedules: Sequence[Schedule], model: ModelConfig, tp: int, compiled: bool
) -> list[Counter[str]]:
    """Of one step under each schedule; processes are started once."""
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(Layout(tp=tp, pp=2), group.ranks.rank)
        return [counted_step(Case(model, schedule), mesh, compiled) for schedule in schedules]


def counted_step(case: Case, mesh: Mesh, compiled: bool) -> Counter[str]:
    decoder = decoder_of_rank(case.model, torch.float64, case.plan, mesh.index("pp"), CPU)
    initialize(decoder, cases.SEED)
    traffic = Traffic()
    tensor_parallel(decoder, mesh, False, traffic)
    pipeline = Pipeline(decoder, case.plan, case.schedule, mesh, CPU, traffic)
    batches, tokens = cases.micro_batches(case.model, case.num_microbatches), cases.valid_tokens(case.model)
    if compiled:
        decoder.compile_blocks("aot_eager")
        pipeline.run(batches, tokens)
    with profiled_products() if compiled else counted_products() as found:
        pipeline.run(batches, tokens)
    return found


def by_schedule(
    schedules: Sequence[Schedule], model: ModelConfig, tp: int = 1, compiled: bool = False
) -> dict[Schedule, Counter[str]]:
    """Summed over all ranks."""
    per_rank = on_ranks(on_a_rank, 2 * tp, schedules, model, tp, compiled)
    counts = zip(*per_rank, strict=True)
    return {name: sum(ranks, Counter()) for name, ranks in zip(schedules, counts, strict=True)}


def test_no_product_of_a_step_is_computed_twice() -> None:
    model = cases.llama(4, untied=True)
    expected = on_one_process(model)
    assert expected["products"] > 4 * 4 * 3 * 7, "three for each of the seven matrices of a layer"
    assert by_schedule(SCHEDULES, model) == dict.fromkeys(SCHEDULES, expected)


def test_no_product_of_tensor_parallel_stages_is_computed_twice() -> None:
    """Each of the two ranks of a stage computes its part of every product."""
    model, schedules = cases.gpt(4), ("1f1b", *sorted(ZERO_BUBBLE))
    once = on_one_process(model)
    assert by_schedule(schedules, model, tp=2) == dict.fromkeys(schedules, once + once)


@pytest.mark.long
def test_no_product_of_a_compiled_step_is_computed_twice() -> None:
    model, schedules = cases.llama(4), sorted(ZERO_BUBBLE)
    expected = on_one_process(model)
    assert by_schedule(schedules, model, compiled=True) == dict.fromkeys(schedules, expected)


def products_of(gradients: Mapping[str, torch.Tensor], loss: torch.Tensor, *wanted: str) -> int:
    with counted_products() as found:
        torch.autograd.grad(loss, [gradients[name] for name in wanted], retain_graph=True)
    return found["products"]


def test_the_output_layer_computes_the_gradient_that_is_asked_for() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = {
        name: torch.randn(rows, 5, generator=generator, dtype=torch.float64, requires_grad=True)
        for name, rows in (("hidden", 12), ("weight", 7))
    }
    labels, mask = torch.arange(12) % 7, torch.arange(12) != 3
    loss = linear_cross_entropy_sum(inputs["hidden"], inputs["weight"], labels, mask)
    assert products_of(inputs, loss, "hidden") == 1
    assert products_of(inputs, loss, "weight") == 1
    assert products_of(inputs, loss, "hidden", "weight") == 2
