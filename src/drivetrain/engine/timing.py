"""Durations of steps on a device that may run behind the host.

On a CPU a step ends when the host says so. On CUDA the host runs ahead; there a step's duration is the
time between the events recorded at its start and at the next step's start, read after both have passed.
"""

import time

import torch

__all__ = ["Mark", "elapsed_s", "mark"]

Mark = float | torch.cuda.Event


def mark(device: torch.device) -> Mark:
    """A moment on the device's clock. Never waits."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_s(start: Mark, end: Mark) -> float:
    """Seconds between two marks of the same device; waits for the later one on CUDA."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
