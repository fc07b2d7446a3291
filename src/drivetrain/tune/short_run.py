"""A short run of a longer configuration: the overrides that make it the beginning of the long one."""

from typing import Any

import tomlkit

from drivetrain.config import RunConfig, decay_tokens, leaves, num_microbatches
from drivetrain.errors import DrivetrainError
from drivetrain.measure.clock import WARMUP_STEPS

__all__ = ["as_override", "prefetched_steps", "require_beginning", "short_run", "steps_to_run"]

_COMPILE_STEPS = 3
"""Steps that torch.compile may take for further shapes, on top of the warm-up."""


def as_override(leaf: str, value: Any) -> str:
    """``section.field=value`` in the form that the command line reads back to ``value``."""
    if value is None:
        return f"{leaf}=none"
    if isinstance(value, bool):
        return f"{leaf}={'true' if value else 'false'}"
    if isinstance(value, str):
        plain = leaves()[leaf].kind in ("text", "choice") and value == value.strip() and value != "none"
        if plain and value[:1] not in ("", '"', "'"):
            return f"{leaf}={value}"
        return f"{leaf}={tomlkit.item(value).as_string()}"
    return f"{leaf}={value!r}"


def require_beginning(config: RunConfig) -> None:
    """Raise DrivetrainError where the run of ``config`` goes on after another run's step: it has no short beginning."""
    start = config.checkpoint
    if start.initial_load_path is not None and not start.initial_load_model_only:
        raise DrivetrainError(
            "checkpoint.initial_load_model_only = false: short runs that are compared begin at the first step, and "
            f"this one goes on after a step of {start.initial_load_path}; take the weights alone with "
            f"checkpoint.initial_load_path={start.initial_load_path}/model checkpoint.initial_load_model_only=true"
        )


def short_run(config: RunConfig, steps: int, *, profiles: bool = False) -> list[str]:
    """Overrides for a run of ``steps`` steps at the learning rates with which the run of ``config`` begins.

    It is not evaluated, not profiled, and logs each step.

    Args:
        profiles: nothing is said of profiling: ``drivetrain profile`` does.

    Raises:
        DrivetrainError: see :func:`require_beginning`.
    """
    require_beginning(config)
    overrides = [
        f"training.train_iters={steps}",
        "training.eval_iters=0",
        "training.eval_interval=0",
        "checkpoint.save_interval=0",
        "monitor.log_interval=1",
    ]
    if not profiles:
        overrides.append("profiler.profile=false")
    if config.lr_schedule.lr_decay_style != "constant":
        overrides.append(f"lr_schedule.lr_decay_tokens={decay_tokens(config)}")
    return overrides


def prefetched_steps(config: RunConfig, world_size: int) -> int:
    """Steps that workers, or the thread that builds ahead, can have ready before the first one begins: their times say
    nothing of the steady state."""
    data = config.data
    ready = data.num_workers * data.prefetch_factor if data.num_workers else data.prefetch_batches
    return -(-ready // num_microbatches(config, world_size))


def steps_to_run(config: RunConfig, world_size: int, measured: int) -> int:
    """Steps of a run of which at least ``measured`` are neither warm-up, nor compile, nor prefetched."""
    compiling = _COMPILE_STEPS if config.fusion.compile else 0
    return WARMUP_STEPS + prefetched_steps(config, world_size) + compiling + measured
