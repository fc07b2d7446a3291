"""AdamW: which parameters decay, where its state lives, how it is named on disk, and gradient clipping."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from drivetrain.config.training import OptimizerConfig

__all__ = [
    "allocate_state",
    "build_optimizer",
    "clip_coefficient",
    "clip_gradients",
    "optimizer_state",
    "scale_gradients",
    "set_learning_rate",
    "total_norm",
    "why_not_fused",
]

_ROW = 2048
"""Elements whose squares are added in fp32 before the sum goes on in fp64."""
STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")


def build_optimizer(
    decoder: nn.Module | Iterable[tuple[str, nn.Parameter]],
    optimizer: OptimizerConfig,
    *,
    fused: bool | None = None,
) -> torch.optim.AdamW:
    """AdamW over ``decoder``'s parameters with its state allocated: zeros, in the parameters' dtype (fp32).

    Two groups, each in the order of ``decoder.named_parameters()``: parameters of two or more dimensions are
    decayed, norms and biases are not (Loshchilov & Hutter 2019, decoupled decay; the usual GPT grouping). A
    tied matrix is one parameter.

    Args:
        decoder: or the named parameters that this rank updates, in that order: rows of a parameter, say.
        fused: whether the update is one kernel; torch must have it for the device. None: as ``optimizer.fused``.
    """
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
    adamw = torch.optim.AdamW(
        groups,
        lr=optimizer.lr,
        betas=(optimizer.adam_beta1, optimizer.adam_beta2),
        eps=optimizer.adam_eps,
        fused=fused,
        # What torch takes by itself without a fused kernel: lists of tensors on CUDA, one tensor after the other on
        # a CPU. With fused=False alone it would take the slow way everywhere.
        foreach=not fused and all(parameter.is_cuda for _, parameter in named),
    )
    allocate_state(adamw)
    return adamw


def why_not_fused(device_type: str) -> str | None:
    """Why torch cannot update parameters on such a device with one kernel; None where it can.

    torch itself finds this out in the first step only, as a RuntimeError.
    """
    if device_type in _get_fused_kernels_supported_devices():
        return None
    return f"torch {torch.__version__} has no fused AdamW for {device_type}"


def _named_parameters(optimizer: torch.optim.AdamW) -> Iterator[tuple[str, Tensor]]:
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def allocate_state(optimizer: torch.optim.AdamW) -> None:
    """Give every parameter its state (``step`` 0, moments zero) as the first step would, so that a checkpoint
    can be loaded, and memory be accounted for, before any step. State that exists is left as it is."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state[parameter]:
                continue
            # The fused kernel reads the step count on the device; the others on the host.
            step_device = parameter.device if group["fused"] or group["capturable"] else torch.device("cpu")
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=step_device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


def optimizer_state(optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The optimizer's own tensors (no copies) as ``<parameter name>/step``, ``/exp_avg`` and ``/exp_avg_sq``.

    ``step`` is fp32 of shape (), the moments have the parameter's shape and dtype.
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


@torch.no_grad()
def total_norm(tensors: list[Tensor]) -> Tensor:
    """L2 norm of all elements of ``tensors``, of shape (), in their dtype on their device; 0 for none of them.

    On a CPU torch adds the squares of a whole tensor one after the other, as many at once as a register holds. In fp32
    the norm of 16 million elements comes out 6e-4 too small, and another one when they are cut, so that clipping would
    depend on the layout. By rows, and in fp64 from there on, it is right to the last digit.
    """
    if not tensors:
        return torch.zeros(())
    if tensors[0].device.type != "cpu":
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))
        return norm
    rows, small = [], []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        whole = flat.numel() // _ROW * _ROW
        if whole:
            rows.append(torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1))
        if whole < flat.numel():
            small.append(flat[whole:])
    if small:
        rows.append(torch.stack(torch._foreach_norm(small)))
    if not rows:  # empty parts of a dimension that does not divide
        return tensors[0].new_zeros(())
    total: Tensor = torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64)
    return total.to(tensors[0].dtype)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor of :func:`clip_gradients` for gradients of this norm, of shape () on the norm's device."""
    if max_norm == 0:
        return torch.ones_like(norm)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(norm.isfinite(), factor, torch.ones_like(factor))


def scale_gradients(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply all of ``gradients`` in place by ``factor``, of shape ()."""
    # A CPU has no queue to wait for, so a pass over all gradients that would multiply by one is saved.
    if gradients and not (factor.device.type == "cpu" and factor.item() == 1.0):
        torch._foreach_mul_(gradients, factor)
