"""torch.compile of each transformer block, where this process can compile at all."""

import os

from drivetrain.config import RunConfig
from drivetrain.config.stages import ZERO_BUBBLE
from drivetrain.engine.capabilities import capability
from drivetrain.engine.compilation import CompilationWatch, graphs_compiled
from drivetrain.engine.optimisations.implementation import Building, Implementation, Status

__all__ = ["IMPLEMENTATION"]

_SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
"""Environment variables with which torch.compile compiles nothing, and says nothing."""


def _prepare(building: Building) -> Status:
    switched_off = [name for name in _SWITCHES if os.environ.get(name) == "1"]
    if switched_off:
        return Status(active=False, reason=f"{switched_off[0]}=1 is set; the blocks run eagerly")
    compiler = capability("compile", building.device)
    if not compiler.available:
        return Status(active=False, reason=f"{compiler.reason}; the blocks run eagerly")
    assert building.decoder is not None
    building.decoder.compile_blocks(name_kernels=building.config.profiler.profile)
    building.compilation = CompilationWatch()
    return Status(active=True, reason=_no_half_backward(building.config))


def _no_half_backward(config: RunConfig) -> str | None:
    """What a zero-bubble schedule loses, if there is one."""
    schedule = config.parallelism.pipeline_schedule
    if config.parallelism.pipeline_model_parallel_size == 1 or schedule not in ZERO_BUBBLE:
        return None
    return (
        "compiled blocks compute the gradients of weights together with those of activations, and leave the schedule "
        f"{schedule} none to fill its bubbles with"
    )


def _at_end(building: Building) -> Status:
    if graphs_compiled() == 0:
        return Status(active=False, reason="torch.compile has built no graph; every step ran eagerly")
    reasons = [_no_half_backward(building.config)]
    if building.compilation is not None:
        building.compilation.look()
        reasons += building.compilation.report.complaints()
    return Status(active=True, reason="; ".join(filter(None, reasons)) or None)


IMPLEMENTATION = Implementation(_prepare, stage="model", at_end=_at_end)
