"""What every backend of the elementwise operators has to do, beyond its numerics: each a function of a backend's name.

Used by tests in their own process, and for Triton by a script in the interpreter's. Each stands for a bug that
libraries of fused operators have had.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drivetrain.engine.ops.discovery import operator_named
from drivetrain.engine.ops.operator import Outputs
from drivetrain.engine.ops.selection import Selection

__all__ = ["BEHAVIOURS", "CALLS", "a_gradient_of_a_gradient_is_refused", "call_of"]

CALLS: dict[str, str] = {
    "rms_norm": "Gemma's offset",
    "layer_norm": "large epsilon",
    "add_rms_norm": "Gemma's offset",
    "add_layer_norm": "large epsilon",
    "bias_dropout_add": "odd sizes",
    "rotary": "half, 6 of 16 features",
    "glu": "gelu_tanh, packed",
}
"""A call of each operator, by the name of its case."""

Given = dict[str, Any]


def call_of(name: str, backend: str) -> tuple[Callable[..., Outputs], Given]:
    """The operator as a function of its arguments, and arguments."""
    operator = operator_named(name)
    case = next(case for case in operator.cases() if case.name == CALLS[name])
    selection = Selection(requested={name: backend})

    def call(**given: Any) -> Outputs:
        return selection.call(operator, **given)

    return call, case.make(torch.float32, torch.Generator().manual_seed(7))


def leaves_of(given: Given) -> list[Tensor]:
    """Arguments whose gradients are wanted."""
    return [value for value in given.values() if isinstance(value, Tensor) and value.requires_grad]


def tensors(outputs: Outputs) -> tuple[Tensor, ...]:
    """Always a tuple."""
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def near(ours: Tensor, theirs: Tensor, what: str) -> None:
    """Equal but for roundings."""
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5, msg=lambda text: f"{what}: {text}")


def outputs_that_need_gradients_say_so(name: str, backend: str) -> None:
    """A wrapper without a formula for its gradient gives outputs that look like constants."""
    call, given = call_of(name, backend)
    assert all(output.requires_grad for output in tensors(call(**given)))
    with torch.no_grad():
        assert not any(output.requires_grad for output in tensors(call(**given)))


def a_second_backward_gives_its_own_gradients(name: str, backend: str) -> None:
    """Backward that overwrites what it saved is wrong the second time (quack 209, unsloth-zoo 610)."""
    call, given = call_of(name, backend)
    outputs, leaves = tensors(call(**given)), leaves_of(given)
    upstream = [torch.randn(output.shape, generator=torch.Generator().manual_seed(1)) for output in outputs]
    first = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    tripled = torch.autograd.grad(outputs, leaves, [3 * one for one in upstream], retain_graph=True)
    nothing = torch.autograd.grad(outputs, leaves, [0 * one for one in upstream], retain_graph=True)
    again = torch.autograd.grad(outputs, leaves, upstream)
    for one, three, zero, other in zip(first, tripled, nothing, again, strict=True):
        near(three, 3 * one, "three times the gradient")
        assert not zero.any()
        assert torch.equal(one, other)


def a_gradient_that_another_path_needs_is_left_alone(name: str, backend: str) -> None:
    """dX written into dY breaks the residual that receives the same dY (Liger-Kernel 376)."""
    call, given = call_of(name, backend)
    operator = operator_named(name)
    for compute in (call, operator.reference):
        for leaf in leaves_of(given):
            leaf.grad = None
        beside = torch.zeros(tensors(compute(**given))[0].shape, requires_grad=True)
        # Both terms get the same incoming gradient tensor.
        (tensors(compute(**given))[0] + beside).square().sum().backward()
        found = [beside.grad, *(leaf.grad for leaf in leaves_of(given))]
        if compute is call:
            ours = found
    for mine, right in zip(ours, found, strict=True):
        assert mine is not None
        assert right is not None
        near(mine, right, "gradient beside another path")


def activations_computed_again_give_the_same(name: str, backend: str) -> None:
    """In-place rotation turns twice under recomputation, dropout draws anew (unsloth 5001, torchtitan 1323)."""
    call, given = call_of(name, backend)
    leaves = leaves_of(given)
    plain = tensors(call(**given))
    upstream = [torch.ones_like(output) for output in plain]
    wanted = torch.autograd.grad(plain, leaves, upstream)
    again = tensors(checkpoint(lambda: call(**given), use_reentrant=False, preserve_rng_state=False))
    found = torch.autograd.grad(again, leaves, upstream)
    for one, other in zip((*plain, *wanted), (*again, *found), strict=True):
        assert torch.equal(one, other)


def compiled_whole_it_computes_the_same(name: str, backend: str) -> None:
    """Operators that break a graph, or that compiled code calls wrongly (pytorch 180642, kernels-community 906)."""
    call, given = call_of(name, backend)
    leaves = leaves_of(given)
    plain = tensors(call(**given))
    upstream = [torch.ones_like(output) for output in plain]
    wanted = torch.autograd.grad(plain, leaves, upstream)
    torch.compiler.reset()
    within = tensors(torch.compile(call, fullgraph=True, backend="aot_eager")(**given))
    found = torch.autograd.grad(within, leaves, upstream)
    for one, other in zip((*plain, *wanted), (*within, *found), strict=True):
        near(other, one, "in compiled code")


def one_output_alone_has_the_right_gradient(name: str, backend: str) -> None:
    """Gradients of the norm and of the sum come separately and together (quack 53)."""
    call, given = call_of(name, backend)
    operator, leaves = operator_named(name), leaves_of(given)
    number = len(tensors(call(**given)))
    for chosen in ([0], [number - 1], list(range(number))):
        ours, right = tensors(call(**given)), tensors(operator.reference(**given))
        upstream = [torch.randn(ours[0].shape, generator=torch.Generator().manual_seed(2)) for _ in chosen]
        found, wanted = (
            torch.autograd.grad([outputs[one] for one in chosen], leaves, upstream, allow_unused=True)
            for outputs in (ours, right)
        )
        for one, other in zip(found, wanted, strict=True):
            if other is None:
                assert one is None or not one.any()
            else:
                assert one is not None
                near(one, other, f"gradient of outputs {chosen}")


def only_some_gradients_may_be_wanted(name: str, backend: str) -> None:
    """A frozen weight, or an input without gradient: the others are as before."""
    call, given = call_of(name, backend)
    leaves = leaves_of(given)
    output = tensors(call(**given))[0]
    wanted = torch.autograd.grad(output, leaves, torch.ones_like(output))
    for leaf, gradient in zip(leaves, wanted, strict=True):
        for other in leaves:
            other.requires_grad_(other is leaf)
        alone = tensors(call(**given))[0]
        (found,) = torch.autograd.grad(alone, [leaf], torch.ones_like(alone))
        near(found, gradient, "the only gradient")


def a_gradient_of_a_gradient_is_refused(name: str, backend: str) -> None:
    """Backward of our own is differentiable once, and is no constant. (Not of eager, nor of rotations.)"""
    if name == "rotary":
        return
    call, given = call_of(name, backend)
    leaf = leaves_of(given)[0]
    try:
        (gradient,) = torch.autograd.grad(tensors(call(**given))[0].square().sum(), [leaf], create_graph=True)
        torch.autograd.grad(gradient.sum(), [leaf])
    except RuntimeError:
        return
    raise AssertionError("a second derivative was computed")


BEHAVIOURS: tuple[Callable[[str, str], None], ...] = (
    outputs_that_need_gradients_say_so,
    a_second_backward_gives_its_own_gradients,
    a_gradient_that_another_path_needs_is_left_alone,
    activations_computed_again_give_the_same,
    compiled_whole_it_computes_the_same,
    one_output_alone_has_the_right_gradient,
    only_some_gradients_may_be_wanted,
)
