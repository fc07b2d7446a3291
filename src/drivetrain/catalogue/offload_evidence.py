"""What the two entries of offload have in common: by what a window shows them, and what is no claim on a CPU."""

from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["evidence_of_copies"]

_WAIT = "drivetrain/offload/wait"
_STEP = "drivetrain/optimizer"


def evidence_of_copies(seen: Observation, span: str, what: str) -> Evidence:
    """Shown by ``span``, in which copies are begun, as ``what``; with the time that was waited for any of them."""
    if "ranges" in seen.missing:
        return Evidence("unknown", "the trace has no annotated ranges")
    steps = max(seen.num_steps, 1)
    found = seen.ranges.get(span)
    if found is not None:
        waits = seen.ranges.get(_WAIT)
        waited = (
            "no copy was waited for"
            if waits is None
            else f"copies of all kinds were waited for {waits.ns / steps / 1e6:.3g} ms"
        )
        return Evidence(
            "shown", f"{found.calls / steps:.3g} times a step {what}; {waited} a step by the host"
        )
    if _STEP in seen.ranges:
        return Evidence("absent", f"steps were recorded, and nowhere {what}")
    return Evidence("unknown", "no step of the trainer's own was recorded")
