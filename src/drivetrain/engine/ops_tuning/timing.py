"""Backends timed side by side: each round calls every one of them, and another begins each time.

A call is timed alone, forward and backward, after other memory was read: in a model its arguments do not lie in the
caches of a core either.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from drivetrain.engine.ops.operator import Operator
from drivetrain.engine.ops.signature import Signature
from drivetrain.engine.ops_tuning.calling import Results, arguments_on, forward_and_backward
from drivetrain.engine.ops_tuning.choice import LEAST_GAIN, least_and_spread
from drivetrain.measure.machine import total_l3_bytes

__all__ = ["LEAST_ROUNDS", "disagreement", "time_backends"]

LEAST_ROUNDS = 7
MOST_ROUNDS = 64
_PATIENCE_S = 30.0
"""Rounds go on while the least times are not found again: up to so many, and no new one after so many seconds."""
MOST_FLUSHED = 64 * 2**20
"""Bytes that are read between two calls: the last-level cache, but no more than this. Of a cache of hundreds of MiB a
virtual machine has a part that nobody knows."""
_SHORT_S = 0.01
"""Calls below this are made several times in a round, and the fastest counts."""
_MOST_CALLS = 5
_FULL_SIZE_FACTOR = 4.0
"""Two backends that are graded on fewer tokens may differ by this many times what each may differ from the truth."""


def time_backends(
    operator: Operator,
    backends: Sequence[str],
    signature: Signature,
    *,
    rounds: int,
    allowed: Mapping[str, float] | None,
    most_rounds: int = MOST_ROUNDS,
) -> dict[str, Any]:
    """Seconds of each round by backend, and what disagrees with the first.

    Args:
        backends: by name; the first is what the others are held against.
        rounds: at least; more, up to ``most_rounds``, where other processes disturb them.
        allowed: bounds of outputs and gradients by name, of calls with fewer tokens: what is larger than was graded is
            compared with the first backend. None: it was graded at its full size.

    Returns:
        ``{"seconds": {backend: [...]}, "problems": {backend: text}}``; a backend with a problem is not timed.
    """
    assert rounds >= LEAST_ROUNDS
    given = arguments_on(signature, seed=0)
    calls = {name: forward_and_backward(operator, name, given) for name in backends}
    problems: dict[str, str] = {}
    if allowed is not None:
        expected = calls[backends[0]]()
        for name in backends[1:]:
            found = disagreement(expected, calls[name](), allowed)
            if found is not None:
                problems[name] = f"at full size, against {backends[0]}: {found}"
        del expected
    kept = [name for name in backends if name not in problems]
    flush = _Flush(signature.device)
    repeats = {name: _repeats(calls[name], flush, signature.device) for name in kept}
    seconds: dict[str, list[float]] = {name: [] for name in kept}
    began = time.monotonic()
    for number in range(max(rounds, most_rounds)):
        if number >= rounds and (_agree(seconds) or time.monotonic() - began > _PATIENCE_S):
            break
        first = number % len(kept)
        order = kept[first:] + kept[:first]
        for name in order if number % 2 == 0 else reversed(order):
            taken = [_timed(calls[name], flush, signature.device) for _ in range(repeats[name])]
            seconds[name].append(min(taken))
    return {"seconds": seconds, "problems": problems}


def _agree(seconds: Mapping[str, Sequence[float]]) -> bool:
    """Whether the least time of each backend was found again."""
    return all(least_and_spread(one)[1] < LEAST_GAIN for one in seconds.values())


def disagreement(expected: Results, found: Results, allowed: Mapping[str, float]) -> str | None:
    """Where two results differ by more than both may be wrong; None where they do not."""
    for what, one in expected.items():
        if not one.is_floating_point():
            continue
        other = found.get(what)
        if other is None:
            return f"there is no {what}"
        size = float(one.float().square().mean().sqrt())
        difference = float((other.float() - one.float()).square().mean().sqrt())
        bound = _FULL_SIZE_FACTOR * allowed.get(what, 0.0) * (size or 1.0)
        # Written so that what is not a number fails.
        if not difference <= bound:
            return f"{what} differs by {difference:.2e} in the mean, allowed {bound:.2e}"
    return None


class _Flush:
    """Reads memory, so that the arguments of the next call have to be fetched."""

    def __init__(self, device: str) -> None:
        if device == "cuda":
            size = torch.cuda.get_device_properties("cuda").L2_cache_size * 2
        else:
            size = min(total_l3_bytes() or MOST_FLUSHED, MOST_FLUSHED)
        self._memory = torch.zeros(max(1, size // 4), device=device)

    def __call__(self) -> None:
        self._memory.add_(1.0)


def _repeats(call: Callable[[], Results], flush: _Flush, device: str) -> int:
    call()
    taken = min(_timed(call, flush, device) for _ in range(2))
    return _MOST_CALLS if taken < _SHORT_S else 1


def _timed(call: Callable[[], Results], flush: _Flush, device: str) -> float:
    flush()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    results = call()
    if device == "cuda":
        torch.cuda.synchronize()
    taken = time.perf_counter() - start
    # Freed after the clock has stopped, whoever computes them.
    del results
    return taken
