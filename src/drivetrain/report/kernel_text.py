"""What the kernels of one trace say, for a terminal."""

from collections.abc import Iterator, Sequence

from drivetrain.trace.generated import GeneratedKernel
from drivetrain.trace.kernels import KernelTotal, MatrixProducts, SmallOperator
from drivetrain.trace.launch_bound import LaunchBoundStretch
from drivetrain.trace.operator_regions import OperatorTotal
from drivetrain.trace.synchronisation import Synchronisations

__all__ = ["kernel_text", "synchronisation_lines"]

_NAME = 64


def kernel_text(
    kernels: Sequence[KernelTotal],
    products: MatrixProducts,
    small: Sequence[SmallOperator],
    stretches: Sequence[LaunchBoundStretch],
    waits: Synchronisations | None = None,
    *,
    operators: Sequence[OperatorTotal] = (),
    generated: Sequence[GeneratedKernel] = (),
    count: int,
    ceiling: float | None,
) -> str:
    """Seven lists, at most ``count`` rows each, with what a row's figures mean above it.

    Args:
        ceiling: sustained matrix product of the device in FLOP/s, where it is known.
    """
    lines = [*_operators(operators[:count]), *_top(kernels[:count]), *_generated(generated[:count])]
    lines += [*_products(products, count, ceiling), *_small(small[:count]), *_stretches(stretches[:count])]
    if waits is not None:
        lines += synchronisation_lines(waits, count)
    return "\n".join(lines)


def _operators(operators: Sequence[OperatorTotal]) -> Iterator[str]:
    if not operators:
        return
    yield "operators by backend, forward and backward (the work in their regions)"
    for one in operators:
        records = one.forward_records + one.backward_records
        kinds = sorted(one.kinds, key=lambda kind: -one.kinds[kind])
        shares = ", ".join(f"{kind} {one.kinds[kind] / one.total_ns:.0%}" for kind in kinds if one.total_ns)
        yield (
            f"  {one.total_ns / 1e6:10.3f} ms {one.calls:6d}x  {one.operator + '/' + one.backend:40} "
            f"forward {one.forward_ns / 1e6:.3f} ms, backward {one.backward_ns / 1e6:.3f} ms, "
            f"{records / one.calls:.1f} records a call: {shares or 'no work was recorded in them'}"
        )


def _top(kernels: Sequence[KernelTotal]) -> Iterator[str]:
    if not kernels:
        return
    yield "top kernels, by summed duration (overlapping ones count each)"
    for kernel in kernels:
        notes = []
        if kernel.leaves_multiprocessors_idle:
            notes.append(f"{kernel.blocks} blocks on {kernel.multiprocessors} multiprocessors")
        if kernel.occupancy is not None:
            notes.append(f"occupancy {kernel.occupancy:.0%}")
        yield (
            f"  {kernel.total_ns / 1e6:10.3f} ms {kernel.share:6.1%} {kernel.count:6d}x  {kernel.kind:22} "
            f"{_short(kernel.name)}{'  (' + ', '.join(notes) + ')' if notes else ''}"
        )


def _generated(kernels: Sequence[GeneratedKernel]) -> Iterator[str]:
    if not kernels:
        return
    yield "generated kernels, and the operators that their names say they hold"
    for kernel in kernels:
        yield (
            f"  {kernel.total_ns / 1e6:10.3f} ms {kernel.count:6d}x  {kernel.kind:22} {_short(kernel.name)}: "
            f"{', '.join(kernel.operators)}"
        )


def _products(products: MatrixProducts, count: int, ceiling: float | None) -> Iterator[str]:
    if not products.matmul_ns:
        return
    covered = products.covered_ns / products.matmul_ns
    yield f"matrix products by shape (executed operations over device time; shapes cover {covered:.0%} of it)"
    for shape in products.shapes[:count]:
        rate = shape.flops_per_second
        reached = "-" if rate is None else f"{rate / 1e12:.2f} TFLOP/s"
        if rate is not None and ceiling is not None:
            reached += f" ({rate / ceiling:.0%} of what the device sustains)"
        product = shape.product
        size = f"{product.batch}x{product.m}x{product.n}x{product.k} {product.dtype}"
        notes = "".join(f"; {note}" for note in shape.shape_notes)
        yield f"  {shape.total_ns / 1e6:10.3f} ms {shape.count:6d}x  {shape.operator:14} {size:34} {reached}{notes}"


def _small(small: Sequence[SmallOperator]) -> Iterator[str]:
    if not small:
        return
    yield "small operators between neighbours they could be merged with (an estimate from shapes)"
    for operator in small:
        yield (
            f"  {operator.saved_bytes / 1e6:10.3f} MB {operator.count:6d}x  {operator.before} > {operator.operator} > "
            f"{operator.after}  ({operator.kernel_ns / 1e6:.3f} ms)"
        )


def _stretches(stretches: Sequence[LaunchBoundStretch]) -> Iterator[str]:
    if not stretches:
        return
    yield "stretches in which the device waited for launches"
    for stretch in stretches:
        named = ", ".join(f"{name} {waited / 1e6:.3f} ms" for name, waited in stretch.operators)
        yield (
            f"  {stretch.waiting_ns / 1e6:10.3f} ms of {(stretch.end_ns - stretch.start_ns) / 1e6:.3f} ms, "
            f"{stretch.records} records: {named}"
        )


def synchronisation_lines(waits: Synchronisations, count: int) -> Iterator[str]:
    """The places where the host waited for the device, at most ``count``."""
    if not waits.points:
        return
    per, unit = (waits.num_steps, " a step") if waits.num_steps else (1, "")
    cost = (
        f"device idle because of them, then host time in them{unit}"
        if waits.has_device
        else f"no device was recorded: host time in operators that would wait for one{unit}"
    )
    yield f"where the host waits for the device ({cost})"
    for point in waits.points[:count]:
        device = f"{point.device_ns / per / 1e6:10.3f} ms  " if waits.has_device else "  "
        # Where Python frames were recorded and none is the training code's, there is no line to tell.
        place = point.frame or ("" if waits.hint else "no frame of the training code around it")
        called = " > ".join((*point.operators, point.call))
        inside = f", in {_short(point.range)}" if point.range is not None else ""
        whose = " (waits for the thread that called)" if point.frame_is_callers else ""
        at = f"  at {place}{whose}" if place else ""
        yield (
            f"  {device}{point.waited_ns / per / 1e6:10.3f} ms {point.calls / per:8.1f}x  {called}{inside}{at}"
        )
    if waits.left_out:
        yield f"  {waits.left_out:,} shorter waits are not in this list"
    if waits.hint is not None:
        yield f"  {waits.hint}"


def _short(name: str) -> str:
    return name if len(name) <= _NAME else name[: _NAME - 1] + "…"
