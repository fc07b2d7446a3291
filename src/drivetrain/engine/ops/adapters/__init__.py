"""Kernels of other libraries as backends: how the arguments of our operators map to theirs.

None has run on a device it is for. What is tested is the mapping, against stand-ins that take what each library
documents and compute it in plain torch; docs/ops-libraries.md has the table. A library is imported by the first call,
never with this package.
"""

from drivetrain.engine.ops.adapters import flash_attn_ops, liger, npu, transformer_engine
from drivetrain.engine.ops.operator import Backend

__all__ = ["adapters_of"]


def adapters_of(operator: str) -> tuple[Backend, ...]:
    """The backends of other libraries for the operator of that name; attention's are in its own folder."""
    found = (module.BACKENDS.get(operator) for module in (liger, flash_attn_ops, transformer_engine, npu))
    return tuple(backend for backend in found if backend is not None)
