"""In which dtype matrix products ran: the evidence of each entry that asks for another one."""

from collections.abc import Sequence

from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["evidence_of_products"]

_SHOWN_ELSE: Sequence[str] = ("fp32", "tf32", "fp16", "bf16", "fp64")


def evidence_of_products(dtype: str, seen: Observation) -> Evidence:
    """Whether matrix products of a window had operands of ``dtype``.

    Args:
        dtype: ``bf16`` or ``fp16``.
        seen: of the window.
    """
    calls = {name: count.calls for name, count in seen.matmul_dtypes.items() if count.calls}
    known = sum(number for name, number in calls.items() if name != "unknown")
    if calls.get(dtype):
        return Evidence(
            "shown", f"{calls[dtype]} of {known} matrix products of known dtype had {dtype} operands"
        )
    if known:
        others = ", ".join(f"{calls[name]} in {name}" for name in _SHOWN_ELSE if calls.get(name))
        return Evidence("absent", f"no matrix product had {dtype} operands: {others or f'{known} in others'}")
    if "shapes" in seen.missing:
        return Evidence("unknown", "the trace has no operand types: record_shapes was off")
    return Evidence("unknown", "no matrix product of known dtype was recorded in the window")
