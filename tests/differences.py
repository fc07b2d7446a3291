"""How far two tensors are apart."""

import torch


def relative_difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over that of what is wanted; absolute where that is 0."""
    found, wanted = found.detach().double(), wanted.detach().double()
    norm = float(wanted.norm())
    return float((found - wanted).norm()) / norm if norm > 0 else float(found.norm())
