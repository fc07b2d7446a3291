"""The numerics grid of the operators around matrix products: operator x backend x dtype x layout x case."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.engine.ops.discovery import operator_named
from drivetrain.engine.ops.numerics import Upstream, grade
from drivetrain.engine.ops.operator import Case

pytestmark = [
    # Torch's own, when Inductor is imported.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    # Dynamo makes an object of what it traces.
    pytest.mark.filterwarnings(
        "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
    ),
    # Dynamo looks at every tensor that it meets, and hides this one warning itself, unless warnings are errors.
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"
    ),
]

BACKENDS = (
    ("linear_cross_entropy", "eager"),
    ("linear_cross_entropy", "chunked"),
    ("linear_cross_entropy", "in_place"),
    ("grouped_product", "eager"),
    ("grouped_product", "torch_grouped_mm"),
    ("linear", "eager"),
    ("linear", "transposed_gradient"),
    ("qkv_product", "eager"),
    ("qkv_product", "joined"),
    ("gate_up_product", "eager"),
    ("gate_up_product", "joined"),
)
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS: tuple[Upstream, ...] = ("dense", "expanded", "transposed")
OPTIONS_OF_CHUNKS = {
    "a row at a time",
    "chunks that do not divide the rows",
    "a chunk larger than all rows",
    "z-loss",
    "everything ignored",
    "a weight for each token",
    "large logits",
    "small logits",
    "columns first in memory",
    "gaps between rows",
}
REFUSED = {
    ("linear_cross_entropy", "in_place"): dict.fromkeys(DTYPES, OPTIONS_OF_CHUNKS),
    ("grouped_product", "torch_grouped_mm"): {dtype: {"sizes that are not aligned"} for dtype in DTYPES},
    ("linear", "transposed_gradient"): {
        dtype: {case.name for case in operator_named("linear").cases()} for dtype in ("float32", "float16")
    },
}
"""Calls that a backend does not serve, by dtype. Every other call has to be served."""


def problems_of(name: str, backend: str, cases: Iterable[Case], dtype: str, upstream: Upstream) -> list[str]:
    """Of all cases, each with its name; also a case that is refused against what is promised."""
    operator = operator_named(name)
    served_by = operator.backend(backend)
    assert served_by is not None
    found = []
    for case in cases:
        graded = grade(operator, served_by, case, getattr(torch, dtype), upstream=upstream)
        refused = case.name in REFUSED.get((name, backend), {}).get(dtype, ())
        assert (graded.refused is not None) == refused, f"{case.name}: {graded.refused}"
        assert graded.measured or graded.problems or refused
        found += [f"{case.name}: {problem}" for problem in graded.problems]
    return found


@pytest.mark.parametrize("upstream", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_a_backend_is_as_near_to_float64_as_the_reference(
    name: str, backend: str, dtype: str, upstream: Upstream
) -> None:
    assert problems_of(name, backend, operator_named(name).cases(), dtype, upstream) == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=pytest.mark.long if dtype == "bfloat16" else pytest.mark.exhaustive)
        for dtype in DTYPES
    ],
)
def test_compiled_cross_entropy_passes_the_whole_grid(dtype: str) -> None:
    cases = operator_named("linear_cross_entropy").cases()
    assert problems_of("linear_cross_entropy", "inductor", cases, dtype, "dense") == []


@pytest.mark.timeout(1800)
def test_compiled_cross_entropy_is_as_near_to_float64_as_the_reference() -> None:
    cases = [
        case
        for case in operator_named("linear_cross_entropy").cases()
        if case.name == "a weight for each token"
    ]
    assert len(cases) == 1
    assert problems_of("linear_cross_entropy", "inductor", cases, "bfloat16", "dense") == []


def test_all_backends_that_run_here_are_in_the_grid() -> None:
    names = {name for name, _ in BACKENDS}
    there = {
        (name, backend.name)
        for name in names
        for backend in operator_named(name).backends
        if "cpu" in backend.ran_on
    }
    assert there == {*BACKENDS, ("linear_cross_entropy", "inductor")}


SMALL = {
    "linear_cross_entropy": ("a weight for each token", "z-loss", "everything ignored"),
    "grouped_product": ("empty experts", "rows past the last expert", "one expert, rows past it"),
    "linear": ("bias", "one output"),
    "qkv_product": ("odd sizes",),
    "gate_up_product": ("odd sizes",),
}


@pytest.mark.parametrize("name", list(SMALL))
def test_gradients_of_references_are_those_of_their_values(name: str) -> None:
    operator = operator_named(name)
    cases = [case for case in operator.cases() if case.name in SMALL[name]]
    assert len(cases) == len(SMALL[name])
    for case in cases:
        given = case.make(torch.float64, torch.Generator().manual_seed(0))
        wanted = {
            key: value for key, value in given.items() if isinstance(value, Tensor) and value.requires_grad
        }

        def call(
            *values: Tensor, given: dict[str, Any] = given, names: tuple[str, ...] = tuple(wanted)
        ) -> Any:
            return operator.reference(**{**given, **dict(zip(names, values, strict=True))})

        assert torch.autograd.gradcheck(call, tuple(wanted.values()), fast_mode=True), case.name


# -- the grid finds what is wrong --


def broken(
    name: str, backend: str, call: Callable[..., Any], dtype: torch.dtype = torch.float32
) -> list[str]:
    """Problems that a backend has when its call is replaced."""
    operator = operator_named(name)
    right = operator.backend(backend)
    assert right is not None
    wrong = replace(right, call=functools.partial(call, right.call))
    return [problem for case in operator.cases() for problem in grade(operator, wrong, case, dtype).problems]


def test_a_forgotten_z_loss_is_found_out() -> None:
    assert broken("linear_cross_entropy", "chunked", lambda right, **given: right(**{**given, "z_loss": 0.0}))


def test_forgotten_weights_of_tokens_are_found_out() -> None:
    assert broken(
        "linear_cross_entropy", "chunked", lambda right, **given: right(**{**given, "token_weights": None})
    )


def test_a_count_of_all_tokens_is_found_out() -> None:
    def call(right: Any, **given: Any) -> Any:
        total, count = right(**given)
        return total, torch.full_like(count, float(given["labels"].shape[0]))

    assert any("output 1" in problem for problem in broken("linear_cross_entropy", "chunked", call))


def test_a_last_chunk_that_is_lost_is_found_out() -> None:
    def call(right: Any, **given: Any) -> Any:
        labels = given["labels"].clone()
        labels[10:] = given.get("ignore_index", -100)
        return right(**{**given, "labels": labels})

    assert any("gradient of weight" in problem for problem in broken("linear_cross_entropy", "chunked", call))


def test_rows_read_one_expert_too_early_are_found_out() -> None:
    def call(right: Any, **given: Any) -> Any:
        return right(**{**given, "ends": (given["ends"] - 1).clamp(min=0)})

    assert broken("grouped_product", "eager", call)


def test_keys_in_the_place_of_values_are_found_out() -> None:
    def call(right: Any, **given: Any) -> Any:
        query, key, value = right(**given)
        return query, value, key

    assert broken("qkv_product", "joined", call)


def test_a_bias_that_is_left_out_is_found_out() -> None:
    def call(right: Any, **given: Any) -> Any:
        y = right(**{**given, "bias": None})
        return y if given.get("bias") is None else y + 0 * given["bias"]

    assert broken("linear", "transposed_gradient", call, torch.bfloat16)
