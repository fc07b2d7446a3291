"""Freed host memory stays with the process, where glibc's malloc serves CPU tensors."""

import os

from drivetrain.engine.capabilities import capability
from drivetrain.engine.memory.host import contrary_variables, keep_freed_memory, look_at_allocator
from drivetrain.engine.optimisations.implementation import Building, Implementation, Status

__all__ = ["IMPLEMENTATION"]


def _prepare(building: Building) -> Status:
    malloc = capability("glibc_malloc", building.device)
    if not malloc.available:
        return Status(active=False, reason=malloc.reason)
    if not keep_freed_memory():
        return Status(active=False, reason="glibc's malloc refuses the settings")
    seen = look_at_allocator()
    if seen.keeps_freed is False:
        return Status(
            active=False, reason="glibc's malloc took the settings, and gave a freed block back all the same"
        )
    reasons = []
    if seen.keeps_freed is None:
        reasons.append(f"whether freed memory is kept cannot be seen: {seen.reason}")
    if contrary := contrary_variables(os.environ):
        reasons.append(f"it overrides {' '.join(contrary)} of the environment")
    return Status(active=True, reason="; ".join(reasons) or None)


IMPLEMENTATION = Implementation(_prepare)
