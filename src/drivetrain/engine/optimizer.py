"""AdamW: which parameters decay, where its state lives, how it is named on disk, and gradient clipping."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.config.training import OptimizerConfig
from drivetrain.engine.memory.low_precision_state import LowPrecisionAdamW, first_elements
from drivetrain.engine.memory.offload_optimizer import OffloadedAdamW, StateOffload
from drivetrain.engine.ops.adamw import why_not_fused
from drivetrain.engine.ops.gradient_clip import clip_coefficient, scale_gradients, total_norm
from drivetrain.engine.parallel.placement import Placement

__all__ = [
    "allocate_state",
    "build_optimizer",
    "clip_gradients",
    "optimizer_state",
    "set_learning_rate",
    "why_not_fused",
]

STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")


def build_optimizer(
    decoder: nn.Module | Iterable[tuple[str, nn.Parameter]],
    optimizer: OptimizerConfig,
    *,
    fused: bool | None = None,
    offload: StateOffload | None = None,
    state_dtype: torch.dtype = torch.float32,
    placements: Mapping[str, Placement] | None = None,
) -> torch.optim.AdamW:
    """AdamW over ``decoder``'s parameters with its state allocated: zeros, in the parameters' dtype (fp32) or in bf16.

    Two groups, each in the order of ``decoder.named_parameters()``: parameters of two or more dimensions are
    decayed, norms and biases are not (Loshchilov & Hutter 2019, decoupled decay; the usual GPT grouping). A
    tied matrix is one parameter.

    Args:
        decoder: or the named parameters that this rank updates, in that order: rows of a parameter, say.
        fused: whether the update is one kernel; torch must have it for the device. None: as ``optimizer.fused``.
        offload: has the moments of some parameters live on the host; None: all on the parameters' device.
        state_dtype: bf16: that of the moments of fp32 parameters, not together with ``offload``; fp32: the parameters'.
        placements: where rows lie in their whole parameters; by it bf16 is rounded alike however many ranks there are.
            None: what is updated is whole.
    """
    low_precision = state_dtype == torch.bfloat16
    assert not (low_precision and offload is not None), "a rule says so"
    fused = optimizer.fused if fused is None else fused
    every = decoder.named_parameters() if isinstance(decoder, nn.Module) else decoder
    named = [(name, parameter) for name, parameter in every if parameter.requires_grad]
    decayed = [(name, parameter) for name, parameter in named if parameter.ndim >= 2]
    undecayed = [(name, parameter) for name, parameter in named if parameter.ndim < 2]
    groups = [
        {"params": members, "weight_decay": weight_decay}
        for members, weight_decay in ((decayed, optimizer.weight_decay), (undecayed, 0.0))
        if members
    ]
    settings: dict[str, Any] = {
        "lr": optimizer.lr,
        "betas": (optimizer.adam_beta1, optimizer.adam_beta2),
        "eps": optimizer.adam_eps,
        "fused": fused,
        # What torch takes by itself without a fused kernel: lists of tensors on CUDA, one tensor after the other on
        # a CPU. With fused=False alone it would take the slow way everywhere.
        "foreach": not fused and all(parameter.is_cuda for _, parameter in named),
    }
    adamw: torch.optim.AdamW
    if low_precision:
        adamw = LowPrecisionAdamW(groups, first=first_elements(placements or {}), **settings)
    elif offload is not None:
        adamw = OffloadedAdamW(groups, offload, **settings)
    else:
        adamw = torch.optim.AdamW(groups, **settings)
    allocate_state(adamw, state_dtype if low_precision else None)
    return adamw


def _named_parameters(optimizer: torch.optim.AdamW) -> Iterator[tuple[str, Tensor]]:
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def allocate_state(optimizer: torch.optim.AdamW, dtype: torch.dtype | None = None) -> None:
    """Give every parameter its state (``step`` 0, moments zero) as the first step would, so that a checkpoint
    can be loaded, and memory be accounted for, before any step. State that exists is left as it is.

    Args:
        dtype: of the moments; None: the parameter's.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state[parameter]:
                continue
            # The fused kernel reads the step count on the device; the others on the host.
            step_device = parameter.device if group["fused"] or group["capturable"] else torch.device("cpu")
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=step_device),
                "exp_avg": torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format),
            }


def optimizer_state(optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The optimizer's own tensors (no copies) as ``<parameter name>/step``, ``/exp_avg`` and ``/exp_avg_sq``.

    ``step`` is fp32 of shape (), the moments have the parameter's shape, and its dtype or bf16.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in _named_parameters(optimizer):
        state = optimizer.state[parameter]
        assert set(state) == set(STATE_KEYS), f"state of {name} was not allocated by allocate_state"
        tensors.update({f"{name}/{key}": state[key] for key in STATE_KEYS})
    return tensors


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use ``learning_rate`` for all parameters from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> tuple[Tensor, Tensor]:
    """Scale the gradients in place to a global L2 norm of at most ``max_norm``, without host sync on a GPU.

    A non-finite norm is returned as it is and the gradients are then left alone: scaled by zero or NaN they
    would no longer tell which parameter the bad value came from.

    Args:
        parameters: those without a gradient are skipped.
        max_norm: 0 means that the norm is only measured.

    Returns:
        The norm before clipping and the factor applied, both of shape () on the gradients' device. The factor
        is ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = total_norm(gradients)
    factor = clip_coefficient(norm, max_norm)
    if max_norm:
        scale_gradients(gradients, factor)
    return norm, factor
