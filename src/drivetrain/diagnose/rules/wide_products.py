"""Matrix products in fp32 on a device that is faster in 16 bits. Of a CPU only what was measured tells that it is."""

from collections.abc import Iterator, Mapping

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.remedies import remedies_against
from drivetrain.diagnose.rule import Rule
from drivetrain.measure.peaks import find_device

__all__ = ["RULE"]

_LEAST = 0.05
"""Share of the products' time in 32 bits from which it is the cause: a router or a loss in fp32 is meant so."""


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    if facts.config is not None and facts.config.precision.params_dtype != "fp32":
        return  # Asked for in 16 bits: what ran otherwise is a fallback.
    if not facts.trace.has_device and not _is_faster_in_16_bits(_measured(facts)):
        return  # Many CPUs are not.
    counts = facts.trace.matmul_dtypes
    known = sum(count.ns for dtype, count in counts.items() if dtype != "unknown")
    wide = {dtype: counts[dtype].ns / known for dtype in ("fp32", "tf32") if known and dtype in counts}
    share = sum(wide.values())
    if share < _LEAST:
        return
    products = facts.mean.classes.get("compute.matmul", 0.0)
    cost, why = _cost(facts, products, wide)
    # The cost may be bounded from below alone; no remedy saves more than these products.
    most = None if cost is None else products * share
    remedies, none, _ = remedies_against(facts, "kernels.wrong_precision", most)
    yield loss(
        facts,
        "wide_products",
        "kernels.wrong_precision",
        "matrix products in fp32",
        cost,
        why_unknown=why,
        confidence="medium",
        evidence=(
            Evidence(
                f"{share:.0%} of the products' time is in {' and '.join(sorted(wide))}: "
                f"{products * share / 1e6:.3f} ms a step",
                facts.trace.source,
                {f"{dtype}_share": part for dtype, part in wide.items()},
            ),
        ),
        remedies=remedies,
        no_remedy=none,
        part_of="compute.matmul",
    )


def _measured(facts: Facts) -> Mapping[str, float]:
    """Dtype → what the run's CPU was measured to sustain with its threads, FLOP/s."""
    return {} if facts.time is None else facts.time.matmul_flops


def _is_faster_in_16_bits(flops: Mapping[str, float]) -> bool:
    return {"fp32", "bf16"} <= flops.keys() and flops["bf16"] > flops["fp32"]


def _cost(facts: Facts, products: float, wide: dict[str, float]) -> tuple[float | None, str | None]:
    measured: Mapping[str, float] = {} if facts.trace is None or facts.trace.has_device else _measured(facts)
    if not measured and facts.device is None:
        return None, "how much faster the device is in 16 bits is unknown: name it with --device"
    peaks = find_device(facts.device).flops if facts.device is not None else measured
    lost = 0.0
    for dtype, share in wide.items():
        # Where the data sheet's fp32 is not in the table, tf32 bounds it from above, and the cost from below.
        peak = peaks.get(dtype, peaks.get("tf32"))
        if peak is None or "bf16" not in peaks:
            return None, f"no trusted peak of {facts.device} in {dtype} and bf16"
        lost += products * share * max(0.0, 1 - peak / peaks["bf16"])
    return lost, None


RULE = Rule("wide_products", ("kernels.wrong_precision",), ("trace",), _detect)
