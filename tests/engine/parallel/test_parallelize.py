"""A user's own module, cut by a plan: gradients of one process, bytes of the closed formula, planted mistakes seen."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import parallelize_cases as cases
import pytest
import torch
from parallelize_cases import BATCH, CASES, LENGTH, VOCABULARY, WIDTH
from torch import Tensor, nn

from drivetrain.engine.checkpoint.write_plan import bytes_of, describe, plan_writes
from drivetrain.engine.parallel import collectives, parallelize_layers
from drivetrain.engine.parallel import parallelize as module_of_parallelize
from drivetrain.engine.parallel.collectives import Group
from drivetrain.engine.parallel.gradient_sync import Held
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.parallelize import parallelize
from rank_processes import on_kept_ranks, on_ranks

FP64 = 8


@dataclass
class Found:
    """What one rank found out.

    Attributes:
        worst: the largest relative difference of a gradient from one process'.
        bytes: payload of the second step by kind of collective; the first one also checks.
        held: what the rank holds, as a checkpoint is told.
    """

    worst: float
    loss: float
    expected_loss: float
    bytes: dict[str, int]
    held: bytes


def found_on(case: cases.Case, mesh: Mesh, mutation: str | None = None) -> Found:
    expected_loss, expected = cases.one_process(case)
    with MUTATIONS[mutation]() if mutation else nullcontext():
        module, placements, traffic = cases.spread(case, mesh)
        loss = cases.backward(module, case)
        worst = cases.worst(cases.gradients(module), expected, placements)
        module.zero_grad()
        traffic.take()
        cases.backward(module, case, step=1)
    assert all(group == "tp" for group, _ in traffic.counts)
    sent = {kind: count.bytes for (_, kind), count in traffic.counts.items()}
    held = {name: Held(value.detach(), placements[name]) for name, value in module.named_parameters()}
    return Found(worst, loss, expected_loss, sent, describe(held))


def all_on_one_rank() -> dict[str, Found]:
    with cases.mesh_of_all_ranks() as mesh:
        return {name: found_on(case, mesh) for name, case in CASES.items()}


@cache
def all_on(ranks: int) -> list[dict[str, Found]]:
    """Every case on ``ranks`` ranks: processes are started once."""
    return on_kept_ranks(all_on_one_rank, ranks)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(name: str, ranks: int) -> None:
    for found in (rank[name] for rank in all_on(ranks)):
        assert found.worst < 1e-9
        assert found.loss == pytest.approx(found.expected_loss, rel=1e-12)


def formula(name: str, ranks: int) -> Mapping[str, int]:
    """Payload bytes of one step."""
    tokens = BATCH * LENGTH
    stream, logits = tokens * WIDTH, tokens * VOCABULARY
    columns_and_rows = 4
    if name == "mlp":
        # The output of both rows; the gradient of the second column's input: the first one's is data.
        return {"all_reduce": tokens * (8 + 5 + 8) * FP64}
    if name == "attention":
        return {"all_reduce": columns_and_rows * stream * FP64}
    if name in ("attention_ends", "tied"):
        return {"all_reduce": ((columns_and_rows + 2) * stream + logits) * FP64}
    assert name in ("attention_sequence", "whole_table_sequence", "tied_sequence")
    # Two layer norms with bias, one of root mean squares, biases of both rows, the table of positions.
    vectors = 2 * 2 * WIDTH + WIDTH + 2 * WIDTH + LENGTH * WIDTH
    split = columns_and_rows + 2
    if name == "whole_table_sequence":
        vectors += VOCABULARY * WIDTH
        split -= 1
    return {
        "all_reduce": (logits + vectors) * FP64,
        "reduce_scatter": split * stream * FP64,
        "all_gather": split * stream // ranks * FP64,
    }


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "attention",
        "attention_ends",
        "tied",
        "attention_sequence",
        "whole_table_sequence",
        "tied_sequence",
    ],
)
def test_what_travels_in_a_step_is_what_the_formula_says(name: str, ranks: int) -> None:
    for rank in all_on(ranks):
        assert rank[name].bytes == formula(name, ranks)


@pytest.mark.parametrize("name", ["attention_sequence", "tied"])
def test_the_ranks_together_hold_every_element_once_or_alike(name: str) -> None:
    plan = plan_writes([rank[name].held for rank in all_on(2)])
    whole = {key: tuple(value.shape) for key, value in cases.build(CASES[name]).named_parameters()}
    assert {key: tensor.shape for key, tensor in plan.whole.items()} == whole
    assert plan.uncovered == ()
    assert bytes_of(plan.whole) == FP64 * sum(torch.Size(shape).numel() for shape in whole.values())
    cut = [key for key in whole if sum(key in written for written in plan.written_by) == 2]
    assert "blocks.0.attention.query.bias" in cut
    assert "blocks.0.down.weight" in cut
    assert "tokens.weight" in cut
    assert "blocks.0.down.bias" not in cut


@contextmanager
def patched(**names: object) -> Iterator[None]:
    """Other functions in the place of collectives, and no comparison of the first gradients: it would come first."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(module_of_parallelize, "FirstStep", lambda *_: None))
        for name, function in names.items():
            stack.enter_context(patch.object(parallelize_layers, name, function))
        yield


def unchanged(x: Tensor, group: Group, *_: object) -> Tensor:
    return x


def summed_twice(x: Tensor, group: Group) -> Tensor:
    return collectives._pair(x, group.all_reduce, group.all_reduce)


def gathered_without_sum(x: Tensor, group: Group, dim: int) -> Tensor:
    """As where all ranks computed alike from here on: backward takes the own part."""

    def own(whole: Tensor) -> Tensor:
        return whole.chunk(group.size, dim)[group.index]

    return collectives._pair(x, lambda part: group.all_gather(part, dim), own)


@contextmanager
def bias_on_every_rank() -> Iterator[None]:
    """A row's bias is added to each summand."""

    def forward(self: parallelize_layers.RowLinear, x: Tensor) -> Tensor:
        out = nn.functional.linear(x, self.weight, self.bias)
        return parallelize_layers.leave(self._flow, out, self._name)

    with patched(), patch.object(parallelize_layers.RowLinear, "forward", forward):
        yield


@contextmanager
def mask_of_the_first_rank() -> Iterator[None]:
    with patched(), patch.object(parallelize_layers.PartOfDropout, "forward", nn.Dropout.forward):
        yield


MUTATIONS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "row_not_summed": lambda: patched(summed=unchanged),
    "sum_differentiated_as_a_sum": lambda: patched(summed=summed_twice),
    "copies_not_summed": lambda: patched(copied=unchanged),
    "gathered_not_summed": lambda: patched(gathered=gathered_without_sum),
    "bias_on_every_rank": bias_on_every_rank,
    "mask_of_the_first_rank": mask_of_the_first_rank,
    "none": lambda: patched(),
}


PLANTED = [
    ("row_not_summed", "mlp"),
    ("row_not_summed", "attention"),
    ("sum_differentiated_as_a_sum", "attention"),
    ("copies_not_summed", "mlp"),
    ("copies_not_summed", "attention_sequence"),
    ("copies_not_summed", "head_norm"),
    ("gathered_not_summed", "attention_sequence"),
    ("bias_on_every_rank", "mlp"),
    ("bias_on_every_rank", "attention_sequence"),
    ("mask_of_the_first_rank", "dropout"),
    ("mask_of_the_first_rank", "dropout_sequence"),
]


def planted_on_one_rank() -> dict[tuple[str, str], float]:
    with cases.mesh_of_all_ranks() as mesh:
        return {
            (mutation, name): found_on(CASES[name], mesh, mutation).worst
            for mutation, name in [*PLANTED, ("none", "attention_sequence")]
        }


@cache
def planted() -> list[dict[tuple[str, str], float]]:
    """Every mistake on two ranks."""
    return on_kept_ranks(planted_on_one_rank, 2)


@pytest.mark.parametrize(("mutation", "name"), PLANTED)
def test_a_planted_mistake_is_seen(mutation: str, name: str) -> None:
    assert max(rank[mutation, name] for rank in planted()) > 1e-3


def test_what_plants_a_mistake_plants_none_by_itself() -> None:
    assert max(rank["none", "attention_sequence"] for rank in planted()) < 1e-9


def compiled(name: str) -> Found:
    case = CASES[name]
    with cases.mesh_of_all_ranks() as mesh:
        expected_loss, expected = cases.one_process(case)
        module, placements, traffic = cases.spread(case, mesh)
        assert isinstance(module, cases.Model)
        for block in module.blocks:
            block.compile(backend="aot_eager")
        loss = cases.backward(module, case)
        worst = cases.worst(cases.gradients(module), expected, placements)
        traffic.take()
        cases.backward(module, case, step=1)
        sent = {kind: count.bytes for (_, kind), count in traffic.counts.items()}
        return Found(worst, loss, expected_loss, sent, b"")


@pytest.mark.long
@pytest.mark.parametrize("name", ["attention_ends", "attention_sequence"])
def test_compiled_blocks_have_the_same_gradients_and_traffic(name: str) -> None:
    for rank in on_ranks(compiled, 2, name, timeout=600):
        assert rank.worst < 1e-9
        assert rank.bytes == formula(name, 2)


def weights_made_after_the_cut() -> tuple[list[tuple[str, tuple[int, ...]]], float]:
    """Shapes are cut on the meta device; weights are then made and filled by what the placements say."""
    case = CASES["attention_sequence"]
    with cases.mesh_of_all_ranks() as mesh:
        _, expected = cases.one_process(case)
        whole = dict(cases.build(case).named_parameters())
        with torch.device("meta"):
            module = case.build().double()
        placements = parallelize(module, case.plan, mesh, cases.Traffic(), divided=case.divided)
        shapes = [(name, tuple(value.shape)) for name, value in module.named_parameters()]
        module.to_empty(device="cpu")
        with torch.no_grad():
            for name, value in module.named_parameters():
                value.copy_(whole[name][placements[name].slices()])
        cases.backward(module, case)
        return shapes, cases.worst(cases.gradients(module), expected, placements)


def test_a_module_without_weights_is_cut_by_its_shapes_alone() -> None:
    for shapes, worst in on_kept_ranks(weights_made_after_the_cut, 2):
        assert ("blocks.0.up.weight", (3 * WIDTH // 2, WIDTH)) in shapes
        assert worst < 1e-9


def kept_after_a_step(name: str) -> tuple[bool, bool]:
    """Whether what columns entered by outlives their parent's forward; whether a norm's code holds weights too."""
    case = CASES[name]
    with cases.mesh_of_all_ranks() as mesh:
        module, _, _ = cases.spread(case, mesh)
        cases.backward(module, case)
        assert isinstance(module, cases.Model)
        block = module.blocks[0]
        held = [layer._entrance._last for layer in (block.attention.query, block.up)]
        (code,) = block.mlp_norm._code
        return any(one is not None for one in held), not all(one.is_meta for one in code.parameters())


def test_nothing_of_a_forward_pass_is_kept_and_no_weight_twice() -> None:
    assert on_kept_ranks(kept_after_a_step, 2, "attention_sequence") == [(False, False)] * 2


def the_docs_example(text: str) -> list[tuple[str, tuple[int, ...]]]:
    names: dict[str, object] = {}
    exec(compile(text, "docs/parallelize.md", "exec"), names)
    module = names["model"]
    assert isinstance(module, nn.Module)
    return [(name, tuple(value.shape)) for name, value in module.named_parameters()]


def test_the_example_of_the_docs_runs() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "parallelize.md").read_text(encoding="utf-8")
    text = page.split("```python\n", 1)[1].split("```", 1)[0]
    for rank in on_kept_ranks(the_docs_example, 2, text):
        assert dict(rank)["up.weight"] == (32, 16)
        assert dict(rank)["down.weight"] == (16, 32)
