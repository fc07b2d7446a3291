"""Gradients of a norm's weight and bias are sums over all rows, and are exact however many there are."""

import pytest
import torch

from drivetrain.engine.model.norm import LayerNorm, RMSNorm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_many_rows_in_16_bits_do_not_wear_off_the_gradient_of_a_norm(
    kind: type[LayerNorm] | type[RMSNorm], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8192, 32, generator=generator).to(dtype)
    incoming = (torch.randn(8192, 32, generator=generator) + 0.5).to(dtype)

    def gradients(x: torch.Tensor, incoming: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        norm = kind(32, 1e-5)
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.fill_(1.0)
        norm.to(dtype)
        norm(x).backward(incoming)
        return [parameter.grad for parameter in norm.parameters() if parameter.grad is not None]

    found = gradients(x, incoming, torch.float32)
    exact = gradients(x.double(), incoming.double(), torch.float64)
    assert len(found) == len(exact) > 0
    for ours, truth in zip(found, exact, strict=True):
        assert float((ours - truth).norm() / truth.norm()) < 4e-3
