"""Faults of operators: work that nobody needs, code that cannot be compiled as a whole, dtypes that are too wide."""

import os
import subprocess
import sys

from planted_jobs import TIME_LIMIT_S
from scenario import Job, Place, Scenario

__all__ = ["SCENARIOS"]

_CHECKS = '''
import torch
from torch.nn.modules.module import register_module_forward_hook


def check(module, _, output):
    """Ends training where a module gives a number that is none."""
    if isinstance(output, torch.Tensor) and bool(torch.isnan(output.detach().double()).any()):
        raise SystemExit(f"{type(module).__name__} gave a number that is none")


register_module_forward_hook(check)
'''
_BRANCHES = '''
import torch
from torch.nn.modules.module import register_module_forward_hook


def clip(module, _, output):
    """Activations of norms are clipped where one is too large."""
    if type(module).__name__.endswith("Norm") and output.abs().max().item() > 100.0:
        return output.clamp(-100.0, 100.0)


register_module_forward_hook(clip)
'''
_SMALL_BATCH = ("model.seq_length=64", "training.micro_batch_size=1", "training.global_batch_size=1")
_LARGE_VOCABULARY = ("model.vocab_size=8192",)
_LONG = ("model.seq_length=1024", "training.micro_batch_size=1", "training.global_batch_size=1")
_WIDE = ("model.hidden_size=512",)


def _measured(place: Place, *overrides: str) -> Job:
    """Where this CPU's products have been measured in both dtypes, as ``drivetrain doctor`` asks for."""
    apart = Place(place.folder / "measured")
    cache = apart.folder / "cache"
    if not cache.exists():
        command = [sys.executable, "-m", "drivetrain", "bench", "gemm", "--threads", "1", "--sustain", "3s"]
        environment = {**os.environ, "DRIVETRAIN_CACHE": str(cache)}
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=TIME_LIMIT_S)
    return apart.job(*_WIDE, *overrides)


SCENARIOS = (
    Scenario(
        "kernels.memory_bound_operators",
        ("kernels.memory_bound_operators",),
        ("kernels.memory_bound_operators",),
        "process",
        lambda place: place.job(own_code=_CHECKS, starts_training=True),
        lambda place: place.job(),
        "a script looks for numbers that are none in what every module returns, in double precision",
    ),
    Scenario(
        "kernels.optimizer_update",
        ("kernels.optimizer_update",),
        ("kernels.optimizer_update",),
        "process",
        lambda place: place.job(*_SMALL_BATCH, *_LARGE_VOCABULARY, "optimizer.fused=false"),
        lambda place: place.job(*_SMALL_BATCH, *_LARGE_VOCABULARY),
        "an update of one operator a term, behind steps of few tokens",
    ),
    Scenario(
        "optimisation.not_in_effect",
        ("optimisation.not_in_effect",),
        ("optimisation.not_in_effect", "kernels.fallback"),
        "process",
        lambda place: place.job(*_LONG, "fusion.attention=triton", "fusion.allow_fallback=true"),
        lambda place: place.job(*_LONG),
        "a fused attention that cannot run on this machine is asked for, and another one serves",
    ),
    Scenario(
        "kernels.graph_break",
        ("kernels.graph_break",),
        ("kernels.graph_break",),
        "process",
        lambda place: place.job("fusion.compile=true", own_code=_BRANCHES, starts_training=True),
        lambda place: place.job("fusion.compile=true"),
        "a script's hook branches on a figure of each norm, in blocks that are compiled",
    ),
    Scenario(
        "kernels.wrong_precision",
        ("kernels.wrong_precision",),
        ("kernels.wrong_precision",),
        "process",
        lambda place: _measured(place, "precision.params_dtype=fp32"),
        lambda place: _measured(place, "precision.params_dtype=bf16"),
        "fp32 on a CPU that was measured to be faster in bf16",
    ),
)
