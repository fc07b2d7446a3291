"""torch.compile of each transformer block, where this process can compile at all."""

import os

from drivetrain.engine.capabilities import capability
from drivetrain.engine.compilation import frames_given_up, graphs_compiled
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
    return Status(active=True)


def _at_end(_building: Building) -> Status:
    if graphs_compiled() == 0:
        return Status(active=False, reason="torch.compile has built no graph; every step ran eagerly")
    given_up, tried = frames_given_up()
    if given_up:
        return Status(
            active=True,
            reason=f"torch.compile gave up on {given_up} of {tried} pieces of code, which ran eagerly",
        )
    return Status(active=True)


IMPLEMENTATION = Implementation(_prepare, stage="model", at_end=_at_end)
