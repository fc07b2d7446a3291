"""Matrix products whose shapes keep a device's units from running full, against what it sustains."""

from collections.abc import Iterator

from drivetrain.diagnose.causes import CAUSES
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.rule import Rule
from drivetrain.trace.kernels import MatrixProduct

__all__ = ["RULE"]

_NAMED = 3
_WORTH = 0.05
"""Share of the time with shapes that a product must take to be the trace's own best rate."""
_SAME_RATE = frozenset({"bf16", "fp16"})


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    products = facts.trace.products
    odd = [one for one in products.shapes if one.shape_notes]
    costs: dict[MatrixProduct, float] = {}
    measured: set[MatrixProduct] = set()
    for one in odd:
        rate = _ceiling(facts, one.product.dtype)
        if rate is not None:
            measured.add(one)
        else:
            rate = _best_rate(products.shapes, products.covered_ns, one)
        if rate is not None:
            lost = one.total_ns - 1e9 * one.product.operations * one.count / rate
            costs[one] = max(0.0, lost)
    cost = sum(costs.values()) / (facts.trace.num_steps or 1)
    if not cost:
        return
    worst = sorted(costs, key=lambda one: -costs[one])[:_NAMED]
    known = measured.issuperset(worst)
    against = "what the device sustains" if known else "the best rate of this trace"
    yield loss(
        facts,
        "product_shapes",
        "kernels.bad_shapes",
        "shapes of matrix products",
        cost,
        text=f"{CAUSES['kernels.bad_shapes'].meaning}, against {against}",
        confidence="medium" if known else "low",
        evidence=tuple(
            Evidence(
                f"{one.operator} {one.product.m} x {one.product.n} x {one.product.k}, {one.count} times, "
                f"{(one.flops_per_second or 0.0) / 1e12:.3g} TFLOP/s: {'; '.join(one.shape_notes)}",
                facts.trace.source,
                {"m": one.product.m, "n": one.product.n, "k": one.product.k, "ms": one.total_ns / 1e6},
                names=(one.operator,),
            )
            for one in worst
        ),
        part_of="compute.matmul",
    )


def _ceiling(facts: Facts, dtype: str) -> float | None:
    """What the device sustains in a dtype; None where that was not measured: a slower dtype is no fault of a shape."""
    same = dtype == facts.achievable_dtype or {dtype, facts.achievable_dtype} <= _SAME_RATE
    return facts.achievable_flops if same else None


def _best_rate(shapes: tuple[MatrixProduct, ...], covered_ns: int, odd: MatrixProduct) -> float | None:
    """Of products of the same dtype with nothing odd about them; None where there is none that takes time."""
    rates = [
        one.flops_per_second
        for one in shapes
        if not one.shape_notes
        and one.product.dtype == odd.product.dtype
        and one.total_ns >= _WORTH * covered_ns
        and one.flops_per_second is not None
    ]
    return max(rates, default=None)


RULE = Rule("product_shapes", ("kernels.bad_shapes",), ("trace", "device", "shapes"), _detect)
