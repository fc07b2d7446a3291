"""Live tensor bytes: counting them by category, and holding a run to ``memory.device_memory_limit_bytes``.

What is alive while a step runs is measured here. Predicting it without running anything is not: that needs no
torch and belongs to the planner. Trading memory for time (recomputation, offload) lives here too.
"""

from drivetrain.engine.memory.cuda import apply_cuda_limit, translate_out_of_memory
from drivetrain.engine.memory.limit import MemoryCount, count_step, unseen_with_compile
from drivetrain.engine.memory.live import Category, LiveBytes

__all__ = [
    "Category",
    "LiveBytes",
    "MemoryCount",
    "apply_cuda_limit",
    "count_step",
    "translate_out_of_memory",
    "unseen_with_compile",
]
