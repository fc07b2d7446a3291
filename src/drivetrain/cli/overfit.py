"""``drivetrain train --overfit-batch``."""

import dataclasses
import sys

from drivetrain.cli.data import show_progress
from drivetrain.cli.output import show_document
from drivetrain.config import LoadedConfig

__all__ = ["run_overfit"]

_SHOWN_EVERY = 10


def run_overfit(loaded: LoadedConfig, *, as_json: bool) -> int:
    """Over-fit one batch for at most ``training.train_iters`` steps; 0 if learned, 1 with a diagnosis if not."""
    from drivetrain.engine.data.corpus import ensure_corpus
    from drivetrain.engine.devices import select_device, set_threads, thread_count
    from drivetrain.engine.failures import explained
    from drivetrain.engine.optimizer import why_not_fused
    from drivetrain.engine.overfit import NEAR_ZERO, overfit_batch
    from drivetrain.engine.random_state import set_deterministic

    config = loaded.config
    device = select_device(config.run)
    with show_progress() as progress:
        corpus = ensure_corpus(config.data, config.model, progress)
    for field, requested in (
        ("memory.device_memory_limit_bytes", config.memory.device_memory_limit_bytes is not None),
        ("fusion.compile", config.fusion.compile),
        ("checkpoint.initial_load_path", config.checkpoint.initial_load_path is not None),
    ):
        if requested:
            print(f"warning: {field} has no effect on --overfit-batch", file=sys.stderr)
    if config.optimizer.fused and (missing := why_not_fused(device.type)) is not None:
        print(f"warning: optimizer.fused = true is not in effect: {missing}", file=sys.stderr)
    set_threads(thread_count(config.run, 1))
    set_deterministic(config.run.deterministic)

    def show(step: int, loss: float) -> None:
        if step == 1 or step % _SHOWN_EVERY == 0:
            print(f"step {step:5d}  loss of the one batch {loss:.4f}", file=sys.stderr, flush=True)

    with explained():
        result = overfit_batch(config, corpus, device, max_steps=config.training.train_iters, on_step=show)
    if as_json:
        show_document(dataclasses.asdict(result))
    elif result.learned:
        print(
            f"learned: the batch's loss fell from {result.first_loss:.3f} below {NEAR_ZERO} in {result.steps} steps"
        )
    else:
        print(f"not learned in {result.steps} steps (loss {result.last_loss:.4f}): {result.diagnosis}")
    return 0 if result.learned else 1
