"""Checks of the Triton attention kernel in the interpreter: a script, run by tests in a process of its own.

Prints whether each holds, as JSON.
"""

import json

import torch
from interpreter import use_exact_bfloat16
from torch import Tensor

from drivetrain.engine.ops.attention import CAUSAL, OPERATOR, Documents, Mask
from drivetrain.engine.ops.attention.registered import _flattened, _triton, attention_triton

LENGTHS = (21, 34, 9)
SECOND = slice(21, 55)
MASK = Mask(documents=Documents.of_lengths(LENGTHS))


def _drawn(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(tokens, 2, 16), (tokens, 1, 16), (tokens, 1, 16)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _results(given: list[Tensor], mask: Mask) -> list[Tensor]:
    leaves = [one.clone().requires_grad_() for one in given]
    out = attention_triton(*leaves, mask)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def leaks(value: float | None) -> bool:
    """Whether the second document is equal to the bit when the others hold something else."""
    before = _results(_drawn(64), MASK)
    given = _drawn(64)
    for one in given:
        for other in (slice(0, 21), slice(55, 64)):
            one[other] = one[other] * -3 + 1 if value is None else value
    after = _results(given, MASK)
    return all(torch.equal(was[SECOND], now[SECOND]) for was, now in zip(before, after, strict=True))


def wide_strides() -> bool:
    """Keys whose tokens lie 2^27 elements apart: the last begins at 19 x 2^27, which 32 bits do not hold.

    The memory is asked for and not touched between the tokens.
    """
    tokens, stride = 20, 2**27
    q, k, v = _drawn(tokens, torch.float16)
    room = torch.empty((tokens - 1) * stride + 16, dtype=torch.float16)
    wide = room.as_strided((tokens, 1, 16), (stride, 16, 1))
    wide.copy_(k)
    assert wide.stride(0) * (tokens - 1) > 2**31
    return torch.equal(attention_triton(q, wide, v), attention_triton(q, k, v))


def fullgraph() -> bool:
    """Compiled without a break, forward and backward, with the same result."""
    compiled = torch.compile(lambda *given: attention_triton(*given) + 1, backend="aot_eager", fullgraph=True)
    given = [one.requires_grad_() for one in _drawn(30)]
    out, expected = compiled(*given), attention_triton(*given) + 1
    found, wanted = (torch.autograd.grad(one.sum(), given) for one in (out, expected))
    return torch.equal(out, expected) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def opcheck() -> bool:
    """Raises where a rule is broken."""
    given = [one.requires_grad_() for one in _drawn(30)]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_triton, (*given, *_flattened(given[0], CAUSAL, None)), test_utils=tests)
    return True


def no_documents() -> bool:
    """Zeros, with gradients of zero."""
    return all(
        torch.equal(one, torch.zeros_like(one))
        for one in _results(_drawn(5), Mask(documents=Documents([0, 0])))
    )


def main() -> None:
    """The script."""
    use_exact_bfloat16()
    torch.set_num_threads(1)
    assert OPERATOR.backend("triton") is not None
    checks = {
        "perturbed documents do not move others": leaks(None),
        "not-a-number stays in its document": leaks(float("nan")),
        "a stride of 2^27 elements over 20 tokens": wide_strides(),
        "fullgraph": fullgraph(),
        "opcheck": opcheck(),
        "no documents": no_documents(),
    }
    print(json.dumps(checks))


if __name__ == "__main__":
    main()
