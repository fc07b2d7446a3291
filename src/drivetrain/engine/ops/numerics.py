"""How a backend is graded: its outputs and every gradient against float64, relative to the reference's own error.

A candidate may not equal eager: a fused kernel that keeps fp32 between two roundings is *closer* to the truth than a
chain of bf16 operators. So inputs are drawn in the low dtype (otherwise their rounding hides a kernel's), the truth is
the reference in float64 of those inputs, and the bound is a multiple of the error that the reference makes in the low
dtype; the pattern is that of flash-attention's tests (Dao et al., github.com/Dao-AILab/flash-attention).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from drivetrain.engine.ops.operator import Backend, Case, Operator, Outputs
from drivetrain.engine.ops.signature import is_tensor_list, named_tensors, signature_of

__all__ = ["LARGEST_FACTOR", "Grade", "Measured", "Upstream", "grade"]

Upstream = Literal["dense", "expanded", "transposed"]
"""How gradients come in: as a fresh tensor; as one number for all elements, with strides of 0, as ``sum`` sends them;
or with its last two dimensions in another order in memory."""

LARGEST_FACTOR = 10.0
"""The largest single error may be this many times the reference's. It is a maximum, and varies more than a mean."""


@dataclass(frozen=True)
class Measured:
    """One output or gradient.

    Attributes:
        what: ``output 0``, ``gradient of x`` …
        error: root mean square of the difference to float64 over that of the float64 values.
        reference_error: the same of the reference in the low dtype.
        allowed: the bound on ``error``.
    """

    what: str
    error: float
    reference_error: float
    allowed: float


@dataclass(frozen=True)
class Grade:
    """What was found.

    Attributes:
        problems: each in one line; empty where the backend may be used.
        measured: every output and gradient.
        refused: why the backend does not serve this call; then nothing was computed.
    """

    problems: tuple[str, ...] = ()
    measured: tuple[Measured, ...] = ()
    refused: str | None = None

    @property
    def passed(self) -> bool:
        """Whether it serves the call, and right."""
        return self.refused is None and not self.problems


@dataclass(frozen=True)
class _Run:
    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]


def grade(
    operator: Operator,
    backend: Backend,
    case: Case,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    seed: int = 0,
    upstream: Upstream = "dense",
) -> Grade:
    """Grade ``backend`` on one call.

    Args:
        dtype: of the floating-point arguments.
        device: where candidate and reference run; the truth is computed on the CPU.
        seed: of the arguments and incoming gradients.
        upstream: layout of the incoming gradients.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = case.make(dtype, generator)
    given = _moved(drawn, device)
    refused = backend.supports(signature_of(operator.name, given))
    if refused is not None:
        return Grade(refused=refused)
    exact_inputs = _exact(drawn)
    with torch.no_grad():
        shapes = _tensors(operator.reference(**exact_inputs))
    incoming = [_incoming(output, dtype, generator, upstream) for output in shapes]
    truth = _run(operator.reference, exact_inputs, [gradient.double() for gradient in incoming])
    moved = [gradient.to(device) for gradient in incoming]
    reference = _run(operator.reference, _moved(drawn, device), moved)

    before = {name: value.detach().clone() for name, value in named_tensors(given)}
    incoming_before = [gradient.clone() for gradient in moved]
    _poison([*reference.outputs, *(one for one in reference.gradients.values() if one is not None)])
    candidate = _run(backend.call, given, moved)
    problems = [
        *_changed(before, given, incoming_before, moved),
        *_of_another_kind(reference, candidate),
    ]
    if problems:
        return Grade(tuple(problems))
    if backend.deterministic:
        problems += _differing(candidate, _run(backend.call, _moved(drawn, device), moved))
    measured = []
    for what, exact, plain, ours in _pairs(truth, reference, candidate):
        found, problem = _compare(operator, what, exact, plain, ours, dtype)
        measured.append(found)
        problems += [problem] if problem is not None else []
    return Grade(tuple(problems), tuple(measured))


def _run(call: Any, given: Mapping[str, Any], incoming: Sequence[Tensor]) -> _Run:
    outputs = _tensors(call(**given))
    wanted = {name: one for name, one in named_tensors(given) if one.requires_grad}
    # Outputs of another number or shape have no gradients, and are a problem of their own.
    with_gradient = [
        (output, grad)
        for output, grad in zip(outputs, incoming, strict=False)
        if output.requires_grad and output.shape == grad.shape
    ]
    gradients: tuple[Tensor | None, ...] = (None,) * len(wanted)
    if wanted and with_gradient:
        gradients = torch.autograd.grad(
            [output for output, _ in with_gradient],
            list(wanted.values()),
            [gradient.to(output.dtype) for output, gradient in with_gradient],
            allow_unused=True,
        )
    return _Run(tuple(output.detach() for output in outputs), dict(zip(wanted, gradients, strict=True)))


def _tensors(outputs: Outputs) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def _moved(drawn: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The same arguments as leaves on ``device``; strides are kept."""
    return _mapped(drawn, lambda value: value.detach().to(device))


def _exact(drawn: Mapping[str, Any]) -> dict[str, Any]:
    return _mapped(
        drawn, lambda value: value.detach().double() if value.is_floating_point() else value.detach()
    )


def _mapped(given: Mapping[str, Any], call: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The same arguments with every tensor replaced by a leaf; gradients are wanted as before."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _leaf(call(value), value.requires_grad)
        return tuple(map(leaf, value)) if is_tensor_list(value) else value

    return {name: leaf(value) for name, value in given.items()}


def _leaf(tensor: Tensor, wanted: bool) -> Tensor:
    return tensor.detach().requires_grad_(wanted)


def _incoming(like: Tensor, dtype: torch.dtype, generator: torch.Generator, layout: Upstream) -> Tensor:
    if layout == "expanded":
        return torch.randn((), generator=generator, dtype=torch.float32).to(dtype).expand(like.shape)
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float32).to(dtype)
    if layout == "transposed" and drawn.dim() >= 2:
        return drawn.transpose(-1, -2).contiguous().transpose(-1, -2)
    return drawn


def _poison(like: Sequence[Tensor]) -> None:
    """Leave not-a-number where the allocator will take memory from: what is not written then shows."""
    blocks = [
        torch.full(one.shape, math.nan, dtype=one.dtype, device=one.device)
        for one in like
        if one.is_floating_point()
        for _ in range(3)
    ]
    del blocks


def _changed(
    before: Mapping[str, Tensor],
    given: Mapping[str, Any],
    incoming_before: Sequence[Tensor],
    incoming: Sequence[Tensor],
) -> list[str]:
    after = dict(named_tensors(given))
    problems = [
        f"it wrote into its argument {name}" for name, was in before.items() if not _same(was, after[name])
    ]
    for number, (was, now) in enumerate(zip(incoming_before, incoming, strict=True)):
        if not _same(was, now):
            problems.append(f"it wrote into the gradient of output {number}")
    return problems


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal to the bit; not-a-number equals itself."""
    if one.is_floating_point():
        return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
    return torch.equal(one, other)


def _of_another_kind(reference: _Run, candidate: _Run) -> list[str]:
    if len(reference.outputs) != len(candidate.outputs):
        return [f"it has {len(candidate.outputs)} outputs, the reference {len(reference.outputs)}"]
    problems = []
    for number, (plain, ours) in enumerate(zip(reference.outputs, candidate.outputs, strict=True)):
        if plain.shape != ours.shape or plain.dtype != ours.dtype or plain.device != ours.device:
            problems.append(
                f"output {number} is {ours.dtype} {tuple(ours.shape)} on {ours.device}, "
                f"the reference's {plain.dtype} {tuple(plain.shape)} on {plain.device}"
            )
    for name, gradient in candidate.gradients.items():
        plain_gradient = reference.gradients[name]
        if plain_gradient is not None and gradient is None:
            problems.append(f"{name} got no gradient")
    return problems


def _differing(one: _Run, other: _Run) -> list[str]:
    named = [*((f"output {n}", t) for n, t in enumerate(one.outputs)), *one.gradients.items()]
    again = [*other.outputs, *other.gradients.values()]
    return [
        f"{name} differs between two equal calls"
        for (name, first), second in zip(named, again, strict=True)
        if first is not None and second is not None and not _same(first, second)
    ]


def _pairs(truth: _Run, reference: _Run, candidate: _Run) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    found = [
        (f"output {number}", *three)
        for number, three in enumerate(zip(truth.outputs, reference.outputs, candidate.outputs, strict=True))
        if three[0].is_floating_point()
    ]
    for name, exact in truth.gradients.items():
        plain, ours = reference.gradients[name], candidate.gradients[name]
        if exact is not None and plain is not None and ours is not None:
            found.append((f"gradient of {name}", exact, plain, ours))
    return found


def _compare(
    operator: Operator, what: str, exact: Tensor, plain: Tensor, ours: Tensor, dtype: torch.dtype
) -> tuple[Measured, str | None]:
    plain, ours = plain.double().cpu(), ours.double().cpu()
    # Where the reference itself leaves the range of the dtype there is nothing to hold a candidate against.
    known = plain.isfinite() & exact.isfinite()
    if not bool(known.any()):
        return Measured(what, 0.0, 0.0, operator.floor[dtype]), None
    stray = int((~ours[known].isfinite()).sum())
    exact, plain, ours = exact[known], plain[known], ours[known]
    size = _rms(exact)
    reference_error, error = _relative(plain - exact, size), _relative(ours - exact, size)
    allowed = max(operator.factor * reference_error, operator.floor[dtype])
    found = Measured(what, error, reference_error, allowed)
    if stray:
        return found, f"{what} has {stray} values that are not finite"
    if error > allowed:
        return found, (
            f"{what}: relative error {error:.2e} against float64, the reference's is {reference_error:.2e}, "
            f"allowed {allowed:.2e}"
        )
    largest, bound = float((ours - exact).abs().max()), float((plain - exact).abs().max())
    most = LARGEST_FACTOR * max(bound, operator.floor[dtype] * float(exact.abs().max()))
    if largest > most:
        return (
            found,
            f"{what}: one value is {largest:.2e} off, the reference's worst {bound:.2e}, allowed {most:.2e}",
        )
    return found, None


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _relative(difference: Tensor, size: float) -> float:
    """Where the truth is zero everywhere, the error is absolute."""
    return _rms(difference) / size if size > 0 else _rms(difference)
