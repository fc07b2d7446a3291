"""One update of AdamW, with the decay of the weights apart from the gradient, for a list of parameters.

Loshchilov & Hutter, arXiv:1711.05101, after Kingma & Ba, arXiv:1412.6980. An optimizer updates in place; here new
tensors are returned, so that a backend can be held against float64 and against its own second call. ``eager``,
``foreach`` and ``fused`` are what ``torch.optim.AdamW`` runs under these names, on copies.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from drivetrain.engine.ops._adamw_cases import adamw_cases
from drivetrain.engine.ops._compiled import compiled, inductor_refuses
from drivetrain.engine.ops._tensor_lists import check_lists
from drivetrain.engine.ops._triton_adamw_calls import ADAMW_KERNELS, triton_adamw
from drivetrain.engine.ops._triton_available import triton_refuses
from drivetrain.engine.ops.operator import Backend, Operator, serves_all
from drivetrain.engine.ops.signature import Signature
from drivetrain.errors import DrivetrainError

__all__ = ["OPERATOR", "adamw", "why_not_fused"]

Tensors = Sequence[Tensor]


def adamw(
    parameters: Tensors,
    gradients: Tensors,
    first_moments: Tensors,
    second_moments: Tensors,
    step: Tensor,
    learning_rate: Tensor,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[Tensor, ...]:
    """The reference.

    Step and learning rate change with every update; as tensors they leave the signature of the call as it is, and are
    read on the device. A gradient that is not finite makes its own element of the parameter and of the first moment not
    finite, and no other: no backend skips an update.

    Args:
        parameters: N tensors of any shapes, floating point, all in one dtype.
        gradients: N of the same shapes, all in one dtype.
        first_moments: N of the same shapes, all in one dtype: the running mean of the gradients.
        second_moments: N of the same shapes, all in one dtype: the running mean of their squares.
        step: (), an integer: 1 in the first update.
        learning_rate: (), floating point.
        beta1: of the first moment, at least 0 and below 1.
        beta2: of the second moment, at least 0 and below 1.
        epsilon: added to the root of the second moment.
        weight_decay: the share of a parameter that is taken off, times the learning rate.

    Returns:
        3 N new tensors in the dtypes of what they replace, each rounded once: parameters, first and second moments.

    Raises:
        DrivetrainError: lists do not fit, or a number is outside its range.
    """
    check_adamw(
        parameters,
        gradients,
        first_moments,
        second_moments,
        step,
        learning_rate,
        beta1,
        beta2,
        epsilon,
        weight_decay,
    )
    updated = [
        _updated(*four, step, learning_rate, beta1, beta2, epsilon, weight_decay)
        for four in zip(parameters, gradients, first_moments, second_moments, strict=True)
    ]
    return _by_kind(updated)


def check_adamw(
    parameters: Tensors,
    gradients: Tensors,
    first_moments: Tensors,
    second_moments: Tensors,
    step: Tensor,
    learning_rate: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
) -> None:
    """Refuse what is no update.

    Raises:
        DrivetrainError: lists do not fit, or a number is outside its range. The step is looked at on a CPU alone.
    """
    check_lists(
        parameters=parameters,
        gradients=gradients,
        first_moments=first_moments,
        second_moments=second_moments,
    )
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= beta < 1:
            raise DrivetrainError(f"{name} is {beta}; it is to be at least 0 and below 1")
    for name, number in (("epsilon", epsilon), ("weight_decay", weight_decay)):
        if not 0 <= number < math.inf:
            raise DrivetrainError(f"{name} is {number}; it is to be at least 0 and finite")
    if step.dim() or step.is_floating_point():
        raise DrivetrainError(f"step is {step.dtype} {tuple(step.shape)}; one integer is needed, of shape ()")
    if learning_rate.dim() or not learning_rate.is_floating_point():
        raise DrivetrainError(
            f"learning_rate is {learning_rate.dtype} {tuple(learning_rate.shape)}; one floating-point number is "
            "needed, of shape ()"
        )
    if step.device.type == "cpu" and not torch.compiler.is_compiling() and int(step) < 1:
        raise DrivetrainError(f"step is {int(step)}; the first update is number 1")


def _updated(
    parameter: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    learning_rate: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Parameter, first and second moment after the update."""
    wide = functools.reduce(
        torch.promote_types, (one.dtype for one in (parameter, gradient, first, second)), torch.float32
    )
    gradient = gradient.to(wide)
    mean = beta1 * first.to(wide) + (1 - beta1) * gradient
    square = beta2 * second.to(wide) + (1 - beta2) * gradient * gradient
    rate = learning_rate.to(wide)
    # Root by root, as torch has it: the quotient of a square leaves fp32 sooner.
    denominator = square.sqrt() / bias_correction(beta2, step, wide).sqrt() + epsilon
    kept = parameter.to(wide) * (1 - rate * weight_decay)
    updated = kept - rate / bias_correction(beta1, step, wide) * mean / denominator
    return updated.to(parameter.dtype), mean.to(first.dtype), square.to(second.dtype)


def bias_correction(beta: float, step: Tensor, dtype: torch.dtype) -> Tensor:
    """``1 - beta^step`` of shape (), to the last digit: subtracted in fp32, 0.999 leaves four digits after one step."""
    if beta == 0:
        return torch.ones((), dtype=dtype, device=step.device)
    return -torch.expm1(step.to(dtype) * math.log(beta))


def _by_kind(updated: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, ...]:
    parameters, first, second = zip(*updated, strict=True)
    return (*parameters, *first, *second)


def _torch(form: Literal["eager", "foreach", "fused"]) -> Callable[..., tuple[Tensor, ...]]:
    """The update of torch.optim on copies, with contiguous elements.

    The fused kernel of a CPU takes elements in the order of memory: of a gradient with other strides than its
    parameter's it silently takes the wrong ones (torch 2.13; on CUDA it is refused, pytorch/pytorch issue 106951).
    """

    def call(
        parameters: Tensors,
        gradients: Tensors,
        first_moments: Tensors,
        second_moments: Tensors,
        step: Tensor,
        learning_rate: Tensor,
        beta1: float = 0.9,
        beta2: float = 0.95,
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> tuple[Tensor, ...]:
        lists = (parameters, gradients, first_moments, second_moments)
        check_adamw(*lists, step, learning_rate, beta1, beta2, epsilon, weight_decay)
        # Torch takes one dtype: the widest serves, and results are rounded once more. All but the fused kernel round
        # after each term, which in 16 bits is a few percent of a moment, and turns an epsilon of 1e-8 into 0 in fp16.
        wide = functools.reduce(
            torch.promote_types,
            (one[0].dtype for one in lists),
            parameters[0].dtype if form == "fused" else torch.float32,
        )
        parameters, gradients, first, second = (
            [one.detach().to(wide).clone(memory_format=torch.contiguous_format) for one in tensors]
            for tensors in lists
        )
        # It counts up before it computes. All but the fused kernel read the count and the rate on the host.
        before = (step - 1).to(torch.float32)
        on_device = form == "fused" and step.device.type != "cpu"
        with torch.no_grad():
            torch_adamw(
                parameters,
                gradients,
                first,
                second,
                [],
                [before.clone() if form == "fused" else before.cpu().clone() for _ in parameters],
                foreach=form == "foreach",
                fused=form == "fused",
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                # The fused kernel of a CUDA device reads the rate there, as fp32 and nothing else.
                lr=learning_rate.to(torch.float32) if on_device else learning_rate.item(),
                weight_decay=weight_decay,
                eps=epsilon,
                maximize=False,
            )
        updated = zip((parameters, first, second), (lists[0], lists[2], lists[3]), strict=True)
        return tuple(one.to(was[0].dtype) for new, was in updated for one in new)

    return call


def why_not_fused(device_type: str) -> str | None:
    """Why torch cannot update parameters on such a device with one kernel; None where it can.

    torch itself finds this out in the first step only, as a RuntimeError.
    """
    if device_type in _get_fused_kernels_supported_devices():
        return None
    return f"torch {torch.__version__} has no fused AdamW for {device_type}"


def _fused_refuses(signature: Signature) -> str | None:
    return why_not_fused(signature.device)


_compiled_update = compiled(_updated)


def _inductor(
    parameters: Tensors,
    gradients: Tensors,
    first_moments: Tensors,
    second_moments: Tensors,
    step: Tensor,
    learning_rate: Tensor,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[Tensor, ...]:
    lists = (parameters, gradients, first_moments, second_moments)
    check_adamw(*lists, step, learning_rate, beta1, beta2, epsilon, weight_decay)
    with torch.no_grad():
        return _by_kind(
            [
                _compiled_update(*four, step, learning_rate, beta1, beta2, epsilon, weight_decay)
                for four in zip(*lists, strict=True)
            ]
        )


def _triton(
    parameters: Tensors,
    gradients: Tensors,
    first_moments: Tensors,
    second_moments: Tensors,
    step: Tensor,
    learning_rate: Tensor,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[Tensor, ...]:
    lists = (parameters, gradients, first_moments, second_moments)
    check_adamw(*lists, step, learning_rate, beta1, beta2, epsilon, weight_decay)
    # What all elements have in common, once for all tensors and without the host: what is kept of a parameter, the
    # rate over the first moment's correction, and one over the root of the second's.
    rate = learning_rate.to(torch.float32)
    common = torch.stack(
        (
            1 - rate * weight_decay,
            rate / bias_correction(beta1, step, torch.float32),
            bias_correction(beta2, step, torch.float32).rsqrt(),
        )
    )
    return _by_kind([triton_adamw(*four, common, beta1, beta2, epsilon) for four in zip(*lists, strict=True)])


OPERATOR = Operator(
    name="adamw",
    equation=(
        "m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; "
        "p = (1 - lr decay) p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + epsilon)"
    ),
    source="Loshchilov & Hutter, arXiv:1711.05101",
    reference=adamw,
    cases=adamw_cases,
    backends=(
        Backend(
            "eager", _torch("eager"), serves_all, ran_on=("cpu",), kernels=("aten::addcdiv_", "aten::lerp_")
        ),
        Backend(
            "foreach", _torch("foreach"), serves_all, ran_on=("cpu",), kernels=("aten::_foreach_addcdiv_",)
        ),
        Backend(
            "fused", _torch("fused"), _fused_refuses, ran_on=("cpu",), kernels=("_fused_adamw_", "FusedAdam")
        ),
        Backend("inductor", _inductor, inductor_refuses, ran_on=("cpu",), kernels=("_updated",)),
        Backend("triton", _triton, triton_refuses, kernels=ADAMW_KERNELS),
    ),
    # In place, as training has it, 16 tensors of 2^20 took 53 ms fused, 181 as eager and 192 as foreach (one core, 2^14
    # elements alike). Copies cost more than the kernel: compiled code, which needs none, is as fast as fused with them.
    untuned={"cpu": ("fused",)},
)
