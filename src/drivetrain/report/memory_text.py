"""What fills memory, as a table: a line for each category, predicted beside measured."""

from collections.abc import Iterator, Sequence

from drivetrain.measure.memory import CATEGORIES, MemoryByCategory, deviations

__all__ = ["bytes_words", "memory_text"]

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_words(nbytes: int) -> str:
    """``1.5 MiB``: three digits and a unit of 1024."""
    value, unit = float(nbytes), 0
    while abs(value) >= 999.5 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{nbytes} bytes" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def memory_text(predicted: MemoryByCategory | None, measured: MemoryByCategory | None) -> str:
    """The table of one rank, and what belongs to it. One of the two may be missing."""
    known = [one for one in (predicted, measured) if one is not None]
    assert known, "nothing is known"
    return "\n".join(_lines(predicted, measured, known))


def _lines(
    predicted: MemoryByCategory | None, measured: MemoryByCategory | None, known: Sequence[MemoryByCategory]
) -> Iterator[str]:
    first = known[0]
    yield f"rank {first.rank} of {first.world_size}: live bytes of one step"
    heads = [f"{one.source:>15}" for one in known]
    yield f"  {'':15}{''.join(heads)}{'deviation':>12}{'at the peak':>15}"
    found = {one.category: one for one in deviations(predicted, measured)} if predicted and measured else {}
    for name in (*CATEGORIES, "total"):
        peaks = [one.peak_bytes if name == "total" else one.own_peaks[name] for one in known]
        cells = "".join(f"{peak:>15,}" for peak in peaks)
        relative = found[name].relative if name in found else None
        at_peak = known[-1].peak_bytes if name == "total" else known[-1].at_peak[name]
        yield f"  {name:15}{cells}{'' if relative is None else f'{relative:+.2%}':>12}{at_peak:>15,}"
    yield "  (of each category its own most; at the peak of all together)"
    for one in known:
        yield f"  {one.source}: {bytes_words(one.peak_bytes)} at most, in {one.phase}, after {one.peak_after}"
        if one.by_layer:
            yield f"    activations by layer: {_layers(one)}"
        if one.resident_bytes is not None and one.peak_resident_bytes is not None:
            yield (
                f"    resident set of the process: {bytes_words(one.resident_bytes)}, at most "
                f"{bytes_words(one.peak_resident_bytes)}, interpreter and libraries included"
            )
        if one.reserved_bytes is not None and one.fragmentation_bytes is not None:
            yield (
                f"    reserved by the allocator: {bytes_words(one.reserved_bytes)}, of which "
                f"{bytes_words(one.fragmentation_bytes)} in no block (fragmentation)"
            )
        for line in one.not_counted:
            yield f"    not counted: {line}"


def _layers(one: MemoryByCategory) -> str:
    """Neighbours that hold the same are one."""
    groups: list[tuple[str, str, int]] = []
    for name, held in one.by_layer.items():
        if (
            groups
            and groups[-1][2] == held
            and name.startswith("layer ")
            and groups[-1][0].startswith("layer ")
        ):
            groups[-1] = (groups[-1][0], name, held)
        else:
            groups.append((name, name, held))
    words = []
    for first, last, held in groups:
        span = "" if first == last else f" to {last.removeprefix('layer ')}"
        words.append(f"{first}{span} {held:,}{' each' if span else ''}")
    return ", ".join(words)
