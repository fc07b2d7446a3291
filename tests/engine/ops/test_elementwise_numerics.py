"""The numerics grid of the elementwise operators: operator x backend x dtype x layout of the gradients x case."""

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import run_interpreted
from torch import Tensor

from drivetrain.engine.ops.discovery import operator_named
from drivetrain.engine.ops.numerics import Upstream, grade
from drivetrain.engine.ops.operator import Backend, Case, Operator, serves_all

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    # Dynamo looks at every tensor that it meets, and hides this one warning itself, unless warnings are errors.
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"
    ),
]

NAMES = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "bias_dropout_add", "rotary", "glu")
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS: tuple[Upstream, ...] = ("dense", "expanded", "transposed")
GRID = Path(__file__).with_name("interpreted_grid.py")


def problems_of(
    operator: Operator, backend: str, cases: Iterable[Case], dtype: str, upstream: Upstream
) -> list[str]:
    """Of all cases, each with its name."""
    served_by = operator.backend(backend)
    assert served_by is not None
    found = []
    for case in cases:
        graded = grade(operator, served_by, case, getattr(torch, dtype), upstream=upstream)
        assert graded.refused is None, f"{case.name}: {graded.refused}"
        assert graded.measured or graded.problems
        found += [f"{case.name}: {problem}" for problem in graded.problems]
    return found


@pytest.mark.parametrize("upstream", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_eager_is_as_near_to_float64_as_the_reference(name: str, dtype: str, upstream: Upstream) -> None:
    operator = operator_named(name)
    assert problems_of(operator, "eager", operator.cases(), dtype, upstream) == []


QUICK = (("add_rms_norm", "odd sizes", "bfloat16"), ("glu", "silu, packed", "bfloat16"))

COMPILED = {
    "rms_norm": ("one feature", "Gemma's offset", "rounded before the weight"),
    "layer_norm": ("one dimension", "many rows", "no bias"),
    "add_rms_norm": ("no rows", "many rows", "rows of zeros", "large values", "residual in fp32"),
    "add_layer_norm": ("gaps between rows", "small values", "weight in fp32"),
    "bias_dropout_add": ("no bias", "many rows", "columns first in memory"),
    "rotary": (
        "half, 80 of 96 features",
        "half, angles in fp32",
        "interleaved, 6 of 16 features",
        "two leading dimensions",
        "inside a packed product",
    ),
    "glu": (
        "gelu_tanh, two tensors",
        "gelu_erf, packed",
        "no rows",
        "columns first in memory, packed",
        "large values, silu",
    ),
}
"""Each takes two compilations of some seconds; all cases are eager's and Triton's."""


@pytest.mark.parametrize(("name", "case", "dtype"), QUICK)
def test_compiled_code_is_as_near_to_float64_as_the_reference(name: str, case: str, dtype: str) -> None:
    operator = operator_named(name)
    cases = [one for one in operator.cases() if one.name == case]
    assert len(cases) == 1
    assert problems_of(operator, "inductor", cases, dtype, "dense") == []


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_compiled_code_passes_its_part_of_the_grid(name: str) -> None:
    operator = operator_named(name)
    cases = [case for case in operator.cases() if case.name in COMPILED[name]]
    assert len(cases) == len(COMPILED[name])
    found = []
    for number, case in enumerate(cases):
        found += problems_of(operator, "inductor", [case], DTYPES[number % 3], "dense")
    assert found == []


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("upstream", LAYOUTS[1:])
@pytest.mark.parametrize(
    ("name", "case"),
    [("add_layer_norm", "odd sizes"), ("rotary", "half, 6 of 16 features"), ("glu", "silu, packed")],
)
def test_compiled_code_reads_gradients_of_any_layout(name: str, case: str, upstream: Upstream) -> None:
    operator = operator_named(name)
    cases = [one for one in operator.cases() if one.name == case]
    assert len(cases) == 1
    assert problems_of(operator, "inductor", cases, "float32", upstream) == []


TRITON = [name for name in NAMES if operator_named(name).backend("triton") is not None]


def interpreted(calls: list[tuple[str, str, str, str]]) -> list[str]:
    """What the interpreter's process found of each call."""
    found = run_interpreted(GRID, json.dumps(calls), timeout_s=1700.0)
    assert len(found) == len(calls)
    problems = []
    for call, one in zip(calls, found, strict=True):
        assert one["refused"] is None, f"{call}: {one['refused']}"
        problems += [f"{' '.join(call)}: {problem}" for problem in one["problems"]]
        assert one["measured"] or one["problems"]
    return problems


def test_most_elementwise_operators_have_triton_kernels() -> None:
    assert TRITON == ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "rotary", "glu"]


def test_triton_kernels_are_as_near_to_float64_as_the_reference() -> None:
    calls = []
    for name in TRITON:
        for number, case in enumerate(operator_named(name).cases()):
            # All cases in one dtype each, in turn, and gradients of one layout each: more are in the long test.
            if case.name not in ("many rows", "long rows"):
                calls.append((name, case.name, DTYPES[number % 3], LAYOUTS[number // 3 % 3]))
    assert interpreted(calls) == []


@pytest.mark.long
@pytest.mark.parametrize("name", TRITON)
def test_triton_kernels_pass_every_pair_of_case_dtype_and_layout(name: str) -> None:
    calls = [
        (name, case.name, dtype, LAYOUTS[(number + place) % 3])
        for number, case in enumerate(operator_named(name).cases())
        for place, dtype in enumerate(DTYPES)
        # The interpreter takes a row at a time: these in one dtype.
        if case.name not in ("many rows", "long rows") or place == number % 3
    ]
    assert len({(dtype, upstream) for _, _, dtype, upstream in calls}) == len(DTYPES) * len(LAYOUTS)
    assert interpreted(calls) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("upstream", LAYOUTS)
@pytest.mark.parametrize("name", TRITON)
def test_triton_kernels_pass_the_whole_grid(name: str, upstream: str) -> None:
    cases = [case.name for case in operator_named(name).cases()]
    assert interpreted([(name, case, dtype, upstream) for case in cases for dtype in DTYPES]) == []


# -- references --


def small_cases(name: str) -> list[Case]:
    """Cases whose gradients can be checked by differences of single elements."""
    wanted = {
        "rms_norm": ("Gemma's offset", "large epsilon"),
        "layer_norm": ("no bias", "large epsilon"),
        "add_rms_norm": ("Gemma's offset", "one feature"),
        "add_layer_norm": ("large epsilon",),
        "bias_dropout_add": ("odd sizes", "no bias"),
        "rotary": ("half, 6 of 16 features", "interleaved, 6 of 16 features", "an odd number of features"),
        "glu": tuple(
            f"{one}, {form}"
            for one in ("silu", "gelu_tanh", "gelu_erf")
            for form in ("packed", "two tensors")
        ),
    }[name]
    cases = [case for case in operator_named(name).cases() if case.name in wanted]
    assert len(cases) == len(wanted)
    return cases


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_references_are_those_of_their_values(name: str) -> None:
    operator = operator_named(name)
    for case in small_cases(name):
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


def broken(name: str, call: Callable[..., Any]) -> list[str]:
    """Problems that the eager backend of ``name`` has when its call is replaced, in fp32."""
    operator = operator_named(name)
    eager = operator.backend("eager")
    assert eager is not None
    wrong = replace(eager, call=functools.partial(call, eager.call))
    found = []
    for case in operator.cases():
        found += grade(operator, wrong, case, torch.float32).problems
    return found


def scaled_gradient(x: Tensor, rows: Tensor) -> Tensor:
    """x, whose gradient is multiplied by ``rows``."""
    return x * rows + (x * (1 - rows)).detach()


class _LosesLastRow(torch.autograd.Function):
    """A norm whose weight's gradient leaves the last row out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = (one.detach().requires_grad_() for one in ctx.saved_tensors)
        with torch.enable_grad():
            out = torch.nn.functional.rms_norm(x, weight.shape, weight, ctx.epsilon)
            of_x, _ = torch.autograd.grad(out, (x, weight), gradient, retain_graph=True)
            partial = gradient.clone()
            partial.reshape(-1, x.shape[-1])[-1:] = 0
            _, of_weight = torch.autograd.grad(out, (x, weight), partial)
        return of_x, of_weight, None


def test_a_norm_that_forgets_its_epsilon_is_found_out() -> None:
    assert broken("rms_norm", lambda right, **given: right(**{**given, "epsilon": 0.0}))
    assert broken("layer_norm", lambda right, **given: right(**{**given, "epsilon": 0.0}))


def test_a_norm_that_forgets_its_offset_is_found_out() -> None:
    assert broken("rms_norm", lambda right, **given: right(**{**given, "offset": 0.0}))


def test_a_weight_gradient_without_one_row_is_found_out() -> None:
    def call(right: Any, **given: Any) -> Tensor:
        if set(given) != {"x", "weight"}:
            return right(**given)
        found: Tensor = _LosesLastRow.apply(given["x"], given["weight"], 1e-6)
        return found

    assert any("gradient of weight" in problem for problem in broken("rms_norm", call))


def test_a_rotation_in_the_wrong_sense_is_found_out() -> None:
    assert broken("rotary", lambda right, **given: right(**{**given, "sine": -given["sine"]}))


def test_swapped_halves_are_found_out() -> None:
    def call(right: Any, **given: Any) -> Tensor:
        if "up" in given:
            return right(**given)
        gate, up = given["gate"].chunk(2, dim=-1)
        return right(torch.cat((up, gate), dim=-1), activation=given["activation"])

    assert broken("glu", call)


def test_another_activation_is_found_out() -> None:
    def call(right: Any, **given: Any) -> Tensor:
        swapped = {"gelu_tanh": "gelu_erf"}.get(given["activation"], given["activation"])
        return right(**{**given, "activation": swapped})

    assert broken("glu", call)


def test_another_dropout_mask_is_found_out() -> None:
    assert broken("bias_dropout_add", lambda right, **given: right(**{**given, "seed": given["seed"] + 1}))


def test_a_result_written_into_an_argument_is_found_out() -> None:
    def call(right: Any, **given: Any) -> Tensor:
        out: Tensor = right(**given)
        with torch.no_grad():
            given["x"].mul_(2)
        return out

    assert any("wrote into its argument x" in problem for problem in broken("rotary", call))


def test_a_gradient_of_the_sum_that_is_lost_is_found_out() -> None:
    def call(right: Any, **given: Any) -> Any:
        out, total = right(**given)
        return out, scaled_gradient(total, torch.zeros(()))

    assert any("gradient of residual" in problem for problem in broken("add_rms_norm", call))


def test_memory_that_was_never_written_is_found_out() -> None:
    def call(right: Any, **given: Any) -> Tensor:
        out: Tensor = right(**given)
        left = torch.empty_like(out)
        left[..., : out.shape[-1] // 2] = out[..., : out.shape[-1] // 2]
        return left

    assert broken("rms_norm", call)


def test_every_elementwise_operator_is_served_eagerly_without_conditions() -> None:
    for name in NAMES:
        eager = operator_named(name).backend("eager")
        assert isinstance(eager, Backend)
        assert eager.supports is serves_all
