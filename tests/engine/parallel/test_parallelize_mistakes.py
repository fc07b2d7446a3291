"""Mistakes that no plan shows: they are named in the first step, by every rank, and not trained."""

from collections.abc import Mapping

import parallelize_cases as cases
import pytest
import torch
import torch.nn.functional as F
from parallelize_cases import CASES, DIVIDED, MATRICES, SEQUENCE, Case, Model
from torch import nn

from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.parallelize import parallelize
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.errors import ConfigurationError
from rank_processes import on_kept_ranks


def pair(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), *layers)


class SumOfColumns(nn.Module):
    """Adds up what columns give: no layer stands where the cut should end, and every shape fits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 12)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) + self.up(self.norm(x)).mean(-1, keepdim=True)


class HeadFromTable(nn.Module):
    """Logits by the table of words, read around the layer that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(self.tokens(ids % 12)), self.tokens.weight)


FORWARD: Mapping[str, tuple[Case, str]] = {
    "linear": (
        Case(lambda: pair(nn.Linear(12, 5)), {"0": "column"}, of_ids=False),
        "2 reads 12 features and gets 6: the output of 0 is cut over 2 ranks; give 2 'row' if it is a Linear",
    ),
    "norm": (
        Case(lambda: pair(nn.LayerNorm(12), nn.Linear(12, 5)), {"0": "column", "3": "row"}, of_ids=False),
        "2 reads 12 features and gets 6: the output of 0 is cut over 2 ranks",
    ),
    "column_after_column": (
        Case(lambda: pair(nn.Linear(12, 6)), {"0": "column", "2": "column"}, of_ids=False),
        "2 reads 12 features and gets 6: the output of 0 is cut over 2 ranks",
    ),
    "end": (
        Case(lambda: pair(), {"0": "column"}, of_ids=False),
        "the output of 0 is cut over 2 ranks, and until the end of the forward pass no Linear with 'row' takes it",
    ),
    "reduced_away": (
        Case(SumOfColumns, {"up": "column"}, of_ids=False),
        "the output of up is cut over 2 ranks, and until the end",
    ),
    "embedding": (
        Case(lambda: nn.Sequential(nn.Embedding(31, 12), nn.Linear(12, 5)), {"0": "column"}),
        "1 reads 12 features and gets 6: the output of 0 is cut",
    ),
    "row_of_whole": (
        Case(lambda: nn.Sequential(nn.Linear(6, 5)), {"0": "row"}, of_ids=False),
        "0 with 'row' reads its own 3 of 6 features and gets 6; what comes before it must be cut",
    ),
    "dropout_of_whole": (
        Case(
            lambda: pair(nn.Linear(12, 5, bias=False), nn.Dropout(0.3)),
            {"0": "column", "2": "row", "3": "column"},
            of_ids=False,
        ),
        "3 with 'column' takes (2, 8, 5) for this rank's part of cut features, and no layer with 'column' before it",
    ),
    "no_sequence": (
        Case(
            lambda: nn.Sequential(nn.Flatten(0, 1), nn.Embedding(31, 6), nn.LayerNorm(6)),
            {"1": "row", "2": "sequence"},
        ),
        "1 leaves (16, 6), whose dimension 1 is no sequence: the last one is features",
    ),
    "sequence_not_split": (
        Case(Model, {**MATRICES, **SEQUENCE, "positions": "replicate"}, DIVIDED),
        "blocks.0.attention_norm reads (2, 8, 16) as a part of the sequence (dimension 1), but no layer before it",
    ),
    "sequence_not_split_by_keyword": (
        Case(cases.ByKeyword, {"norm": "sequence"}),
        "norm reads (2, 8, 16) as a part of the sequence (dimension 1), but no layer before it",
    ),
    "column_of_whole_sequence": (
        Case(Model, {**MATRICES, "norm": "sequence"}, DIVIDED),
        "blocks.0.attention.query reads (2, 8, 16) as a part of the sequence (dimension 1), but no layer before it",
    ),
}

BACKWARD: Mapping[str, tuple[Case, str]] = {
    "norm_of_a_part": (
        Case(
            Model,
            {name: word for name, word in CASES["attention_sequence"].plan.items() if name != "*.mlp_norm"},
            DIVIDED,
        ),
        "the gradient of blocks.0.mlp_norm.weight differs between the 2 ranks of 'tp'",
    ),
    "norm_of_heads": (
        Case(lambda: Model(qk_norm=True), MATRICES, DIVIDED),
        "the gradient of blocks.0.attention.query_norm.",
    ),
    "weight_read_elsewhere": (
        Case(HeadFromTable, {"tokens": "row"}),
        "the gradient of norm.",
    ),
}


def message_of(case: Case, mesh: Mesh, inputs: torch.Tensor, targets: torch.Tensor | None) -> str:
    """What the first step says; without targets, the first forward pass."""
    module = cases.spread(case, mesh)[0]
    try:
        out = module(inputs)
        if targets is not None:
            F.cross_entropy(out.flatten(0, 1), targets.flatten()).backward()
    except ConfigurationError as error:
        return str(error)
    return "nothing was raised"


def forward_of_all() -> dict[str, str]:
    with cases.mesh_of_all_ranks() as mesh:
        return {
            name: message_of(case, mesh, cases.data(case)[0], None) for name, (case, _) in FORWARD.items()
        }


def backward_of_all() -> dict[str, str]:
    with cases.mesh_of_all_ranks() as mesh:
        return {name: message_of(case, mesh, *cases.data(case)) for name, (case, _) in BACKWARD.items()}


def test_a_cut_that_nothing_takes_is_named_in_the_first_forward_pass() -> None:
    for rank in on_kept_ranks(forward_of_all, 2):
        for name, (_, expected) in FORWARD.items():
            assert rank[name].startswith(expected), name


def test_a_gradient_that_the_ranks_do_not_have_alike_is_named_in_the_first_backward_pass() -> None:
    for rank in on_kept_ranks(backward_of_all, 2):
        for name, (_, expected) in BACKWARD.items():
            assert rank[name].startswith(expected), name
            assert "'sequence' if it has a part of the sequence" in rank[name]


def uneven_sequence() -> str:
    with cases.mesh_of_all_ranks() as mesh:
        return message_of(CASES["attention_sequence"], mesh, torch.zeros(2, 7, dtype=torch.int64), None)


def test_a_sequence_that_the_ranks_do_not_divide_names_the_nearest_lengths() -> None:
    for message in on_kept_ranks(uneven_sequence, 2):
        assert message == (
            "tokens: 7 positions of the sequence (dimension 1) are not divisible by 2 ranks; nearest: 6 or 8"
        )


def other_inputs(swapped: bool) -> str:
    with cases.mesh_of_all_ranks() as mesh:
        module = cases.spread(CASES["attention_ends"], mesh)[0]
        generator = torch.Generator().manual_seed(0 if swapped else mesh.index("tp"))
        inputs = torch.randint(cases.VOCABULARY, (16, cases.LENGTH), generator=generator)
        if swapped and mesh.index("tp"):
            # The same samples in another order, 64 numbers apart.
            inputs = inputs.roll(8, 0)
        with pytest.raises(ConfigurationError) as caught:
            module(inputs)
        return str(caught.value)


@pytest.mark.parametrize("swapped", [False, True])
def test_ranks_that_are_given_different_batches_say_so(swapped: bool) -> None:
    for message in on_kept_ranks(other_inputs, 2, swapped):
        assert message.startswith("the 2 ranks of 'tp' were given different inputs")


def other_modules(what: str) -> str:
    with cases.mesh_of_all_ranks() as mesh:
        torch.manual_seed(mesh.index("tp") if what == "weights" else 0)
        second = mesh.index("tp") == 1
        module = pair(nn.Linear(12, 7 if what == "shapes" and second else 5))
        plan = {"0": "column", "2": "replicate" if what == "plans" and second else "row"}
        with pytest.raises(ConfigurationError) as caught:
            parallelize(module, plan, mesh, Traffic())  # type: ignore[arg-type]
        assert type(module[0]) is nn.Linear, "it was changed"  # type: ignore[index]
        return str(caught.value)


@pytest.mark.parametrize("what", ["weights", "shapes", "plans"])
def test_ranks_that_start_from_different_modules_say_so(what: str) -> None:
    for message in on_kept_ranks(other_modules, 2, what):
        expected = (
            "different weights in 0.weight, 0.bias, 2.weight and 1 more"
            if what == "weights"
            else "different modules"
        )
        assert expected in message


def masked_batch() -> float:
    """A mask of infinities beside the ids, and a second pass without gradients before the first with them."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = cases.mlp()

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.body(x) + mask

    case = Case(Masked, {f"body.{name}": word for name, word in CASES["mlp"].plan.items()}, of_ids=False)
    with cases.mesh_of_all_ranks() as mesh:
        module = cases.spread(case, mesh)[0]
        inputs, _ = cases.data(case)
        mask = torch.zeros(5, dtype=torch.float64)
        mask[4] = -torch.inf
        with torch.no_grad():
            module(inputs, mask=mask)
        module(inputs, mask=mask).logsumexp(-1).sum().backward()
        return float(sum(value.grad.norm() for value in module.parameters() if value.grad is not None))


def test_infinities_in_a_mask_are_no_difference() -> None:
    first, second = on_kept_ranks(masked_batch, 2)
    assert first > 0
    assert second > 0
