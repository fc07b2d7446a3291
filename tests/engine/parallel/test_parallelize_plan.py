"""A plan that does not fit the module: every problem at once, with what would be right, and nothing changed."""

from collections.abc import Mapping

import parallelize_cases as cases
import pytest
import torch
from parallelize_cases import DIVIDED, ENDS, MATRICES, SEQUENCE, Model
from torch import nn
from torch.nn.utils import parametrizations

from drivetrain.config.layout import Layout
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.parallelize import parallelize
from drivetrain.engine.parallel.parallelize_plan import Planned, read_plan
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.errors import ConfigurationError


def problems(
    module: nn.Module, plan: Mapping[str, str], size: int = 2, divided: tuple[str, ...] = ()
) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        read_plan(module, plan, size, divided)  # type: ignore[arg-type]
    return caught.value.problems


def read(module: nn.Module, plan: Mapping[str, str], divided: tuple[str, ...] = ()) -> Planned:
    return read_plan(module, plan, 2, divided)  # type: ignore[arg-type]


def test_a_star_stands_for_numbers_and_for_dots() -> None:
    model = Model(blocks=2)
    expected = {"blocks.0.up": "column", "blocks.1.up": "column"}
    assert read(model, {"blocks.*.up": "column"}).words == expected
    assert read(model, {"*.up": "column"}).words == expected
    assert read(model, {"blocks.[1-9].up": "column"}).words == {"blocks.1.up": "column"}


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("blocks.*.upp", "blocks.*.up"),
        ("blocks.0.atention.query", "blocks.0.attention.query"),
        ("*.quary", "*.query"),
        ("token", "tokens"),
    ],
)
def test_a_pattern_that_matches_nothing_names_the_nearest(pattern: str, nearest: str) -> None:
    (problem,) = problems(Model(), {pattern: "column"})
    assert problem.startswith(f"plan['{pattern}'] matches no submodule; nearest: ")
    assert nearest in problem.split("nearest: ")[1].split(", ")


def test_a_pattern_like_nothing_names_nothing() -> None:
    assert problems(Model(), {"zzzz": "row"}) == ("plan['zzzz'] matches no submodule",)


def test_the_whole_module_is_no_submodule() -> None:
    assert problems(nn.Linear(4, 4), {"*": "column"}) == ("plan['*'] matches no submodule",)


def test_an_unknown_word_names_the_nearest() -> None:
    (problem,) = problems(Model(), {"*.up": "colum"})
    assert "plan['*.up'] is 'colum'" in problem
    assert problem.endswith("nearest: 'column'")


def test_two_words_for_one_module_are_refused_and_one_word_twice_is_not() -> None:
    (problem,) = problems(Model(), {"*.up": "column", "blocks.0.*p": "row"})
    assert problem.startswith("blocks.0.up is matched by '*.up' ('column') and by 'blocks.0.*p' ('row')")
    assert read(Model(), {"*.up": "column", "blocks.0.up": "column"}).words == {"blocks.0.up": "column"}


@pytest.mark.parametrize(
    ("module", "word", "legal"),
    [
        (nn.LayerNorm(4), "column", "'sequence', 'shared', 'replicate'"),
        (nn.Conv1d(4, 4, 1), "row", "'sequence', 'shared', 'replicate'"),
        (nn.Embedding(4, 4), "column_gathered", "'column', 'row', 'sequence', 'shared', 'replicate'"),
        (nn.Dropout(), "row", "'column', 'sequence', 'replicate'"),
        # A linear layer whose weight others read: its forward is never called.
        (nn.MultiheadAttention(4, 2).out_proj, "row", "'sequence', 'shared', 'replicate'"),
        (parametrizations.weight_norm(nn.Linear(4, 4)), "row", "'sequence', 'shared', 'replicate'"),
    ],
)
def test_a_type_that_cannot_be_cut_names_the_words_it_can_have(
    module: nn.Module, word: str, legal: str
) -> None:
    (problem,) = problems(nn.Sequential(module), {"0": word})
    assert problem == f"0 is a {type(module).__name__}, which cannot have '{word}'; legal are {legal}"


@pytest.mark.parametrize(
    ("module", "word", "size", "expected"),
    [
        (
            nn.Linear(6, 10),
            "column",
            4,
            "10 output features, which 4 ranks do not divide for 'column'; nearest: 8 or 12",
        ),
        (
            nn.Linear(10, 6),
            "row",
            4,
            "10 input features, which 4 ranks do not divide for 'row'; nearest: 8 or 12",
        ),
        (
            nn.Embedding(9, 5),
            "column",
            2,
            "5 features, which 2 ranks do not divide for 'column'; nearest: 4 or 6",
        ),
        (nn.Embedding(3, 4), "row", 4, "3 rows, fewer than the 4 ranks that 'row' spreads them over"),
        (nn.Linear(4, 3), "column_gathered", 4, "3 output features, fewer than the 4 ranks"),
    ],
)
def test_sizes_that_cannot_be_cut_name_the_nearest(
    module: nn.Module, word: str, size: int, expected: str
) -> None:
    (problem,) = problems(nn.Sequential(module), {"0": word}, size)
    assert problem.startswith(f"0 has {expected}")


def test_rows_of_a_vocabulary_and_joined_outputs_need_not_be_divisible() -> None:
    module = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9))
    assert read(module, {"0": "row", "1": "column_gathered"}).words == {"0": "row", "1": "column_gathered"}


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_options_of_an_embedding_that_need_the_whole_table_are_refused(option: dict[str, object]) -> None:
    (problem,) = problems(nn.Sequential(nn.Embedding(8, 4, **option)), {"0": "row"})  # type: ignore[arg-type]
    assert "max_norm, scale_grad_by_freq or sparse" in problem


def test_hooks_that_would_be_lost_are_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].register_forward_hook(lambda *_: None)
    (problem,) = problems(module, {"0": "column"})
    assert problem.startswith("0 has hooks")
    assert read(module, {"0": "replicate"}).words == {"0": "replicate"}
    block = nn.Sequential(nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.1)))
    block[0][1].register_forward_hook(lambda *_: None)
    (problem,) = problems(block, {"0": "sequence"})
    assert problem.startswith("0.1 has hooks"), "dropout is replaced in a module with sequence too"
    assert read(block, {"0": "shared"}).words == {"0": "shared"}


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"tokens": "row"}, "'row' for tokens and 'replicate' for head"),
        ({"tokens": "column", "head": "column"}, "'column' for tokens and 'column' for head"),
        ({"head": "row"}, "'replicate' for tokens and 'row' for head"),
    ],
)
def test_a_tied_parameter_that_would_be_cut_in_two_ways_is_refused(plan: dict[str, str], said: str) -> None:
    # 31 words are not divisible as the features of a column are: that is told besides.
    assert problems(Model(tied=True), plan)[-1] == (
        f"tokens.weight and head.weight are one parameter, but the plan cuts it in several ways: {said}"
    )


def test_a_tied_parameter_that_is_cut_in_one_way_is_not_refused() -> None:
    assert len(read(Model(tied=True), ENDS).words) == 2


def test_one_module_under_two_names_has_one_word() -> None:
    norm = nn.LayerNorm(4)
    module = nn.ModuleDict({"first": norm, "second": norm})
    (problem,) = problems(module, {"first": "sequence"})
    assert problem == (
        "first and second are one module, but the plan says 'sequence' for first and 'replicate' for second"
    )
    assert read(module, {"*": "sequence"}).words == {"first": "sequence", "second": "sequence"}


def test_a_word_for_a_module_covers_what_is_in_it() -> None:
    module = nn.Sequential(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))
    assert read(module, {"0*": "sequence"}).words == {"0": "sequence"}
    (problem,) = problems(module, {"0": "sequence", "0.1": "column"})
    assert problem == "0.1 has 'column' and is in 0, which has 'sequence' for all that is in it"


@pytest.mark.parametrize("size", [1, 2])
def test_a_module_without_parameters_is_refused(size: int) -> None:
    (problem,) = problems(nn.Sequential(nn.GELU()), {"0": "sequence"}, size)
    assert problem.startswith("the module (Sequential) has no parameters")
    frozen = nn.Sequential(nn.Linear(4, 4).requires_grad_(False))
    assert read_plan(frozen, {"0": "column"}, size, ()).words == {"0": "column"}


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (
            nn.BatchNorm1d(4),
            "0 is a BatchNorm1d, whose statistics would be those of a rank's part of the sequence",
        ),
        (
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)),
            "0.1 is a BatchNorm1d, whose statistics would be those of a rank's part",
        ),
        (nn.InstanceNorm1d(4), "0 is a InstanceNorm1d, which takes its statistics over the sequence"),
        (nn.GroupNorm(2, 4), "0 is a GroupNorm, which takes its statistics over the sequence"),
        (nn.Conv1d(4, 4, 3, padding=1), "0 is a Conv1d, which reads several positions at once"),
        (nn.GRU(4, 4), "0 is a GRU, which reads several positions at once"),
        (nn.MultiheadAttention(4, 2), "0 is a MultiheadAttention, which reads several positions at once"),
    ],
)
def test_what_computes_otherwise_for_a_part_of_the_sequence_cannot_have_sequence(
    inner: nn.Module, expected: str
) -> None:
    module = nn.Sequential(inner, nn.Linear(4, 4))
    (problem,) = problems(module, {"0": "sequence"})
    assert problem.startswith(expected)
    assert problem.endswith("a plan without 'sequence'")
    assert read(module, {"0": "replicate"}).words == {"0": "replicate"}


@pytest.mark.parametrize(
    "inner",
    [
        nn.Conv1d(4, 4, 1),
        # Code of its own may reshape before them.
        nn.Sequential(nn.Unflatten(-1, (1, 4)), nn.Conv1d(1, 1, 3, padding=1)),
        nn.Sequential(nn.Flatten(0, 1), nn.GroupNorm(2, 4)),
    ],
)
def test_what_may_work_position_by_position_can_have_sequence(inner: nn.Module) -> None:
    assert read(nn.Sequential(inner), {"0": "sequence"}).words == {"0": "sequence"}


def test_one_text_in_the_place_of_a_list_is_not_read_letter_by_letter() -> None:
    (problem,) = problems(Model(blocks=1), {}, divided="blocks.*.attention.heads")  # type: ignore[arg-type]
    assert problem.endswith("use ['blocks.*.attention.heads']")


def test_counts_are_divided_and_those_that_cannot_be_are_refused() -> None:
    model = Model(blocks=2)
    assert [(name, value) for _, name, value in read(model, {}, DIVIDED).divided] == [
        ("heads", 2),
        ("heads", 2),
    ]
    (problem,) = problems(Model(), {}, 3, DIVIDED)
    assert problem == "divided: blocks.0.attention.heads is 4, which 3 ranks do not divide; nearest: 3 or 6"
    (problem,) = problems(Model(), {}, 2, ("blocks.*.attention.head",))
    assert problem == (
        "divided: 'blocks.*.attention.head' matches no integer attribute; nearest: blocks.*.attention.heads"
    )
    # What torch counts itself is set when a layer is cut.
    assert problems(Model(), {}, 2, ("*.in_features",))


def test_all_problems_are_told_together_and_nothing_is_changed() -> None:
    model = Model()
    before = {name: (type(module), vars(module).copy()) for name, module in model.named_modules()}
    shapes = {name: value.shape for name, value in model.named_parameters()}
    # Nobody is asked: a mesh of two ranks that has no groups.
    mesh = Mesh(Layout(tp=2), 0, None)
    plan = {**MATRICES, **SEQUENCE, "*.up": "row", "norm": "column", "nothing": "row"}
    with pytest.raises(ConfigurationError) as caught:
        parallelize(model, plan, mesh, Traffic(), divided=("*.headz",))  # type: ignore[arg-type]
    assert len(caught.value.problems) == 3
    assert before == {name: (type(module), vars(module).copy()) for name, module in model.named_modules()}
    assert shapes == {name: value.shape for name, value in model.named_parameters()}


def test_the_dimension_of_the_sequence_is_counted_from_the_front() -> None:
    plan: dict[str, str] = {"norm": "sequence"}
    with pytest.raises(ConfigurationError, match="sequence_dim = -2: it is counted from 0; nearest: 0"):
        parallelize(Model(), plan, Mesh(Layout(tp=2), 0, None), Traffic(), sequence_dim=-2)  # type: ignore[arg-type]


def test_on_one_rank_the_module_stays_as_it_is() -> None:
    case = cases.CASES["attention_sequence"]
    module = cases.build(case)
    kinds = [type(one) for one in module.modules()]
    placements = parallelize(module, case.plan, Mesh(Layout(), 0, None), Traffic(), divided=case.divided)
    assert kinds == [type(one) for one in module.modules()]
    assert {name: place.full_shape for name, place in placements.items()} == {
        name: tuple(value.shape) for name, value in module.named_parameters()
    }
    assert all(not place.shards for place in placements.values())
    assert torch.isfinite(torch.tensor(cases.backward(module, case)))
