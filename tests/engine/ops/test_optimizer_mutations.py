"""What the grids of ``adamw`` and ``gradient_clip`` find: each way of being wrong, in a backend wrong in that alone."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from adamw_examples import LISTS
from torch import Tensor, nn

from drivetrain.engine.ops import adamw, gradient_clip
from drivetrain.engine.ops.discovery import operator_named
from drivetrain.engine.ops.numerics import Grade, grade


def graded(name: str, call: Callable[..., Any], case_name: str, dtype: torch.dtype = torch.float32) -> Grade:
    """Of the eager backend with ``call`` in its place, on one case."""
    operator = operator_named(name)
    eager = operator.backend("eager")
    assert eager is not None
    case = next(case for case in operator.cases() if case.name == case_name)
    return grade(operator, replace(eager, call=call), case, dtype)


def broken(name: str, call: Callable[..., Any]) -> list[str]:
    """Problems in fp32 of a backend that computes ``call(eager, **arguments)``."""
    operator = operator_named(name)
    eager = operator.backend("eager")
    assert eager is not None
    found = []
    for case in operator.cases():
        if case.name not in ("many elements", "many tensors"):
            problems = graded(name, functools.partial(call, eager.call), case.name).problems
            found += [f"{case.name}: {problem}" for problem in problems]
    return found


def with_changed(**changes: Callable[[Any], Any]) -> Callable[..., Any]:
    def call(right: Callable[..., Any], **given: Any) -> Any:
        return right(**{**given, **{name: change(given[name]) for name, change in changes.items()}})

    return call


@pytest.mark.parametrize(
    "wrong",
    [
        with_changed(step=lambda step: step + 1),
        with_changed(step=lambda step: step + 10**9),
        with_changed(beta1=lambda beta: beta * 0.999),
        with_changed(beta2=lambda beta: beta * 0.999),
        with_changed(epsilon=lambda epsilon: epsilon * 1.01),
        with_changed(weight_decay=lambda decay: decay * 0.99),
        with_changed(learning_rate=lambda rate: rate * 1.0001),
        with_changed(gradients=lambda gradients: tuple(-one for one in gradients)),
        with_changed(second_moments=lambda moments: tuple(one.sqrt() for one in moments)),
    ],
)
def test_an_update_with_another_number_is_found_out(wrong: Callable[..., Any]) -> None:
    assert broken("adamw", wrong)


def test_a_decay_that_goes_through_the_gradient_is_found_out() -> None:
    def coupled(right: Callable[..., Any], **given: Any) -> Any:
        decay = given["weight_decay"]
        gradients = [one + decay * p for one, p in zip(given["gradients"], given["parameters"], strict=True)]
        return right(**{**given, "gradients": gradients, "weight_decay": 0.0})

    assert broken("adamw", coupled)


def test_an_element_at_the_end_that_is_left_out_is_found_out() -> None:
    def call(right: Callable[..., Any], **given: Any) -> Any:
        found = right(**given)
        found[1].view(-1)[-1:] = given["parameters"][-1 if len(found) == 3 else 1].reshape(-1)[-1:]
        return found

    assert any("output 1" in problem for problem in broken("adamw", call))


def test_an_update_in_place_is_found_out_and_its_tensor_named() -> None:
    def call(right: Callable[..., Any], **given: Any) -> Any:
        found = right(**given)
        given["parameters"][-1].copy_(found[len(given["parameters"]) - 1])
        return found

    problems = broken("adamw", call)
    assert any("it wrote into its argument parameters[2]" in problem for problem in problems)


def unprepared(*, fused: bool, **given: Any) -> Any:
    """Torch's update of copies that keep their dtypes and strides."""
    lists = [[one.clone() for one in given[name]] for name in LISTS]
    adamw.torch_adamw(
        *lists,
        [],
        [given["step"].float() - 1 for _ in lists[0]],
        foreach=False,
        fused=fused,
        lr=given["learning_rate"].item(),
        beta1=given["beta1"],
        beta2=given["beta2"],
        weight_decay=given["weight_decay"],
        eps=given["epsilon"],
        amsgrad=False,
        maximize=False,
    )
    return (*lists[0], *lists[2], *lists[3])


def test_torchs_fused_kernel_takes_elements_in_the_order_of_memory() -> None:
    """pytorch/pytorch issue 106951: refused on CUDA, and on a CPU wrong without a word. The backend copies."""
    raw = functools.partial(unprepared, fused=True)
    assert graded("adamw", raw, "odd sizes").passed
    for case in ("gradients with columns first in memory", "moments with columns first in memory"):
        assert any("output 0: relative error" in problem for problem in graded("adamw", raw, case).problems)


def test_torchs_update_term_by_term_is_not_right_in_16_bits() -> None:
    """Why eager and foreach compute those in fp32."""
    raw = functools.partial(unprepared, fused=False)
    assert graded("adamw", raw, "rows of zeros").passed
    of_zeros = graded("adamw", raw, "rows of zeros", torch.float16).problems
    assert any("not finite" in problem for problem in of_zeros), "epsilon becomes 0, and 0 / 0"
    assert graded("adamw", raw, "one element", torch.bfloat16).problems


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda norm, bound: bound / (norm + 1e-6), id="scales up"),
        pytest.param(lambda norm, bound: (bound / norm).clamp(max=1.0), id="no epsilon"),
        pytest.param(lambda norm, bound: (bound / (norm + 1e-6)).clamp(max=1.0), id="bad norms count"),
        pytest.param(lambda norm, bound: torch.ones_like(norm), id="never clips"),
    ],
)
def test_another_factor_is_found_out(wrong: Callable[[Tensor, float], Tensor]) -> None:
    def call(right: Callable[..., Any], gradients: Any, max_norm: float) -> Any:
        *_, norm, _ = right(gradients=gradients, max_norm=max_norm)
        factor = wrong(norm, max_norm)
        return (*(one * factor for one in gradients), norm, factor)

    assert broken("gradient_clip", call)


def test_clipping_tensor_by_tensor_is_found_out() -> None:
    def call(right: Callable[..., Any], gradients: Any, max_norm: float) -> Any:
        *_, norm, factor = right(gradients=gradients, max_norm=max_norm)
        alone = [right(gradients=[one], max_norm=max_norm)[0] for one in gradients]
        return (*alone, norm, factor)

    assert broken("gradient_clip", call)


def test_the_norm_that_torch_takes_in_fp32_on_a_cpu_is_found_out() -> None:
    def call(gradients: Any, max_norm: float) -> Any:
        norm = nn.utils.get_total_norm(gradients)
        factor = gradient_clip.clip_coefficient(norm, max_norm)
        return (*(one * factor for one in gradients), norm, factor)

    assert graded("gradient_clip", call, "above the bound").passed
    assert graded("gradient_clip", call, "many elements").problems
