"""Random number generators: seeding, capture and restoration without pickle, and deterministic algorithms.

torch's generators of the CPU and the current CUDA device drive dropout; numpy's and Python's global ones are
kept as well because a user's ``data.transform`` may draw from them.
"""

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy
import torch
from torch import Tensor

from drivetrain.errors import CheckpointError

__all__ = [
    "capture_random_state",
    "deterministic",
    "restore_random_state",
    "seed_everything",
    "set_deterministic",
]

CUBLAS_WORKSPACE = ":4096:8"
"""The size NVIDIA documents for bitwise reproducible cuBLAS calls."""


def seed_everything(seed: int, rank: int, stage: int = 0) -> None:
    """Seed torch (all devices), numpy and Python with streams that differ between data-parallel ranks.

    Ranks of a pipeline (``stage``) differ in torch's alone: their layers drop other elements, but numpy and Python may
    make their batches, which must be equal. Tensor-parallel ranks draw the same numbers and take their part of them.
    Initial weights and the data order do not draw from these: they must not depend on the rank.
    """
    words = numpy.random.SeedSequence([seed, rank]).generate_state(6, numpy.uint64)
    torch_word = (
        numpy.random.SeedSequence([seed, rank, stage]).generate_state(1, numpy.uint64)[0]
        if stage
        else words[0]
    )
    torch.manual_seed(int(torch_word) >> 1)
    random.seed(int(words[1]))
    numpy.random.seed(words[2:].view(numpy.uint32))


def capture_random_state() -> dict[str, Tensor]:
    """The state of every generator as CPU tensors that a safetensors file can hold.

    ``torch_cpu`` uint8 (5056,), ``torch_cuda`` uint8 (16,) where there is CUDA, ``python_key`` int64
    (625,), ``numpy_key`` int64 (624,), ``numpy_position`` int64 (2,); ``python_gauss`` and ``numpy_gauss``
    float64 (1,), the second value of a pair of normal numbers, NaN when there is none.
    """
    _, python_key, python_gauss = random.getstate()
    numpy_state = numpy.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    assert numpy_state["bit_generator"] == "MT19937", numpy_state["bit_generator"]
    state = {
        "torch_cpu": torch.get_rng_state(),
        "python_key": torch.tensor(python_key, dtype=torch.int64),
        "python_gauss": torch.tensor(
            [float("nan") if python_gauss is None else python_gauss], dtype=torch.float64
        ),
        "numpy_key": torch.from_numpy(numpy_state["state"]["key"].astype(numpy.int64)),
        "numpy_position": torch.tensor(
            [numpy_state["state"]["pos"], numpy_state["has_gauss"]], dtype=torch.int64
        ),
        "numpy_gauss": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["torch_cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    """Put every generator back to ``state``, as :func:`capture_random_state` returned it.

    Raises:
        CheckpointError: a generator's state is missing or damaged.
    """
    try:
        torch.set_rng_state(state["torch_cpu"])
        gauss = float(state["python_gauss"])
        random.setstate((3, tuple(state["python_key"].tolist()), None if gauss != gauss else gauss))
        position, has_gauss = state["numpy_position"].tolist()
        numpy.random.set_state(
            {
                "bit_generator": "MT19937",
                "state": {"key": state["numpy_key"].numpy().astype(numpy.uint32), "pos": position},
                "has_gauss": has_gauss,
                "gauss": float(state["numpy_gauss"]),
            }
        )
        if torch.cuda.is_available() and "torch_cuda" in state:
            torch.cuda.set_rng_state(state["torch_cuda"])
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"the saved state of the random number generators is damaged: {error}"
        ) from error


def set_deterministic(enabled: bool) -> dict[str, str | bool]:
    """Allow only deterministic algorithms (``run.deterministic``), or, when off, change nothing.

    An operator that has no deterministic form raises a RuntimeError. Call it before the first CUDA operation:
    cuBLAS reads its variable once.

    Returns:
        What was set, for the run's record; empty when ``enabled`` is False.
    """
    if not enabled:
        return {}
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True, warn_only=False)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    return {
        "torch.use_deterministic_algorithms": True,
        "torch.backends.cudnn.deterministic": True,
        "torch.backends.cudnn.benchmark": False,
        "CUBLAS_WORKSPACE_CONFIG": workspace,
    }


@contextmanager
def deterministic(enabled: bool) -> Iterator[dict[str, str | bool]]:
    """:func:`set_deterministic` for a block; yields what was set and puts the former settings back."""
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    try:
        yield set_deterministic(enabled)
    finally:
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        else:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace
